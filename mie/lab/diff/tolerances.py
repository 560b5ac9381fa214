"""Measure two results of an operator, and judge them by ``tolerances.json`` with its reasons.

The limits are for accumulated errors: B computes each operator from its own earlier results,
through all layers. They limit the largest difference in a row (one token) over the row's largest
magnitude. In float32 they are five times the errors of the bundled model and of random models of
every family between NumPy and the emulated kernels. In 16 bits they are about twice the errors. The
second table has narrower limits for one operator alone with equal inputs.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Index = tuple[int, ...]

PRECISION = ("bfloat16", "float16", "float32", "float64")
"""Dtypes by the bits of their mantissa, 8, 11, 24 and 53, coarsest first."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The largest differences between two arrays of one shape [T, ...]."""

    max_abs: float
    max_rel: float
    """``max_abs`` over the largest finite magnitude in the reference."""
    row_rel: float
    """The largest difference over the largest magnitude of its row (one token); it is judged.

    An element near zero, where sums cancel, counts no more than its neighbours. A row of small
    numbers counts as much as one of large ones.
    """
    max_ulp: int
    """Largest number of steps of the coarser dtype between two elements, both rounded to it.

    It is large where an element is near zero. Elements that are not finite do not count.
    """
    worst: Index
    """Where the difference is largest relative to its row."""
    first: Index | None
    """The first element past the limit, in memory order."""


def coarser(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype with the shorter mantissa."""
    return min(a, b, key=lambda dtype: PRECISION.index(dtype.name))


def errors_between(a: NDArray[Any], b: NDArray[Any], limit: float) -> Errors:
    """Measure ``b`` against the reference ``a``.

    ``limit`` applies to the difference of an element over the largest magnitude in its row. Equal
    infinities, and two NaNs in one place, are no difference. Any other difference that involves one
    of them is infinite.
    """
    assert a.shape == b.shape, f"the reference gave shape {a.shape}, the other {b.shape}"
    if not a.size:  # a step that samples nothing has no rows
        return Errors(max_abs=0.0, max_rel=0.0, row_rel=0.0, max_ulp=0, worst=(), first=None)
    x, y = (each.astype(np.float64).reshape(_num_rows(each), -1) for each in (a, b))
    difference, largest = differences(x, y), largest_of_rows(x)
    relative = quotients(difference, largest)
    past = np.flatnonzero(relative > limit)
    return Errors(
        max_abs=float(difference.max()),
        max_rel=float(quotients(difference.max(), largest.max())),
        row_rel=float(relative.max()),
        max_ulp=_max_ulp(x, y, coarser(a.dtype, b.dtype)),
        worst=_index(int(relative.argmax()), a.shape),
        first=_index(int(past[0]), a.shape) if len(past) else None,
    )


def _num_rows(array: NDArray[Any]) -> int:
    return 1 if array.ndim == 1 else len(array)


def differences(x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return |x - y|, or 0 or infinity between numbers that are not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference: NDArray[np.float64] = np.abs(x - y)
    difference[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    difference[np.isnan(difference)] = math.inf
    return difference


def largest_of_rows(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the largest finite magnitude of each row [T, 1]."""
    largest: NDArray[np.float64] = np.abs(x).max(
        axis=1, initial=0.0, where=np.isfinite(x), keepdims=True
    )
    return largest


def quotients(difference: Any, largest: Any) -> NDArray[np.float64]:
    """Return the quotients, where 0 / 0 is 0 and x / 0 is infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.divide(difference, largest)
    return np.where(np.equal(difference, 0), 0.0, quotient)


def _index(flat: int, shape: tuple[int, ...]) -> Index:
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def _max_ulp(x: NDArray[np.float64], y: NDArray[np.float64], dtype: np.dtype[Any]) -> int:
    finite = np.isfinite(x) & np.isfinite(y)
    if not finite.any():
        return 0
    a, b = _ordinals(x[finite], dtype), _ordinals(y[finite], dtype)
    # The true distance is below 2**64, so a wrapped int64 still holds it.
    return int(np.where(a > b, a - b, b - a).view(np.uint64).max())


def _ordinals(x: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """Return the rank of each number among the numbers of ``dtype``, where 0 has rank 0."""
    with np.errstate(over="ignore"):
        bits = x.astype(dtype).view(f"i{dtype.itemsize}").astype(np.int64)
    magnitude = bits & ((1 << (8 * dtype.itemsize - 1)) - 1)
    return np.where(bits < 0, -magnitude, magnitude)


class Tolerance(NamedTuple):
    """Limits of the relative difference, for each class of operators."""

    embed: float
    """Rows of the embedding. Each side rounds them at most once."""
    layers: float
    """Norms, products, rotations and taken rows: sums that accumulate earlier errors."""
    gates: float
    """`paged_attention`, `silu_mul` and `gelu_mul`. They use exponentials.

    They turn an absolute error of the score into a relative one of the result.
    """
    logits: float
    """The head, and the result of the step."""
    reason: str


_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TOLERANCES, ALONE, QUANTIZED = (
    MappingProxyType({name: Tolerance(**row) for name, row in table.items()})
    for table in _TABLES.values()
)
"""Three tables of limits, by the coarser dtype of the two. Its rounding causes the difference.

The second is for operators that all have A's inputs (``isolate``), so that no errors accumulate.
The third is for quantised caches, where its limits exceed the dtype's limits.
"""

CLASSES = MappingProxyType(
    {
        "embed": "embed",
        "paged_attention": "gates",
        "silu_mul": "gates",
        "gelu_mul": "gates",
        "gated_mlp": "gates",
        "head": "logits",
        "soft_cap": "logits",
        "logits": "logits",
    }
)
"""The class of an operator. All other operators are ``layers``."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits that the table gives for two sides."""

    kv_cache_dtypes: tuple[str, str] = ("auto", "auto")
    isolated: bool = False

    def of(self, a: np.dtype[Any], b: np.dtype[Any], operator: str) -> float:
        """Return the limit for results in these dtypes, over their row's largest magnitude."""
        limit: float = getattr(self.row(a, b), CLASSES.get(operator, "layers"))
        if self.cache is not None and not (self.isolated and operator != "paged_attention"):
            limit = max(limit, getattr(self.cache, CLASSES.get(operator, "layers")))
        return limit

    def reason(self, a: np.dtype[Any], b: np.dtype[Any]) -> str:
        """Return the reason for the limits."""
        return " ".join([self.row(a, b).reason, *([self.cache.reason] if self.cache else [])])

    def row(self, a: np.dtype[Any], b: np.dtype[Any]) -> Tolerance:
        """Return the row of the coarser dtype."""
        return (ALONE if self.isolated else TOLERANCES)[coarser(a, b).name]

    @property
    def cache(self) -> Tolerance | None:
        """The row of the coarser cache, if one is quantised."""
        names = {name for name in self.kv_cache_dtypes if name != "auto"}
        if not names:
            return None
        is_same = len(names) == 1 and "auto" not in self.kv_cache_dtypes
        if is_same:
            return QUANTIZED[f"{names.pop()} on both sides"]
        return max((QUANTIZED[name] for name in names), key=lambda row: row.layers)
