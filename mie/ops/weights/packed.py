"""Keep matrices of quantised rows small in memory, and widen them a tile at a time."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Floats, Ints
from mie.ops.weights.integer import integer_product, round_activations
from mie.ops.weights.quantised import Form, Part, QuantisedRows, Rows, dequantise

TILE_ROWS = 64
"""Rows that are widened at a time."""
_SIGNED_ZERO = 8
"""The nibble of code 0 without offsets, where codes are -8 … 7."""


def pack_nibbles(codes: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Return the codes 0 … 15 [n, K] two in a byte, [n, ceil(K / 2)]. The even one is low."""
    nibbles = codes.view(np.uint8)
    packed: NDArray[np.uint8] = nibbles[:, ::2].copy()
    packed[:, : nibbles.shape[1] // 2] |= nibbles[:, 1::2] << 4
    return packed


def unpack_nibbles(packed: NDArray[np.uint8], num_columns: int) -> NDArray[np.int8]:
    """Return the codes [n, K] of `pack_nibbles`."""
    codes = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=codes[..., 0])
    np.right_shift(packed, 4, out=codes[..., 1])
    return codes.reshape(len(packed), 2 * packed.shape[1])[:, :num_columns].view(np.int8)


class PackedMatrix:
    """A matrix [N, K] with parts of quantised rows or floats. Codes of 4 bits are two in a byte.

    The weights equal the result of `dequantise`, bit for bit. With ``rounds_activations``,
    `integer_linear` computes products with int4 and int8.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        blocks: Iterable[Rows],
        parts: Sequence[Part],
        dtype: np.dtype[Any],
        *,
        rounds_activations: bool = False,
    ) -> None:
        """Load blocks of whole rows. Parts that are floats are kept in ``dtype``."""
        self.shape, self._rounds_activations = shape, rounds_activations
        rows, self._ends = iter(blocks), list(accumulate(number for number, _ in parts))
        assert self._ends[-1] == shape[0], "parts cover the matrix"
        self._parts = [
            _FloatRows((number, shape[1]), rows, dtype)
            if form is None
            else _PackedRows((number, shape[1]), rows, form)
            for number, form in parts
        ]

    @property
    def nbytes(self) -> int:
        """The bytes of codes, scales and offsets."""
        return sum(part.nbytes for part in self._parts)

    def rows(self, first: int, last: int) -> Floats:
        """Return the rows first … last - 1 of the weights in float32."""
        pieces, begin = [], 0
        for end, part in zip(self._ends, self._parts, strict=True):
            if first < end and last > begin:
                pieces.append(part.take(slice(max(first, begin) - begin, min(last, end) - begin)))
            begin = end
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def take(self, rows: Ints) -> Floats:
        """Return these rows [T, K] of a matrix of one part in float32."""
        [part] = self._parts
        return part.take(rows)

    def product(self, x: Floats) -> Floats:
        """Return the product [..., N] of x [..., K] and the weights, a tile of rows at a time.

        `linear_quantised` defines the product, or `integer_linear` if it rounds activations.
        """
        num_outputs = self.shape[0]
        y: Floats = np.empty((*x.shape[:-1], num_outputs), x.dtype)
        if self._rounds_activations:
            self._put_rounded(x, y)
            return y
        for first in range(0, num_outputs, TILE_ROWS):
            last = min(first + TILE_ROWS, num_outputs)
            tile = self.rows(first, last).astype(x.dtype, copy=False).T
            np.matmul(x, tile, out=y[..., first:last])
        return y

    def _put_rounded(self, x: Floats, y: Floats) -> None:
        """Write the product with rounded activations to y, each part by itself."""
        rounded = round_activations(x.reshape(-1, self.shape[1]))
        begin = 0
        for end, part in zip(self._ends, self._parts, strict=True):
            for first in range(begin, end, TILE_ROWS):
                last = min(first + TILE_ROWS, end)
                tile, out = slice(first - begin, last - begin), y[..., first:last]
                if isinstance(part, _PackedRows) and part.is_integer:
                    out[...] = integer_product(rounded, part.quantised(tile)).reshape(out.shape)
                else:
                    np.matmul(x, part.take(tile).T, out=out)
            begin = end


class _FloatRows:
    """Rows [n, K] of floats."""

    def __init__(self, shape: tuple[int, int], blocks: Iterator[Rows], dtype: Any) -> None:
        self._weights = np.empty(shape, dtype)
        self.nbytes = self._weights.nbytes
        for place, block in _placed(shape[0], blocks):
            assert isinstance(block, np.ndarray), "a quantised part has a form"
            self._weights[place] = block

    def take(self, rows: slice | Ints) -> Floats:
        weights: Floats = self._weights[rows].astype(np.float32)
        return weights


class _PackedRows:
    """Rows [n, K] of one form. Codes -8 … 7 are kept as 0 … 15."""

    def __init__(self, shape: tuple[int, int], blocks: Iterator[Rows], form: Form) -> None:
        self._form, (num_rows, self._num_columns) = form, shape
        self.is_integer = form.codes in ("int4", "int8")
        self._is_packed = form.codes == "int4"
        self._shift = np.int8(0 if form.has_offsets else _SIGNED_ZERO)
        self._planes: dict[str, NDArray[Any]] = {}
        for place, block in _placed(num_rows, blocks):
            assert isinstance(block, QuantisedRows), "the part has a form"
            assert block.form == form, (block.form, form)
            planes = block.kept()
            if self._is_packed:
                planes["codes"] = pack_nibbles(block.codes + self._shift)
            for name, plane in planes.items():
                if place.start == 0:
                    self._planes[name] = np.empty((num_rows, plane.shape[1]), plane.dtype)
                self._planes[name][place] = plane
        self.nbytes = sum(plane.nbytes for plane in self._planes.values())

    def take(self, rows: slice | Ints) -> Floats:
        return dequantise(self.quantised(rows))

    def quantised(self, rows: slice | Ints) -> QuantisedRows:
        planes = {name: plane[rows] for name, plane in self._planes.items()}
        if self._is_packed:
            planes["codes"] = unpack_nibbles(planes["codes"], self._num_columns)
            planes["codes"] -= self._shift
        return QuantisedRows.of_kept(self._form, planes)


def _placed(num_rows: int, blocks: Iterator[Rows]) -> Iterator[tuple[slice, Rows]]:
    """Yield blocks and their places until there are this many rows."""
    row = 0
    while row < num_rows:
        block = next(blocks)
        yield slice(row, row + len(block)), block
        row += len(block)
