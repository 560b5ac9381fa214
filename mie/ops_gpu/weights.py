"""Keep the matrices of a model on the device: as checkpoints store them, or as packed codes.

kernels/weights.cuh describes the layout of a quantised matrix. A matrix with parts of different
forms, such as the values beside queries and keys in some GGUF files, keeps each part in its own
form.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.errors import UnsupportedModelError
from mie.ops.backend import Array
from mie.ops.weights.quantised import UNIT_INPUTS, Form, Part, QuantisedRows, Rows
from mie.ops_gpu.arrays import rounded

if TYPE_CHECKING:
    from mie.ops_gpu.adapters import Slots

TILE, UNIT = 16, 64
"""Outputs and inputs that a warp takes at a time."""

MAX_ELEMENTS = 1 << 32
"""Most elements of a matrix, because the kernels count them in 32 bits."""

CODES = {"int4": "nibbles", "int8": "int8", "float8_e4m3fn": "e4m3"}
"""The kernels' names of the types of codes. Codes of int8 that have six bits are "sextets"."""

CODE_BITS = {"nibbles": 4, "sextets": 6, "int8": 8, "e4m3": 8}

PLACES = np.array([[4, 8, 6, 10], [0, 12, 2, 14]], np.uint32)
"""The bits of a word with the high two bits of a code, by step and register (kernels/weights.cuh).

The second code of a register is 16 bits higher.
"""


def codes_of(form: Form) -> str:
    """Return the kernels' name of the type of a form's codes."""
    return "sextets" if form.has_six_bits else CODES[form.codes]


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedMatrix:
    """Packed codes [N, K], and records of scales and offsets (kernels/weights.cuh)."""

    form: Form
    shape: tuple[int, int]
    codes: Array  # [ceil(N / 16), bytes], uint8
    scales: Array  # [ceil(N / 16), bytes], uint8
    units: Array | None  # [ceil(N / 16), numbers], float32

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def span(self) -> int:
        """Inputs of a unit that share a scale."""
        return min(self.form.group, UNIT)

    @property
    def shift(self) -> int:
        """The logarithm of the inputs that share a scale."""
        return self.form.group.bit_length() - 1

    @property
    def arrays(self) -> tuple[Array | None, ...]:
        """The kernels' arguments: codes, scales and units."""
        return self.codes, self.scales, self.units

    @property
    def parameters(self) -> tuple[str, ...]:
        """The kernels' template parameters: codes, span, offsets or none, and bits of a scale."""
        has_offsets = "true" if self.form.has_offsets else "false"
        return codes_of(self.form), str(self.span), has_offsets, str(self.form.scale_bits)


