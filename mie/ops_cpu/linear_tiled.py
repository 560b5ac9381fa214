"""The plan `tiled`: a matrix as tiles that OpenBLAS multiplies without packing them first.

Weights [K, N] are stored as tiles [N / 64, K, 64], and rows are multiplied 4 at a time: products
(4, K) @ (K, 64), each small enough for OpenBLAS's small-matrix kernels, which read their operands
where they lie. A tile stays in the cache while all rows pass by it, so weights come from memory
once a call. Other products of this size would be packed first, every time.

A row is always multiplied in a group of 4, by the same kernel, in the same order of K, so its
result depends on nothing but itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Floats
from mie.ops_cpu.linear import BYTES_PER_THREAD, result_for, work_bytes
from mie.ops_cpu.widen import stored, widen
from mie.ops_cpu.workers import Workers

WIDTH = 64
"""Columns of a tile: four AVX-512 registers of float32."""
GROUP = 4
"""Rows of a product: with WIDTH, what the kernel keeps in registers."""
SMALL_PRODUCT = 100**3
"""M · N · K up to which OpenBLAS uses its small-matrix kernels (interface/gemm.c, and
kernel/x86_64/sgemm_small_kernel_permit_skylakex.c); a longer K is cut, and the parts added."""
MAX_ROWS = 512
"""Rows of a call at most; more take several, which read the weights again."""
SCRATCH_BYTES = 512 << 10
"""Of each thread, for what its tiles yield."""
MOST_TURNS = 4
"""Tasks of a thread: several, so that one that is held up leaves work to the others."""
BYTES_PER_TURN = 5 << 20
"""Weights to read for a task of several: between two, threads wait for each other's GIL."""


