"""Implement the plan `tiled`: matrices in tiles that OpenBLAS multiplies without packing them.

Weights [K, N] are stored as tiles [N / 64, K, 64], and rows are multiplied 4 at a time. The
products (4, K) @ (K, 64) are small enough for OpenBLAS's small-matrix kernels, which read their
operands in place. A tile stays in the CPU cache while all rows are multiplied, so weights come from
memory once a call. Other products of this size would be packed first, every time.

A row is always multiplied in a group of 4, by the same kernel, in the same order of K. So its
result does not depend on the other rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import CachingAllocator, huge_empty
from mie.ops_cpu.linear.matrix import BYTES_PER_THREAD, work_bytes
from mie.ops_cpu.linear.widen import stored, widen
from mie.ops_cpu.threads.workers import Workers

WIDTH = 64
"""Columns of a tile, which fill four AVX-512 registers of float32."""
GROUP = 4
"""Rows of a product. With WIDTH, the kernel keeps them in registers."""
SMALL_PRODUCT = 100**3
"""Maximum M · N · K for which OpenBLAS uses its small-matrix kernels.

The source is interface/gemm.c and kernel/x86_64/sgemm_small_kernel_permit_skylakex.c. A longer K is
cut, and the parts are added.
"""
MOST_INPUTS = 2048
"""Maximum K of a product, so that a tile and the rows fit into 1 MiB of L2 cache."""
MAX_ROWS = 512
"""Maximum number of rows of a call. More rows take several calls, which read the weights again."""
MOST_TURNS = 4
"""Maximum number of tasks of a thread. With several, a delayed thread leaves work to the others."""
BYTES_PER_TURN = 1 << 27
"""Bytes of weights of one task among several, which take some milliseconds.

Another task costs tens of microseconds, because threads wait for the GIL.
"""
HEAD_START = 5 << 17
"""Bytes of weights that the caller reads while the other threads still wait for the GIL."""
WORTH_READING_TWICE = 0.95
"""Size of the largest task, relative to sharing out tiles, below which rows are shared out.

