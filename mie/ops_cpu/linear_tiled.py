"""The plan `tiled`: a matrix as tiles that OpenBLAS multiplies without packing them first.

Weights [K, N] are stored as tiles [N / 64, K, 64], and rows are multiplied 4 at a time: products
(4, K) @ (K, 64), each small enough for OpenBLAS's small-matrix kernels, which read their operands
where they lie. A tile stays in the cache while all rows pass by it, so weights come from memory
once a call. Other products of this size would be packed first, every time.

A row is always multiplied in a group of 4, by the same kernel, in the same order of K, so its
result depends on nothing but itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import CachingAllocator, huge_empty
from mie.ops_cpu.linear import BYTES_PER_THREAD, work_bytes
from mie.ops_cpu.widen import stored, widen
from mie.ops_cpu.workers import Workers

WIDTH = 64
"""Columns of a tile: four AVX-512 registers of float32."""
GROUP = 4
"""Rows of a product: with WIDTH, what the kernel keeps in registers."""
SMALL_PRODUCT = 100**3
"""M · N · K up to which OpenBLAS uses its small-matrix kernels (interface/gemm.c, and
kernel/x86_64/sgemm_small_kernel_permit_skylakex.c); a longer K is cut, and the parts added."""
MOST_INPUTS = 2048
"""K of a product at most: a tile and the rows that pass by it then fit into 1 MiB of L2 cache."""
MAX_ROWS = 512
"""Rows of a call at most; more take several, which read the weights again."""
MOST_TURNS = 4
"""Tasks of a thread: several, so that one that is held up leaves work to the others."""
BYTES_PER_TURN = 1 << 27
"""Weights to read for a task of several, some milliseconds: a task more costs tens of microseconds,
for threads wait for each other's GIL."""
HEAD_START = 5 << 17
"""Weights that the caller has read when the others begin, who wait for the GIL first."""
WORTH_READING_TWICE = 0.95
"""What sharing out rows must make of the largest task: each thread then reads all weights."""


class TiledMatrix:
    """Tiles [ceil(N / 64), K, 64]; columns past N hold zeros."""

    def __init__(
        self, plan: TiledPlan, tiles: NDArray[Any], num_outputs: int, bias: Floats | None
    ) -> None:
        self._plan = plan
        self.tiles = tiles
        self.num_outputs = num_outputs
        self.bias = bias
        """[ceil(N / 64) * 64]"""
        self.parts = _parts(tiles.shape[1])
        """Ranges of K."""
        self.nbytes = tiles.nbytes + (0 if bias is None else bias.nbytes)

    def apply(self, x: Floats, residual: Floats | None) -> Floats:
        """`ops.linear.linear`."""
        return self._plan.apply(x, self, residual)


