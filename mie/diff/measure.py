"""How far two results of an operator lie apart."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Index = tuple[int, ...]

PRECISION = ("bfloat16", "float16", "float32", "float64")
"""Dtypes by the bits of their mantissa, 8, 11, 24 and 53: the coarsest first."""


@dataclass(frozen=True, kw_only=True)
class Errors:
    """The largest differences between two arrays of one shape."""

    largest: float
    """The largest finite magnitude in the reference."""
    max_abs: float
    max_rel: float
    """``max_abs`` over ``largest``: an element near zero, where sums cancel, counts no more than
    its neighbours."""
    max_ulp: int
    """Numbers of the coarser dtype between two elements, both rounded to it; large where an element
    is near zero. Elements that are not finite do not count."""
    worst: Index
    """Where the largest difference is."""
    first: Index | None
    """The first element past the limit, in memory order."""


def coarser(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of the two that has the shorter mantissa."""
    return min(a, b, key=lambda dtype: PRECISION.index(dtype.name))


def errors_between(a: NDArray[Any], b: NDArray[Any], limit: float) -> Errors:
    """What sets ``b`` apart from the reference ``a``; ``limit`` is for the relative difference.

    Equal infinities, and two NaNs in one place, are no difference; any other meeting with one of
    them is an infinite one.
    """
    assert a.shape == b.shape, f"the reference gave shape {a.shape}, the other {b.shape}"
    if not a.size:  # a step that samples nothing takes no rows
        return Errors(largest=0.0, max_abs=0.0, max_rel=0.0, max_ulp=0, worst=(), first=None)
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        difference = np.abs(x - y)
    difference[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    difference[np.isnan(difference)] = math.inf
    largest = float(np.abs(x).max(initial=0.0, where=np.isfinite(x)))
    max_abs = float(difference.max(initial=0.0))
    past = np.flatnonzero(difference > limit * largest)
    return Errors(
        largest=largest,
        max_abs=max_abs,
        max_rel=relative(max_abs, largest),
        max_ulp=_max_ulp(x, y, coarser(a.dtype, b.dtype)),
        worst=_index(int(difference.argmax()), a.shape),
        first=_index(int(past[0]), a.shape) if len(past) else None,
    )


def relative(difference: float, largest: float) -> float:
    """The quotient; nothing of nothing is 0, and something of nothing is infinite."""
    return difference / largest if largest else (math.inf if difference else 0.0)


def _index(flat: int, shape: tuple[int, ...]) -> Index:
    return tuple(int(i) for i in np.unravel_index(flat, shape))


def _max_ulp(x: NDArray[np.float64], y: NDArray[np.float64], dtype: np.dtype[Any]) -> int:
    finite = np.isfinite(x) & np.isfinite(y)
    if not finite.any():
        return 0
    a, b = _ordinals(x[finite], dtype), _ordinals(y[finite], dtype)
    # The true distance is below 2**64, so that a wrapped int64 still holds it.
    return int(np.where(a > b, a - b, b - a).view(np.uint64).max())


def _ordinals(x: NDArray[np.float64], dtype: np.dtype[Any]) -> NDArray[np.int64]:
    """The place of each number among those of ``dtype``, 0 being 0; neighbours differ by 1."""
    with np.errstate(over="ignore"):
        bits = x.astype(dtype).view(f"i{dtype.itemsize}").astype(np.int64)
    magnitude = bits & ((1 << (8 * dtype.itemsize - 1)) - 1)
    return np.where(bits < 0, -magnitude, magnitude)