Matrix = Array | QuantisedMatrix
"""A matrix [N, K] on the device."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CupyLinear:
    """The parts of a matrix [N, K], one after the other, its bias [N], and its adapters."""

    parts: tuple[Matrix, ...]
    bias: Array | None = None
    slots: Slots | None = None

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def with_places(self) -> Iterator[tuple[Matrix, Array | None, int]]:
        """Yield each part, its bias, and the first of its outputs."""
        places = accumulate(map(len, self.parts), initial=0)
        for part, (first, end) in zip(self.parts, pairwise(places), strict=True):
            yield part, None if self.bias is None else self.bias[first:end], first


def check_size(shape: tuple[int, int], most_outputs: int, backend: str) -> None:
    """Raise `UnsupportedModelError` if a matrix is too large."""
    num_outputs, depth = shape
    if num_outputs > most_outputs or num_outputs * depth >= MAX_ELEMENTS:
        raise UnsupportedModelError(
            f"a matrix has {num_outputs:,} outputs and {depth:,} inputs; the {backend} backend "
            f"takes up to {most_outputs:,} outputs and {MAX_ELEMENTS - 1:,} elements (choose "
            "backend numpy)"
        )


def packed_bytes(shape: tuple[int, ...], form: Form) -> int:
    """Return the bytes of a quantised matrix."""
    codes, scales, units = _tile_bytes(shape[1], form)
    return ceil_div(shape[0], TILE) * (codes + scales + units)


def unit_bytes(form: Form) -> int:
    """Return the bytes of a tile's unit: codes, the record of scales, and the record of units."""
    kinds = TILE * (1 + form.has_offsets)
    scales = kinds * (UNIT // min(form.group, UNIT)) * form.scale_bits // 8
    return TILE * UNIT * CODE_BITS[codes_of(form)] // 8 + scales + 4 * kinds * form.has_units


def _tile_bytes(depth: int, form: Form) -> tuple[int, int, int]:
    """Return the bytes of the codes, scales and units of a tile."""
    kinds, cell = TILE * (1 + form.has_offsets), max(form.group, UNIT)
    codes = ceil_div(depth, UNIT) * TILE * UNIT * CODE_BITS[codes_of(form)] // 8
    scales = ceil_div(depth, cell) * kinds * (cell // form.group) * form.scale_bits // 8
    units = depth // UNIT_INPUTS * kinds * 4 if form.has_units else 0
    return codes, scales, units


def load_parts(
    xp: Any,
    shape: tuple[int, int],
    blocks: Iterable[Rows],
    parts: Sequence[Part],
    dtype: np.dtype[Any],
) -> tuple[Matrix, ...]:
    """Load the rows of a matrix. Neighbours of one form become one part."""
    merged: list[Part] = []
    for count, form in parts or [(shape[0], None)]:
        if merged and merged[-1][1] == form:
            count += merged.pop()[0]
        merged.append((count, form))
    rows = iter(blocks)
    return tuple(_load(xp, (count, shape[1]), rows, form, dtype) for count, form in merged)


def _load(
    xp: Any, shape: tuple[int, int], blocks: Iterator[Rows], form: Form | None, dtype: np.dtype[Any]
) -> Matrix:
    """Load as many rows as ``shape`` has from the blocks."""
    if form is not None:
        return _load_quantised(xp, shape, blocks, form)
    table, row = xp.empty(shape, dtype), 0
    while row < shape[0]:
        block = next(blocks)
        assert isinstance(block, np.ndarray)
        table[row : row + len(block)] = xp.asarray(rounded(block, dtype))
        row += len(block)
    return table


def _load_quantised(
    xp: Any, shape: tuple[int, int], blocks: Iterator[Rows], form: Form
) -> QuantisedMatrix:
    num_tiles, (code_bytes, scale_bytes, unit_bytes) = (
        ceil_div(shape[0], TILE),
        _tile_bytes(shape[1], form),
    )
    codes = xp.empty((num_tiles, code_bytes), np.uint8)
    scales = xp.empty((num_tiles, scale_bytes), np.uint8)
    units = xp.empty((num_tiles, unit_bytes // 4), np.float32) if form.has_units else None
    tile, row = 0, 0
    waiting: list[QuantisedRows] = []
    while row < shape[0]:
        block = next(blocks)
        assert isinstance(block, QuantisedRows)
        waiting.append(block)
        row += len(block)
        some = waiting[0] if len(waiting) == 1 else QuantisedRows.joined(waiting)
        whole = len(some) if row == shape[0] else len(some) // TILE * TILE
        # The block may change when the next one is asked for.
        waiting = [some.take(slice(whole, None))] if whole < len(some) else []
        if not whole:
            continue
        some = some.take(slice(whole))
        end = tile + ceil_div(whole, TILE)
        planes = some.kept()
        codes[tile:end] = xp.asarray(pack(some))
        of_group = (planes["scales"], planes.get("offsets"))
        cell = max(form.group, UNIT)
        spans = cell // form.group
        packed = by_lane(of_group, ceil_div(shape[1], cell), spans).view(np.uint8)
        scales[tile:end] = xp.asarray(packed)
        if units is not None:
            of_unit = (planes["scale_units"], planes.get("offset_units"))
            units[tile:end] = xp.asarray(by_lane(of_unit, shape[1] // UNIT_INPUTS, 1))
        tile = end
    return QuantisedMatrix(form=form, shape=shape, codes=codes, scales=scales, units=units)


def by_lane(kinds: Sequence[NDArray[Any] | None], num_cells: int, spans: int) -> NDArray[Any]:
    """Return the numbers [n, G] of each kind as records of the lanes: [n / 16, numbers].

    A record has a cell's numbers by kind, by half of the outputs, and by span. There are zeros past
    the last row and the last group.
    """
    there = [numbers for numbers in kinds if numbers is not None]
    num_rows, groups = there[0].shape
    tiles = ceil_div(num_rows, TILE)
    padded = np.zeros((len(there), tiles * TILE, num_cells * spans), there[0].dtype)
    for to, numbers in zip(padded, there, strict=True):
        to[:num_rows, :groups] = numbers
    split = padded.reshape(len(there), tiles, 2, 8, num_cells, spans)
    return np.ascontiguousarray(split.transpose(1, 4, 3, 0, 2, 5)).reshape(tiles, -1)


def pack(rows: QuantisedRows) -> NDArray[np.uint8]:
    """Return the codes of rows [n, K] in the order of kernels/weights.cuh: [n / 16, bytes]."""
    form, (num_rows, depth) = rows.form, rows.shape
    bits = CODE_BITS[codes_of(form)]
    zero = 0 if bits == 8 or form.has_offsets else 1 << bits - 1
    tiles, units = ceil_div(num_rows, TILE), ceil_div(depth, UNIT)
    codes = np.full((tiles * TILE, units * UNIT), zero, np.uint8)
    raw = rows.codes.view(np.uint8)  # of negative integers the two's complement
    codes[:num_rows, :depth] = raw + np.uint8(zero)
    if min(form.group, UNIT) == 16:  # tile, half, g, unit, chunk, step, t, j
        split = codes.reshape(tiles, 2, 8, units, 2, 2, 4, 4)
    else:
        split = codes.reshape(tiles, 2, 8, units, 2, 4, 2, 4).swapaxes(5, 6)
    if bits == 8:  # tile, unit, chunk, g, t, step, half, j
        return np.ascontiguousarray(split.transpose(0, 3, 4, 2, 6, 5, 1, 7)).reshape(tiles, -1)
    pairs = split.reshape(tiles, 2, 8, units, 2, 2, 4, 2, 2)  # j is a pair, and its place there
    # tile, unit, g, t, chunk, step, place in the pair, pair, half
    ordered = np.ascontiguousarray(pairs.transpose(0, 3, 2, 6, 4, 5, 8, 7, 1))
    nibbles = (ordered & 15).reshape(tiles, units, -1, 2)
    packed: NDArray[np.uint8] = nibbles[..., 0] | nibbles[..., 1] << np.uint8(4)
    if bits == 6:
        places = PLACES.reshape(2, 1, 2, 2) + np.array([0, 16], np.uint32)[:, None, None]
        high = (ordered >> 4).astype(np.uint32) << places
        words = high.sum(axis=(-4, -3, -2, -1), dtype=np.uint32).reshape(tiles, units, -1)
        packed = np.concatenate([packed, words.view(np.uint8)], axis=-1)
    return packed.reshape(tiles, -1)
