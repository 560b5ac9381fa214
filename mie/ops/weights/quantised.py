"""Define matrices of small numbers in groups, and their exact float32 values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops.linear import linear

Codes = Literal["int4", "int8", "float8_e4m3fn"]
ScaleBits = Literal[8, 16, 32]

GROUPS = (16, 32, 64, 128)
"""Inputs that may share a scale."""
UNIT_INPUTS = 256
"""Number of inputs with scales that may share a unit, as in super-blocks of GGUF's K types."""
SMALLEST_SCALE = np.float32(2.0**-98)
"""The smallest magnitude of a scale of int4, except zero.

Kernels divide such scales by up to 2**28. This is exact from here on.
"""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a matrix keeps its weights: the type of a code, and the inputs that share a scale."""

    codes: Codes
    group: int
    has_offsets: bool
    scale_bits: ScaleBits = 32
    """Scales and offsets are float32, float16, or 8-bit multiples of units.

    `UNIT_INPUTS` inputs share a unit for scales and one for offsets, and K is a multiple of them.
    """
    has_six_bits: bool = False
    """Whether codes of int8 are -32 … 31, or 0 … 63 with offsets. Some backends keep six bits."""

    @property
    def has_units(self) -> bool:
        """Whether scales and offsets are multiples of units."""
        return self.scale_bits == 8

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix. The last group may be short."""
        groups = ceil_div(columns, self.group)
        code_bytes = self.group // 2 if self.codes == "int4" else self.group
        scale_bytes = groups * self.scale_bits // 8
        unit_bytes = 4 * columns // UNIT_INPUTS if self.has_units else 0
        return rows * (groups * code_bytes + (scale_bytes + unit_bytes) * (1 + self.has_offsets))

    def __str__(self) -> str:
        """Return a phrase such as "int4 in groups of 32 with offsets, scales of 8 bits"."""
        offsets = " with offsets" if self.has_offsets else ""
        scales = "" if self.scale_bits == 32 else f", scales of {self.scale_bits} bits"
        return f"{self.codes} in groups of {self.group}{offsets}{scales}"


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedRows:
    """Whole rows of a matrix [N, K], where G = ceil(K / group):

        w[n, k] = codes[n, k] * scales[n, k // group] + offsets[n, k // group]

    Products and sums are float32, each rounded once. With offsets, every product must be exact, so
    that a fused multiply-add gives the same weights. Codes of "int4" are -8 … 7 without offsets and
    0 … 15 with them, and their scales are 0 or at least `SMALLEST_SCALE` in magnitude. A form with
    scales of 16 bits promises that each scale and offset is a float16. A form with units promises
    that each is an integer, -128 … 127, times its unit.
    """

    form: Form
    codes: NDArray[Any]  # [n, K], int8 or float8_e4m3fn
    scales: Floats  # [n, G], float32
    offsets: Floats | None = None  # [n, G], float32
    scale_units: Floats | None = None  # [n, K / UNIT_INPUTS], float32
    offset_units: Floats | None = None  # [n, K / UNIT_INPUTS], float32

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and K."""
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def nbytes(self) -> int:
        """The bytes that the rows take in their form."""
        return self.form.num_bytes(*self.shape)

    @property
    def has_tiny_scale(self) -> bool:
        """Whether a scale is below `SMALLEST_SCALE` where that matters."""
        if self.form.codes != "int4":
            return False
        sizes = np.abs(self.scales)
        return bool(((sizes < SMALLEST_SCALE) & (sizes > 0)).any())

    def __len__(self) -> int:
        return len(self.codes)

    def kept(self) -> dict[str, NDArray[Any]]:
        """Return all arrays, by name, with scales and offsets in as many bits as the form has."""
        planes = {name: getattr(self, name) for name in _PLANES if getattr(self, name) is not None}
        if self.form.scale_bits == 16:
            planes |= {name: planes[name].astype(np.float16) for name in _UNITS if name in planes}
        for values, units in _UNITS.items():
            if units in planes:
                planes[values] = _in_units(planes[values], planes[units])
        return planes

    @classmethod
    def of_kept(cls, form: Form, planes: Mapping[str, NDArray[Any]]) -> "QuantisedRows":
        """Return the rows of the arrays that `kept` returns."""
        wide = dict(planes)
        if form.scale_bits == 16:
            wide |= {name: wide[name].astype(np.float32) for name in _UNITS if name in wide}
        for values, units in _UNITS.items():
            if units in planes:
                per_unit = planes[values].shape[1] // planes[units].shape[1]
                with np.errstate(invalid="ignore"):  # infinity times zero; it is refused later
                    wide[values] = planes[values] * planes[units].repeat(per_unit, axis=1)
        return cls(form=form, **wide)

    def take(self, rows: slice | Ints) -> "QuantisedRows":
        """Return some of the rows, as a copy."""
        return self._mapped(lambda name: getattr(self, name)[rows].copy())

    @staticmethod
    def joined(blocks: Sequence["QuantisedRows"]) -> "QuantisedRows":
        """Return the rows of blocks of one form as one block."""
        return blocks[0]._mapped(lambda name: np.concatenate([getattr(b, name) for b in blocks]))

    def _mapped(self, plane: Callable[[str], Any]) -> "QuantisedRows":
        there = (name for name in _PLANES if getattr(self, name) is not None)
        return replace(self, **{name: plane(name) for name in there})


_UNITS = {"scales": "scale_units", "offsets": "offset_units"}
_PLANES = ("codes", *_UNITS, *_UNITS.values())

Rows = NDArray[Any] | QuantisedRows
"""Whole rows of a matrix: floats, or codes with their scales."""

Part = tuple[int, Form | None]
"""Consecutive rows of a matrix: their number, and their form. None: floats."""


def dequantise(rows: QuantisedRows) -> Floats:
    """Return the weights [n, K] in float32."""
    weights: Floats = rows.codes.astype(np.float32)
    num_whole = weights.shape[1] // rows.form.group
    end = num_whole * rows.form.group
    groups = weights[:, :end].reshape(len(rows), num_whole, rows.form.group)  # a view
    groups *= rows.scales[:, :num_whole, None]
    weights[:, end:] *= rows.scales[:, num_whole:]  # a short last group, or nothing
    if rows.offsets is not None:
        groups += rows.offsets[:, :num_whole, None]
        weights[:, end:] += rows.offsets[:, num_whole:]
    return weights


def _in_units(values: Floats, units: Floats) -> NDArray[np.int8]:
    """Return the numbers [n, G] that, times units [n, U], are scales or offsets."""
    wide = units.repeat(values.shape[1] // units.shape[1], axis=1)
    signs = np.where(np.signbit(values) == np.signbit(wide), np.float32(1), np.float32(-1))
    numbers = np.divide(values, wide, out=signs, where=wide != 0)  # a zero keeps its sign
    multiples: NDArray[np.int8] = np.rint(numbers).astype(np.int8)
    return multiples


def quantise(weights: NDArray[Any], form: Form) -> QuantisedRows:
    """Return weights [n, K] rounded to the nearest codes of an integer form without offsets.

    The number of largest magnitude in a group gets the lowest code of 4 bits, -8, or 127 of 8 bits.
    (-8 has no positive counterpart, so the scale of 4 bits has the opposite sign of that number.)
    Scales of 4 bits below `SMALLEST_SCALE` become zeros. A number that is not finite gives a scale
    that is not finite. Source: ``quantize_row_q4_0_ref`` and ``quantize_row_q8_0_ref`` in ggml's
    ggml-quants.c.
    """
    assert form.codes != "float8_e4m3fn", form
    assert not form.has_offsets, form
    num_rows, num_columns = weights.shape
    num_groups = ceil_div(num_columns, form.group)
    padded = np.zeros((num_rows, num_groups * form.group), np.float32)
    padded[:, :num_columns] = weights
    groups = padded.reshape(num_rows, num_groups, form.group)
    places = np.abs(groups).argmax(axis=-1, keepdims=True)  # of a NaN, if there is one
    largest = np.take_along_axis(groups, places, axis=-1)
    is_int4 = form.codes == "int4"
    low, high = (-8, 7) if is_int4 else (-127, 127)
    scales = largest / np.float32(low) if is_int4 else np.abs(largest) / np.float32(high)
    if is_int4:
        scales[np.abs(scales) < SMALLEST_SCALE] = 0
    with np.errstate(invalid="ignore", over="ignore"):
        groups /= np.where(scales == 0, np.float32(1), scales)
        np.clip(np.rint(groups, out=groups), low, high, out=groups)
        codes = groups.astype(np.int8).reshape(num_rows, -1)[:, :num_columns]
    return QuantisedRows(form=form, codes=codes, scales=scales[..., 0])


def linear_quantised(
    x: Floats, weight: QuantisedRows, bias: Floats | None = None, residual: Floats | None = None
) -> Floats:
    """Return ``x @ w.T + bias + residual`` as a new array [T, N], with the weights w [N, K].

    x [T, K], bias [N], residual [T, N]; all of one float dtype, to which w is widened.
    """
    return linear(x, dequantise(weight).astype(x.dtype, copy=False).T, bias, residual)
