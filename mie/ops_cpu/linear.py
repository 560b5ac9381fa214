"""Multiply rows by a weight matrix, plain or in tiles, with threads.

A `PlainMatrix` is one array [K, N], and BLAS chooses its kernel by the number of rows. So a row's
last bits depend on how many other rows are in the step.

A `TiledMatrix` is cut into tiles [K, 64], and rows are multiplied a group at a time. Every product
has a shape that gives the same bits (`products.Groups`), so a row never depends on the others. With
AVX-512, OpenBLAS multiplies such small matrices without copying them first, and tiles are the
faster form too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops.packed import PackedMatrix
from mie.ops_cpu.products import WIDTH, Groups, parts_of
from mie.ops_cpu.weights import aligned_empty, stored_dtype, widened
from mie.ops_cpu.workers import Workers

BYTES_PER_THREAD = 1 << 20
"""Bytes of weights from which on another thread saves more than its hand-over costs."""
ROWS_PER_READ = 4
"""Rows whose arithmetic takes about as long as reading the weights."""


class Matrix(Protocol):
    """A matrix [K, N] and its bias [N]."""

    nbytes: int

    def apply(self, x: Floats, residual: Floats | None) -> Floats:
        """Compute `ops.linear.linear` of x [T, K], as a new array [T, N]."""


class PlainMatrix:
    """Weights [K, N] as one array. The threads share its columns."""

    def __init__(self, weight: Floats, bias: Floats | None, workers: Workers) -> None:
        self.weight, self.bias = weight, bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._workers = workers

    @classmethod
    def load(
        cls,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        bias: NDArray[Any] | None,
        dtype: np.dtype[Any],
        workers: Workers,
    ) -> PlainMatrix:
        """Load the rows of a checkpoint's (N, K), block by block."""
        weight: Floats = aligned_empty(shape[::-1], dtype)
        column = 0
        for block in blocks:
            weight[:, column : column + len(block)] = block.T
            column += len(block)
        return cls(weight, None if bias is None else bias.astype(dtype), workers)

    def apply(self, x: Floats, residual: Floats | None) -> Floats:
        """Compute `ops.linear.linear`."""
        y: Floats = np.empty((len(x), self.weight.shape[1]), x.dtype)

        def work(columns: slice) -> None:
            np.matmul(x, self.weight[:, columns], out=y[:, columns])
            _add(y[:, columns], self.bias, residual, columns)

        self._workers.share(work, _shares(y.shape[1], self.nbytes, len(x), self._workers))
        return y


class PackedTiles:
    """The tiles [tiles, K, 64] of a packed matrix [N, K], each widened when it is taken.

    A tile is the transpose of rows. BLAS multiplies by it as fast, and a copy would take longer
    than the product.
    """

    def __init__(self, matrix: PackedMatrix, numbers: range | None = None) -> None:
        num_rows, num_columns = matrix.shape
        self._matrix = matrix
        self._numbers = range(ceil_div(num_rows, WIDTH)) if numbers is None else numbers
        self.shape = len(self._numbers), num_columns, WIDTH
        self.nbytes = 4 * len(self) * num_columns * WIDTH
        """The bytes once widened, which tell how much work they are."""

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, own: slice) -> PackedTiles:
        return PackedTiles(self._matrix, self._numbers[own])

    def __iter__(self) -> Iterator[Floats]:
        num_rows, _ = self._matrix.shape
        for number in self._numbers:
            rows = self._matrix.rows(number * WIDTH, min((number + 1) * WIDTH, num_rows))
            yield _padded(rows, WIDTH).T


