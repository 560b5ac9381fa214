"""Define how matrices are kept in tiles, and the layout that NumPy multiplies by."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Floats, Ints
from mie.ops_cpu.allocator import CachingAllocator, huge_empty
from mie.ops_cpu.linear.geometry import Geometry, RowCut, parts_of
from mie.ops_cpu.linear.widen import widen


class Layout(Protocol):
    """How a matrix [K, N] is kept in tiles [ceil(N / W), K, W], and how rows are multiplied.

    A layout may order the elements of a tile, and those of a group of rows, as it likes.
    """

    name: str
    """The name of the plan that uses it."""
    width: int
    """Columns of a tile."""
    is_batch_invariant: bool
    """Whether a row has the same bits in any batch."""

    def put(self, rows: NDArray[Any], tile: NDArray[Any], first: int) -> None:
        """Write rows of a checkpoint's (N, K) into a tile, from this column on."""

    def take(self, tiles: NDArray[Any], columns: Ints) -> NDArray[Any]:
        """Return columns of the matrix [K, N], as rows [T, K]."""

    def cut(self, num_rows: int, num_inputs: int) -> RowCut:
        """Return how to multiply this many rows."""

    def row_unit(self, num_inputs: int) -> int:
        """Return the number of rows at whose multiples rows may be divided without changing bits.

        Return 0 if no number was found.
        """

    def groups(self, x: Floats, shape: tuple[int, int], allocator: CachingAllocator) -> Floats:
        """Return x [R, K] as groups [groups, rows of a group, K], padded with rows of zeros."""

    def placer(self, groups: Floats, num_rows: int) -> Callable[[Floats], None]:
        """Return what writes x [R, K] with this many rows into groups."""

    def tiles_at_once(self, tiles: NDArray[Any], rows: int) -> int:
        """Return how many neighbouring tiles are multiplied at once, by groups of that many rows.

        Each share of a matrix is a multiple of them, unless it is the last one.
        """

    def product(
        self, groups: Floats, tiles: NDArray[Any], y: Floats, thread: int, at_once: int
    ) -> None:
        """Multiply groups by a share of tiles into y [rows of the groups, columns of the tiles].

        ``at_once`` is what `tiles_at_once` returned for the matrix.
        """

    def prepared(
        self, groups: Floats, tiles: NDArray[Any], y: Floats, at_once: int
    ) -> Callable[[], object]:
        """Return a call of `product` in thread 0, prepared to be made often."""


class Buffers:
    """A buffer for each thread, which grows on demand."""

    def __init__(self, number: int, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._buffers: list[Floats] = [np.empty(0, dtype) for _ in range(number)]

    def take(self, thread: int, shape: tuple[int, ...]) -> Floats:
        """Return the thread's buffer in that shape."""
        size = math.prod(shape)
        if self._buffers[thread].size < size:
            self._buffers[thread] = huge_empty(size * self.dtype.itemsize).view(self.dtype)
        return self._buffers[thread][:size].reshape(shape)

    def release(self) -> None:
        """Free the memory."""
        self._buffers = [np.empty(0, self.dtype) for _ in self._buffers]


class TileLayout:
    """Tiles that `np.matmul` reads as they are, without packing them where they are small."""

    name = "tiled"
    is_batch_invariant = True

    def __init__(self, geometry: Geometry, width: int, wide: Buffers, sums: Buffers) -> None:
        """Widen 16-bit tiles into ``wide``, and compute parts of a sum in ``sums``."""
        self.width = width
        self._geometry = geometry
        self._wide, self._sums = wide, sums

    def put(self, rows: NDArray[Any], tile: NDArray[Any], first: int) -> None:
        tile[:, first : first + len(rows)] = rows.T

    def take(self, tiles: NDArray[Any], columns: Ints) -> NDArray[Any]:
        tile, column = np.divmod(columns, self.width)
        return tiles[tile, :, column]

    def cut(self, num_rows: int, num_inputs: int) -> RowCut:
        return self._geometry.cut(num_rows, num_inputs, self.width)

    def row_unit(self, num_inputs: int) -> int:
        return 1

    def groups(self, x: Floats, shape: tuple[int, int], allocator: CachingAllocator) -> Floats:
        if len(x) < math.prod(shape) or not x.flags.c_contiguous:
            x = padded(x, math.prod(shape), allocator)
        return x.reshape(*shape, x.shape[1])

    def placer(self, groups: Floats, num_rows: int) -> Callable[[Floats], None]:
        rows = groups.reshape(-1, groups.shape[2])
        own, padding = rows[:num_rows], rows[num_rows:]

        def place(x: Floats) -> None:
            own[...] = x
            padding.fill(0)

        return place

    def tiles_at_once(self, tiles: NDArray[Any], rows: int) -> int:
        return 1

    def product(
        self, groups: Floats, tiles: NDArray[Any], y: Floats, thread: int, at_once: int
    ) -> None:
        out = self._tiles_of(y, groups, tiles)
        parts = parts_of(tiles.shape[1])
        for first, last in parts:
            target = self._sums.take(thread, out.shape) if first else out
            rows, weights = groups, tiles
            if len(parts) > 1:
                rows, weights = groups[..., first:last], tiles[:, first:last]
            if tiles.dtype == y.dtype:
                # Iterate over tiles here, because NumPy's own order would be that of the output's
                # memory.
                np.matmul(rows, weights[:, None], out=target, order="C")
            else:
                # Widen each tile into the CPU cache just before it is multiplied.
                wide = self._wide.take(thread, weights.shape[1:])
                for tile, tile_out in zip(weights, target, strict=True):
                    np.matmul(rows, widen(tile, wide), out=tile_out)
            if first:
                out += target

    def prepared(
        self, groups: Floats, tiles: NDArray[Any], y: Floats, at_once: int
    ) -> Callable[[], object]:
        if len(parts_of(tiles.shape[1])) == 1 and tiles.dtype == y.dtype:
            out = self._tiles_of(y, groups, tiles)
            return partial(np.matmul, groups, tiles[:, None], out=out, order="C")
        return partial(self.product, groups, tiles, y, 0, at_once)

    def _tiles_of(self, y: Floats, groups: Floats, tiles: NDArray[Any]) -> Floats:
        """Return y as [tiles, groups, rows of a group, W]."""
        shape = *groups.shape[:2], len(tiles), self.width
        of_tiles: Floats = y.reshape(shape).transpose(2, 0, 1, 3)
        return of_tiles


def padded(x: Floats, num_rows: int, allocator: CachingAllocator) -> Floats:
    """Return a copy of x with rows of zeros up to this number."""
    copy = allocator.empty((num_rows, x.shape[1]), x.dtype)
    copy[: len(x)] = x
    copy[len(x) :] = 0
    return copy