class TiledPlan:
    """Multiplies by tiles, which the threads share out."""

    name = "tiled"
    is_batch_invariant = True

    def __init__(
        self,
        dtype: np.dtype[Any],
        workers: Workers,
        weight_dtype: str = "auto",
        bytes_per_thread: int = BYTES_PER_THREAD,
        allocator: CachingAllocator | None = None,
    ) -> None:
        self.dtype = dtype
        self._allocator = allocator or CachingAllocator()
        self._weight_dtype = weight_dtype
        self._workers = workers
        self._bytes_per_thread = bytes_per_thread
        self._parts = [np.empty(0, dtype) for _ in range(workers.num_threads)]
        self._wide = [np.empty((0, WIDTH), dtype) for _ in self._parts]

    def load(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        bias: NDArray[Any] | None = None,
    ) -> TiledMatrix:
        """A matrix from the rows of a checkpoint's (N, K), block by block."""
        tiles: NDArray[Any] = np.empty(0)
        column = 0
        for block in blocks:
            block = stored(block, self._weight_dtype, self.dtype)
            if column == 0:
                tiles = _empty_tiles(shape, block.dtype)
            for start, stop in _pieces(column, column + len(block)):
                tile, first = divmod(start, WIDTH)
                piece = block[start - column : stop - column]
                tiles[tile, :, first : first + len(piece)] = piece.T
            column += len(block)
        if bias is not None:
            bias = np.pad(bias.astype(self.dtype), (0, len(tiles) * WIDTH - len(bias)))
        return TiledMatrix(self, tiles, shape[0], bias)

    def apply(self, x: Floats, matrix: TiledMatrix, residual: Floats | None) -> Floats:
        """`ops.linear.linear`."""
        num_rows, num_tiles = len(x), len(matrix.tiles)
        padded_shape = -(-num_rows // GROUP) * GROUP, num_tiles * WIDTH
        y = self._allocator.empty(padded_shape, self.dtype)
        if num_rows <= MAX_ROWS:
            self._multiply(x, matrix, y, residual)
        else:
            for start in range(0, num_rows, MAX_ROWS):
                rows = slice(start, start + MAX_ROWS)
                own = None if residual is None else residual[rows]
                self._multiply(x[rows], matrix, y[rows], own)
        result: Floats = y[:num_rows]
        if num_tiles * WIDTH > matrix.num_outputs:
            result = np.ascontiguousarray(result[:, : matrix.num_outputs])
        return result

    def _groups(self, x: Floats) -> Floats:
        """x as [groups, 4, K], with rows of zeros in the end."""
        num_rows, num_inputs = x.shape
        num_groups = -(-num_rows // GROUP)
        if num_rows % GROUP or not x.flags.c_contiguous:
            padded = self._allocator.empty((num_groups * GROUP, num_inputs), self.dtype)
            padded[:num_rows] = x
            padded[num_rows:] = 0
            x = padded
        return x.reshape(num_groups, GROUP, num_inputs)

    def _multiply(self, x: Floats, matrix: TiledMatrix, y: Floats, residual: Floats | None) -> None:
        """y [rows of whole groups, columns of whole tiles]"""
        groups, tiles = self._groups(x), matrix.tiles
        out = y.reshape(len(groups), GROUP, len(tiles), WIDTH).transpose(2, 0, 1, 3)
        num_bytes = work_bytes(tiles.nbytes, len(y))
        num_threads = self._workers.at_most(num_bytes // self._bytes_per_thread)
        if num_threads == 1:
            self._product(groups, tiles, matrix.parts, out, 0)
            _add(y, matrix.bias, residual)
            return
        tasks = iter(_tasks(len(tiles), len(groups), num_threads, num_bytes))

        def work(thread: int) -> None:
            for which, some in tasks:  # each is taken by one thread
                self._product(groups[some], tiles[which], matrix.parts, out[which, some], thread)
                rows = slice(some.start * GROUP, some.stop * GROUP)
                columns = slice(which.start * WIDTH, which.stop * WIDTH)
                bias = None if matrix.bias is None else matrix.bias[columns]
                _add(y[rows, columns], bias, None if residual is None else residual[rows, columns])

        self._workers.run(work, num_threads)

    def _product(
        self,
        groups: Floats,
        tiles: NDArray[Any],
        parts: Sequence[tuple[int, int]],
        out: Floats,
        thread: int,
    ) -> None:
        """groups [groups, 4, K] @ tiles [tiles, K, 64] into out [tiles, groups, 4, 64]."""
        for first, last in parts:
            target = self._part(out.shape, thread) if first else out
            rows, weights = groups, tiles
            if len(parts) > 1:
                rows, weights = groups[..., first:last], tiles[:, first:last]
            if tiles.dtype == self.dtype:
                # Tile by tile: NumPy's own order would be that of the output's memory.
                np.matmul(rows, weights[:, None], out=target, order="C")
            else:
                self._widening_product(rows, weights, target, thread)
            if first:
                out += target

    def _part(self, shape: tuple[int, ...], thread: int) -> Floats:
        """Where the thread keeps what is to be added."""
        size = math.prod(shape)
        if self._parts[thread].size < size:
            self._parts[thread] = huge_empty(size * self.dtype.itemsize).view(self.dtype)
        return self._parts[thread][:size].reshape(shape)

    def _widening_product(
        self, groups: Floats, tiles: NDArray[Any], out: Floats, thread: int
    ) -> None:
        """The same product; each tile is widened into the cache just before."""
        num_inputs = tiles.shape[1]
        if len(self._wide[thread]) < num_inputs:
            self._wide[thread] = np.empty((num_inputs, WIDTH), self.dtype)
        for tile, tile_out in zip(tiles, out, strict=True):
            np.matmul(groups, widen(tile, self._wide[thread][:num_inputs]), out=tile_out)


def _tasks(
    num_tiles: int, num_groups: int, num_threads: int, num_bytes: int
) -> list[tuple[slice, slice]]:
    """Tiles and groups of each task: some tiles with all groups, or, where tiles do not come out
    even, all tiles with some groups."""
    number = num_threads * max(1, min(num_bytes // BYTES_PER_TURN // num_threads, MOST_TURNS))
    largest_by_tiles = -(-num_tiles // number) * num_groups
    largest_by_groups = num_tiles * -(-num_groups // number)
    if largest_by_groups < WORTH_READING_TWICE * largest_by_tiles:
        return [(slice(0, num_tiles), some) for some in _shares(num_groups, number)]
    ahead = HEAD_START * num_tiles // num_bytes if number == num_threads else 0
    return [(some, slice(0, num_groups)) for some in _shares(num_tiles, number, ahead)]


def _shares(number: int, num_shares: int, ahead: int = 0) -> list[slice]:
    """Equal as far as can be, but for ``ahead`` more in the first one; none is empty."""
    ahead = min(ahead, number)
    ends = [ahead - (ahead - number) * i // num_shares for i in range(1, num_shares)]
    return [slice(first, stop) for first, stop in pairwise([0, *ends, number]) if first < stop]


def _empty_tiles(shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Tiles for a checkpoint's (N, K); zeros where no output belongs."""
    num_outputs, num_inputs = shape
    num_tiles = -(-num_outputs // WIDTH)
    tiles: NDArray[Any] = np.empty((num_tiles, num_inputs, WIDTH), dtype)
    tiles[-1:, :, num_outputs - (num_tiles - 1) * WIDTH :] = 0
    return tiles


def _add(y: Floats, bias: Floats | None, residual: Floats | None) -> None:
    """The residual may have fewer rows and columns."""
    if bias is not None:
        y += bias
    if residual is not None:
        y[: len(residual), : residual.shape[1]] += residual


def _parts(num_inputs: int) -> list[tuple[int, int]]:
    """Ranges of K whose products are small: as few as can be, of equal size but for one."""
    num_parts = -(-num_inputs // min(MOST_INPUTS, SMALL_PRODUCT // (GROUP * WIDTH)))
    size = -(-num_inputs // num_parts)
    return [(first, min(first + size, num_inputs)) for first in range(0, num_inputs, size)]


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The range, cut at the borders of tiles."""
    while start < stop:
        end = min(stop, (start // WIDTH + 1) * WIDTH)
        yield start, end
        start = end