class TiledMatrix:
    """Weights as tiles [ceil(N / 64), K, 64], which the threads share. Columns past N hold zeros.

    The tiles may have 16 bits, or be packed. Each is then widened just before it is multiplied.
    """

    def __init__(
        self,
        tiles: NDArray[Any] | PackedTiles,
        num_outputs: int,
        bias: NDArray[Any] | None,
        groups: Groups,
        workers: Workers,
    ) -> None:
        if bias is not None:
            bias = np.pad(bias.astype(groups.dtype), (0, len(tiles) * WIDTH - len(bias)))
        self.tiles, self.num_outputs, self.bias = tiles, num_outputs, bias
        self.nbytes = tiles.nbytes + (0 if bias is None else bias.nbytes)
        self._parts = parts_of(tiles.shape[1])
        self._groups = groups
        self._workers = workers

    @classmethod
    def load(
        cls,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        bias: NDArray[Any] | None,
        groups: Groups,
        workers: Workers,
        weight_dtype: str = "auto",
    ) -> TiledMatrix:
        """Load the rows of a checkpoint's (N, K), block by block."""
        num_outputs, num_inputs = shape
        tiles: NDArray[Any] = np.empty(0)
        column = 0
        for block in blocks:
            stored = stored_dtype(block, weight_dtype, groups.dtype)
            if column == 0:
                tiles = aligned_empty((ceil_div(num_outputs, WIDTH), num_inputs, WIDTH), stored)
                tiles[-1] = 0
            _fill(tiles, block, column)
            column += len(block)
        return cls(tiles, num_outputs, bias, groups, workers)

    def apply(self, x: Floats, residual: Floats | None) -> Floats:
        """Compute `ops.linear.linear`."""
        num_tiles, num_inputs, _ = self.tiles.shape
        num_groups, size = self._groups.cut(len(x), num_inputs)
        groups = _padded(x, num_groups * size).reshape(num_groups, size, num_inputs)
        y: Floats = np.empty((num_groups * size, num_tiles * WIDTH), x.dtype)

        def work(own: slice) -> None:
            columns = slice(own.start * WIDTH, own.stop * WIDTH)
            self._multiply(groups, self.tiles[own], y[:, columns])
            _add(y[:, columns], self.bias, residual, columns)

        self._workers.share(work, _shares(num_tiles, self.nbytes, len(x), self._workers))
        return np.ascontiguousarray(y[: len(x), : self.num_outputs])

    def _multiply(self, groups: Floats, tiles: NDArray[Any] | PackedTiles, y: Floats) -> None:
        """Write the product of all groups [groups, rows, K] and some tiles to y [rows, columns]."""
        num_groups, size, _ = groups.shape
        by_tile = y.reshape(num_groups, size, len(tiles), WIDTH).transpose(2, 0, 1, 3)
        if isinstance(tiles, np.ndarray) and tiles.dtype == y.dtype:
            self._product(groups, tiles, by_tile)
            return
        for tile, out in zip(tiles, by_tile, strict=True):
            self._product(groups, widened(tile, y.dtype)[None], out[None])

    def _product(self, groups: Floats, tiles: Floats, out: Floats) -> None:
        """Write the products of tiles and groups to out [tiles, groups, rows, 64]."""
        for first, last in self._parts:
            own = groups[..., first:last], tiles[:, None, first:last]
            # NumPy's own order of products would be that of the output's memory. In this order, a
            # tile stays in the CPU cache while all groups are multiplied.
            if first == 0:
                np.matmul(*own, out=out, order="C")
            else:
                out += np.matmul(*own, order="C")


def _fill(tiles: NDArray[Any], rows: NDArray[Any], column: int) -> None:
    """Write rows of a checkpoint's (N, K) to the columns of the tiles from ``column`` on."""
    end = column + len(rows)
    for first, last in pairwise([column, *range((column // WIDTH + 1) * WIDTH, end, WIDTH), end]):
        tile, at = divmod(first, WIDTH)
        tiles[tile, :, at : at + last - first] = rows[first - column : last - column].T


def columns_of(tiles: NDArray[Any], columns: Ints) -> NDArray[Any]:
    """Return columns of the matrix [K, N] of these tiles, as rows [T, K]."""
    tile, column = np.divmod(columns, WIDTH)
    return tiles[tile, :, column]


def _padded(x: Floats, num_rows: int) -> Floats:
    """Return x with rows of zeros up to this number."""
    if len(x) == num_rows and x.flags.c_contiguous:
        return x
    rows = np.zeros((num_rows, x.shape[1]), x.dtype)
    rows[: len(x)] = x
    return rows


def _shares(number: int, num_bytes: int, num_rows: int, workers: Workers) -> list[slice]:
    """Cut ``number`` columns or tiles of this many bytes into a slice for each thread that pays."""
    work = num_bytes * ceil_div(num_rows, ROWS_PER_READ)
    num_shares = max(1, min(work // BYTES_PER_THREAD, workers.num_threads, number))
    bounds = [number * i // num_shares for i in range(num_shares + 1)]
    return [slice(first, last) for first, last in pairwise(bounds)]


def _add(y: Floats, bias: Floats | None, residual: Floats | None, columns: slice) -> None:
    """Add these columns of the bias and the residual to y, which may have padding."""
    if bias is not None:
        y += bias[columns]
    if residual is not None:
        own = residual[:, columns]
        y[: len(own), : own.shape[1]] += own
