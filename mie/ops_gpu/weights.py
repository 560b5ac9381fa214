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
from mie.ops.weights.quantised import Form, Part, QuantisedRows, Rows
from mie.ops_gpu.arrays import rounded

if TYPE_CHECKING:
    from mie.ops_gpu.adapters import Slots

TILE, UNIT = 16, 64
"""Outputs and inputs that a warp takes at a time."""

MAX_ELEMENTS = 1 << 32
"""Most elements of a matrix, because the kernels count them in 32 bits."""

CODES = {"int4": "nibbles", "int8": "int8", "float8_e4m3fn": "e4m3"}
"""The kernels' names of the types of codes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantisedMatrix:
    """Packed codes [N, K], and scales and offsets [ceil(N / 16), ceil(K / group), 16]."""

    form: Form
    shape: tuple[int, int]
    codes: Array  # [ceil(N / 16), bytes], uint8
    scales: Array  # float32
    offsets: Array | None

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
        """The kernels' arguments: codes, scales and offsets."""
        return self.codes, self.scales, self.offsets

    @property
    def parameters(self) -> tuple[str, ...]:
        """The kernels' template parameters: codes, span, and whether there are offsets."""
        has_offsets = "true" if self.form.has_offsets else "false"
        return CODES[self.form.codes], str(self.span), has_offsets


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
    num_tiles, depth = ceil_div(shape[0], TILE), shape[1]
    code_bytes = TILE * UNIT // (2 if form.codes == "int4" else 1)
    per_group = 8 if form.has_offsets else 4
    groups, units = ceil_div(depth, form.group), ceil_div(depth, UNIT)
    return num_tiles * (units * code_bytes + groups * TILE * per_group)


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
    num_tiles, groups = ceil_div(shape[0], TILE), ceil_div(shape[1], form.group)
    units = ceil_div(shape[1], UNIT)
    unit_bytes = TILE * UNIT // (2 if form.codes == "int4" else 1)
    codes = xp.empty((num_tiles, units * unit_bytes), np.uint8)
    scales = xp.empty((num_tiles, groups, TILE), np.float32)
    offsets = xp.empty((num_tiles, groups, TILE), np.float32) if form.has_offsets else None
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
        codes[tile:end] = xp.asarray(pack(some))
        scales[tile:end] = xp.asarray(_by_tile(some.scales))
        if offsets is not None:
            assert some.offsets is not None
            offsets[tile:end] = xp.asarray(_by_tile(some.offsets))
        tile = end
    return QuantisedMatrix(form=form, shape=shape, codes=codes, scales=scales, offsets=offsets)


def _by_tile(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return values [n, G] as [ceil(n / 16), G, 16], with zeros past the last row."""
    num_rows, groups = values.shape
    padded = np.zeros((ceil_div(num_rows, TILE) * TILE, groups), np.float32)
    padded[:num_rows] = values
    return np.ascontiguousarray(padded.reshape(-1, TILE, groups).transpose(0, 2, 1))


def pack(rows: QuantisedRows) -> NDArray[np.uint8]:
    """Return the codes of rows [n, K] in the order of kernels/weights.cuh: [n / 16, bytes]."""
    form, (num_rows, depth) = rows.form, rows.shape
    is_int4 = form.codes == "int4"
    zero = 8 if is_int4 and not form.has_offsets else 0
    tiles, units = ceil_div(num_rows, TILE), ceil_div(depth, UNIT)
    codes = np.full((tiles * TILE, units * UNIT), zero, np.uint8)
    raw = rows.codes.view(np.uint8)  # of negative integers the two's complement
    codes[:num_rows, :depth] = raw + np.uint8(zero)
    if min(form.group, UNIT) == 16:  # tile, half, g, unit, chunk, step, t, j
        split = codes.reshape(tiles, 2, 8, units, 2, 2, 4, 4)
    else:
        split = codes.reshape(tiles, 2, 8, units, 2, 4, 2, 4).swapaxes(5, 6)
    if not is_int4:  # tile, unit, chunk, g, t, step, half, j
        return np.ascontiguousarray(split.transpose(0, 3, 4, 2, 6, 5, 1, 7)).reshape(tiles, -1)
    pairs = split.reshape(tiles, 2, 8, units, 2, 2, 4, 2, 2)  # j is a pair, and its place there
    nibbles = pairs.transpose(0, 3, 2, 6, 4, 5, 8, 7, 1).reshape(tiles, -1, 2)
    packed: NDArray[np.uint8] = nibbles[..., 0] | nibbles[..., 1] << np.uint8(4)
    return packed