class TiledMatrix:
    """Tiles [ceil(N / 64), K, 64]; columns past N hold zeros."""

    def __init__(
        self, plan: TiledPlan, tiles: NDArray[Any], num_outputs: int, bias: Floats | None
    ) -> None:
        self._plan = plan
        self.tiles = tiles
        self.num_outputs = num_outputs
        self.bias = bias
        """[ceil(N / 64), 1, 64]"""
        self.nbytes = tiles.nbytes + (0 if bias is None else bias.nbytes)

    def apply(self, x: Floats, residual: Floats | None) -> Floats:
        """`ops.linear.linear`; the residual's memory may be reused for the result."""
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
    ) -> None:
        self.dtype = dtype
        self._weight_dtype = weight_dtype
        self._workers = workers
        self._bytes_per_thread = bytes_per_thread
        size = max(SCRATCH_BYTES // dtype.itemsize, 2 * WIDTH * MAX_ROWS)
        self._scratch = [np.empty(size, dtype) for _ in range(workers.num_threads)]
        self._wide = [np.empty((0, WIDTH), dtype) for _ in self._scratch]
        self._padded = np.empty(0, dtype)

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
        return TiledMatrix(self, tiles, shape[0], self._load_bias(len(tiles), bias))

    def _load_bias(self, num_tiles: int, bias: NDArray[Any] | None) -> Floats | None:
        if bias is None:
            return None
        padded = np.zeros((num_tiles, 1, WIDTH), self.dtype)
        padded.reshape(-1)[: len(bias)] = bias
        return padded

    def apply(self, x: Floats, matrix: TiledMatrix, residual: Floats | None) -> Floats:
        """`ops.linear.linear`; the residual's memory may be reused for the result."""
        y = result_for(x, matrix.num_outputs, residual)
        for start in range(0, len(x), MAX_ROWS):
            rows = slice(start, start + MAX_ROWS)
            groups = self._groups(x[rows])
            self._multiply(groups, matrix, y[rows], None if residual is None else residual[rows])
        return y

    def _groups(self, x: Floats) -> Floats:
        """x as [1, groups, 4, K], with rows of zeros in the end."""
        num_rows, num_inputs = x.shape
        num_groups = -(-num_rows // GROUP)
        if num_rows % GROUP or not x.flags.c_contiguous:
            size = num_groups * GROUP * num_inputs
            if self._padded.size < size:
                self._padded = np.empty(size, self.dtype)
            padded = self._padded[:size].reshape(-1, num_inputs)
            padded[:num_rows] = x
            padded[num_rows:] = 0
            x = padded
        return x.reshape(1, num_groups, GROUP, num_inputs)

    def _multiply(
        self, groups: Floats, matrix: TiledMatrix, y: Floats, residual: Floats | None
    ) -> None:
        num_bytes = work_bytes(matrix.tiles.nbytes, GROUP * groups.shape[1])
        num_threads = self._workers.at_most(num_bytes // self._bytes_per_thread)
        num_turns = max(1, min(num_bytes // BYTES_PER_TURN // num_threads, MOST_TURNS))
        num_tasks = 1 if num_threads == 1 else num_threads * num_turns
        tasks = iter(self._ranges(len(matrix.tiles), groups.shape[1], num_tasks))

        def work(thread: int) -> None:
            for start, stop in tasks:  # each is taken by one thread
                yielded = self._product(groups, matrix, start, stop, thread)
                _store(yielded, start, y, residual)

        self._workers.run(work, num_threads)

    def _ranges(self, num_tiles: int, num_groups: int, wanted: int) -> list[tuple[int, int]]:
        """``wanted`` ranges of tiles, equal as far as can be; more where the scratch is small."""
        room = self._scratch[0].size // (2 * WIDTH * GROUP * num_groups)
        number = max(min(wanted, num_tiles), -(-num_tiles // room))
        bounds = [num_tiles * i // number for i in range(number + 1)]
        return list(pairwise(bounds))

    def _product(
        self, groups: Floats, matrix: TiledMatrix, start: int, stop: int, thread: int
    ) -> Floats:
        """x @ the tiles start … stop - 1, plus bias: [tiles, rows, 64]."""
        shape = (stop - start, groups.shape[1], GROUP, WIDTH)
        size = shape[0] * shape[1] * GROUP * WIDTH
        scratch = self._scratch[thread]
        total, part = (scratch[i * size : (i + 1) * size].reshape(shape) for i in (0, 1))
        for first, last in _parts(groups.shape[-1]):
            out = part if first else total
            tiles = matrix.tiles[start:stop, first:last]
            if tiles.dtype == self.dtype:
                np.matmul(groups[..., first:last], tiles[:, None], out=out)
            else:
                self._widening_product(groups[0, ..., first:last], tiles, out, thread)
            if first:
                total += part
        yielded = total.reshape(shape[0], -1, WIDTH)
        if matrix.bias is not None:
            yielded += matrix.bias[start:stop]
        return yielded

    def _widening_product(
        self, groups: Floats, tiles: NDArray[Any], out: Floats, thread: int
    ) -> None:
        """The same product; each tile is widened into the cache just before."""
        num_inputs = tiles.shape[1]
        if len(self._wide[thread]) < num_inputs:
            self._wide[thread] = np.empty((num_inputs, WIDTH), self.dtype)
        for tile, tile_out in zip(tiles, out, strict=True):
            np.matmul(groups, widen(tile, self._wide[thread][:num_inputs]), out=tile_out)


def _empty_tiles(shape: tuple[int, int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Tiles for a checkpoint's (N, K); zeros where no output belongs."""
    num_outputs, num_inputs = shape
    num_tiles = -(-num_outputs // WIDTH)
    tiles: NDArray[Any] = np.empty((num_tiles, num_inputs, WIDTH), dtype)
    tiles[-1:, :, num_outputs - (num_tiles - 1) * WIDTH :] = 0
    return tiles


def _store(yielded: Floats, start: int, y: Floats, residual: Floats | None) -> None:
    """Tiles [tiles, rows, 64] from ``start`` on to where they belong in y [rows, N]."""
    num_rows, num_outputs = y.shape
    num_whole = min(len(yielded), num_outputs // WIDTH - start)
    pieces = [(slice(0, num_whole), start * WIDTH, WIDTH)] if num_whole else []
    if num_whole < len(yielded):
        column = (start + num_whole) * WIDTH
        pieces.append((slice(num_whole, None), column, num_outputs - column))
    for tiles, column, width in pieces:
        values = yielded[tiles, :num_rows, :width].transpose(1, 0, 2)
        columns = slice(column, column + values.shape[1] * width)
        out = y[:, columns].reshape(values.shape)
        if residual is None:
            out[...] = values
        else:
            np.add(values, residual[:, columns].reshape(values.shape), out=out)


def _parts(num_inputs: int) -> list[tuple[int, int]]:
    """Ranges of K whose products are small: as few as can be, of equal size but for one."""
    num_parts = -(-num_inputs * GROUP * WIDTH // SMALL_PRODUCT)
    size = -(-num_inputs // num_parts)
    return [(first, min(first + size, num_inputs)) for first in range(0, num_inputs, size)]


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The range, cut at the borders of tiles."""
    while start < stop:
        end = min(stop, (start // WIDTH + 1) * WIDTH)
        yield start, end
        start = end