Each thread then reads all weights.
"""


class TiledMatrix:
    """Tiles [ceil(N / 64), K, 64]. Columns past N hold zeros."""

    def __init__(
        self, plan: TiledPlan, tiles: NDArray[Any], num_outputs: int, bias: Floats | None
    ) -> None:
        self._plan = plan
        self.tiles = tiles
        self.num_outputs = num_outputs
        self.bias = bias
        """[ceil(N / 64) * 64]"""
        self.parts = _parts(tiles.shape[1])
        """The ranges of K whose products are added."""
        self.nbytes = tiles.nbytes + (0 if bias is None else bias.nbytes)

    def apply(self, x: Floats, residual: Floats | None) -> Floats:
        """Compute `ops.linear.linear`."""
        return self._plan.apply(x, self, residual)


class TiledPlan:
    """Multiplies by tiles, which the threads share out."""

    name = "tiled"

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
        """Load a matrix from the rows of a checkpoint's (N, K), block by block."""
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
        """Compute `ops.linear.linear`."""
        num_rows, num_tiles = len(x), len(matrix.tiles)
        padded_shape = ceil_div(num_rows, GROUP) * GROUP, num_tiles * WIDTH
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
        """Return x as [groups, 4, K], padded with rows of zeros."""
        num_rows, num_inputs = x.shape
        num_groups = ceil_div(num_rows, GROUP)
        if num_rows % GROUP or not x.flags.c_contiguous:
            padded = self._allocator.empty((num_groups * GROUP, num_inputs), self.dtype)
            padded[:num_rows] = x
            padded[num_rows:] = 0
            x = padded
        return x.reshape(num_groups, GROUP, num_inputs)

    def _multiply(self, x: Floats, matrix: TiledMatrix, y: Floats, residual: Floats | None) -> None:
        """Multiply into y [rows of whole groups, columns of whole tiles]."""
        groups, tiles = self._groups(x), matrix.tiles
        out = y.reshape(len(groups), GROUP, len(tiles), WIDTH).transpose(2, 0, 1, 3)
        num_bytes = work_bytes(tiles.nbytes, len(y))
        num_threads = self._workers.at_most(num_bytes // self._bytes_per_thread)
        if num_threads == 1:
            self._product(groups, tiles, matrix.parts, out, 0)
            _add(y, matrix.bias, residual)
            return

        def work(thread: int, tasks: Iterable[tuple[slice, slice]]) -> None:
            for which, some in tasks:
                self._product(groups[some], tiles[which], matrix.parts, out[which, some], thread)
                rows = slice(some.start * GROUP, some.stop * GROUP)
                columns = slice(which.start * WIDTH, which.stop * WIDTH)
                bias = None if matrix.bias is None else matrix.bias[columns]
                _add(y[rows, columns], bias, None if residual is None else residual[rows, columns])

        tasks = _tasks(len(tiles), len(groups), num_threads, num_bytes)
        self._workers.share(work, tasks, num_threads)

    def _product(
        self,
        groups: Floats,
        tiles: NDArray[Any],
        parts: Sequence[tuple[int, int]],
        out: Floats,
        thread: int,
    ) -> None:
        """Multiply groups [groups, 4, K] @ tiles [tiles, K, 64] into out [tiles, groups, 4, 64]."""
        for first, last in parts:
            target = self._part(out.shape, thread) if first else out
            rows, weights = groups, tiles
            if len(parts) > 1:
                rows, weights = groups[..., first:last], tiles[:, first:last]
            if tiles.dtype == self.dtype:
                # Iterate over tiles here, because NumPy's own order would be that of the output's
                # memory.
                np.matmul(rows, weights[:, None], out=target, order="C")
            else:
                self._widening_product(rows, weights, target, thread)
            if first:
                out += target

    def _part(self, shape: tuple[int, ...], thread: int) -> Floats:
        """Return the thread's buffer for products that are added."""
        size = math.prod(shape)
        if self._parts[thread].size < size:
            self._parts[thread] = huge_empty(size * self.dtype.itemsize).view(self.dtype)
        return self._parts[thread][:size].reshape(shape)

    def _widening_product(
        self, groups: Floats, tiles: NDArray[Any], out: Floats, thread: int
    ) -> None:
        """Multiply the same way, but widen each tile into the CPU cache just before."""
        num_inputs = tiles.shape[1]
        if len(self._wide[thread]) < num_inputs:
            self._wide[thread] = np.empty((num_inputs, WIDTH), self.dtype)
        for tile, tile_out in zip(tiles, out, strict=True):
            np.matmul(groups, widen(tile, self._wide[thread][:num_inputs]), out=tile_out)


def _tasks(
    num_tiles: int, num_groups: int, num_threads: int, num_bytes: int
) -> list[tuple[slice, slice]]:
    """Return the tiles and groups of each task.

    A task is some tiles with all groups. If the tiles do not divide evenly, it is all tiles with
    some groups.
    """
    number = num_threads * max(1, min(num_bytes // BYTES_PER_TURN // num_threads, MOST_TURNS))
    largest_by_tiles = ceil_div(num_tiles, number) * num_groups
    largest_by_groups = num_tiles * ceil_div(num_groups, number)
    if largest_by_groups < WORTH_READING_TWICE * largest_by_tiles:
        return [(slice(0, num_tiles), some) for some in _shares(num_groups, number)]
    ahead = HEAD_START * num_tiles // num_bytes if number == num_threads else 0
    return [(some, slice(0, num_groups)) for some in _shares(num_tiles, number, ahead)]


def _shares(number: int, num_shares: int, ahead: int = 0) -> list[slice]:
    """Split into shares of nearly equal size, the first with ``ahead`` more. None is empty."""
    ahead = min(ahead, number)
    ends = [ahead - (ahead - number) * i // num_shares for i in range(1, num_shares)]
    return [slice(first, stop) for first, stop in pairwise([0, *ends, number]) if first < stop]


def _empty_tiles(shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return tiles for a checkpoint's (N, K), with zeros in the padding."""
    num_outputs, num_inputs = shape
    num_tiles = ceil_div(num_outputs, WIDTH)
    tiles: NDArray[Any] = np.empty((num_tiles, num_inputs, WIDTH), dtype)
    tiles[-1:, :, num_outputs - (num_tiles - 1) * WIDTH :] = 0
    return tiles


def _add(y: Floats, bias: Floats | None, residual: Floats | None) -> None:
    """Add the bias and the residual to y. The residual may have fewer rows and columns."""
    if bias is not None:
        y += bias
    if residual is not None:
        y[: len(residual), : residual.shape[1]] += residual


def _parts(num_inputs: int) -> list[tuple[int, int]]:
    """Return the fewest ranges of K whose products are small, of equal size except one."""
    num_parts = ceil_div(num_inputs, min(MOST_INPUTS, SMALL_PRODUCT // (GROUP * WIDTH)))
    size = ceil_div(num_inputs, num_parts)
    return [(first, min(first + size, num_inputs)) for first in range(0, num_inputs, size)]


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the range, cut at the borders of tiles."""
    while start < stop:
        end = min(stop, (start // WIDTH + 1) * WIDTH)
        yield start, end
        start = end
