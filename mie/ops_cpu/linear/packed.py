"""Implement the layout `packed`: tiles in the order in which the inner kernel of BLAS reads them.

A tile [K, W] consists of panels [K, columns of a panel]. Neighbouring tiles are one run of panels,
which a single call of the kernel multiplies. Where `parts_of` cuts K, a tile consists of parts, and
each part of panels. A group of rows is packed in the same way.

No product packs its weights, whatever its size, so this is fast on CPUs for which OpenBLAS has no
small-matrix kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops_cpu.allocator import CachingAllocator
from mie.ops_cpu.linear.geometry import (
    MAX_GROUP,
    MAX_ROWS,
    REFERENCE_GROUP,
    RowCut,
    parts_of,
)
from mie.ops_cpu.linear.kernel import MULTIPLY, PACK, Kernel, address, prepared
from mie.ops_cpu.linear.layout import Buffers, padded
from mie.ops_cpu.linear.widen import widen
from mie.ops_cpu.samples import samples

PACKED_WIDTHS, WIDTHS_OF_PARTS = (48, 64), (96, 128)
"""Possible columns of a tile, and of one whose parts are multiplied one by one.

The kernel for AVX2 computes 24 columns at a time, and those for AVX-512 16.
"""
ROWS_AT_ONCE = 4
"""Rows that a kernel computes in the time of one. The number of rows is padded to a multiple."""
ROWS_AT_ONCE_PASS = 12
"""Rows for which a kernel reads the weights once. For more rows it reads them again."""
CALL_BYTES = 1 << 19
"""Bytes of weights that a kernel reads several times. They stay in a cache meanwhile."""
LEAST_CALLS = 8
"""Minimum number of calls for a matrix, so that threads or processes can share them evenly.

The number of threads does not change it, because it would change the bits.
"""
MAX_PREPARED = 8
"""Maximum number of calls that are kept ready for a product."""
ROW_UNITS = (4, 12, 24, 48)
"""Numbers of rows that a kernel may compute at a time, or multiples of them."""
TRIAL_ROWS = (96, 100, 104)
"""Numbers of rows of the trials of these units. Each ends with other remaining rows."""
TRIAL_TILES = 3
"""Number of tiles of a trial, of which two are at the ends and one is not."""


class PackedLayout:
    """Tiles that OpenBLAS's inner kernel reads as they are. They hold float32, or 16 bits."""

    def __init__(self, kernel: Kernel, wide: Buffers, width: int, *, is_invariant: bool) -> None:
        """Multiply by ``kernel``, and widen 16-bit tiles into ``wide``.

        ``is_invariant`` gives a row the same bits in any batch, with smaller groups.
        """
        self.name = "packed-invariant" if is_invariant else "packed"
        self.width, self.is_batch_invariant = width, is_invariant
        self._kernel, self._wide = kernel, wide
        self._stage = Buffers(1, np.dtype(np.float32))
        self._invariant_groups: dict[int, list[int]] = {}
        self._are_alike: dict[tuple[int, int], bool] = {}
        self._row_units: dict[int, int] = {}

    def put(self, rows: NDArray[Any], tile: NDArray[Any], first: int) -> None:
        panel, column = np.divmod(np.arange(first, first + len(rows)), self._kernel.columns)
        for start, stop in parts_of(tile.shape[0]):
            self._panels(tile, start, stop)[panel, :, column] = rows[:, start:stop]

    def take(self, tiles: NDArray[Any], columns: Ints) -> NDArray[Any]:
        tile, column = np.divmod(columns, self.width)
        panel, column = np.divmod(column, self._kernel.columns)
        parts = (self._panels(tiles, *part) for part in parts_of(tiles.shape[1]))
        taken = [part[tile, panel, :, column] for part in parts]
        return taken[0] if len(taken) == 1 else np.concatenate(taken, 1)

    def cut(self, num_rows: int, num_inputs: int) -> RowCut:
        calls, most = [], MAX_ROWS
        if num_rows > most:
            most -= most % max(1, self.row_unit(num_inputs))
        for start in range(0, max(1, num_rows), most):
            count = max(1, min(most, num_rows - start))
            if self.is_batch_invariant:
                groups = self.invariant_groups(num_inputs)
                group = min(groups, key=lambda each: (ceil_div(count, each) * each, -each))
            else:
                group = ceil_div(count, ROWS_AT_ONCE) * ROWS_AT_ONCE
            calls.append((slice(start, start + count), group, ceil_div(count, group)))
        num_padded = max(rows.start + group * number for rows, group, number in calls)
        return RowCut(calls, num_padded)

    def row_unit(self, num_inputs: int) -> int:
        if self.is_batch_invariant:
            return 1
        if num_inputs not in self._row_units:
            sizes = _sizes(num_inputs)
            fitting = (
                unit for unit in ROW_UNITS if all(self._is_unit(size, unit) for size in sizes)
            )
            self._row_units[num_inputs] = next(fitting, 0)
        return self._row_units[num_inputs]

    def groups(self, x: Floats, shape: tuple[int, int], allocator: CachingAllocator) -> Floats:
        if len(x) < math.prod(shape) or x.strides[1] != x.itemsize:
            x = padded(x, math.prod(shape), allocator)
        groups: Floats = allocator.empty((*shape, x.shape[1]), x.dtype)
        for args in self._packings(x, groups):
            self._kernel.pack_rows(*args)
        return groups

    def placer(self, groups: Floats, num_rows: int) -> Callable[[Floats], None]:
        num_groups, rows, num_inputs = groups.shape
        if num_groups == 1 and rows == ROWS_AT_ONCE and self._are_interleaved:
            groups.fill(0)  # the memory may be uninitialised, and subnormal numbers are slow
            columns = groups.reshape(num_inputs, rows)[:, :num_rows].T

            # The other columns hold rows of earlier products, on which no other row depends.
            def place_few(x: Floats) -> None:
                columns[...] = x

            return place_few
        stage = self._stage.take(0, (num_groups * rows, num_inputs))
        own, padding = stage[:num_rows], stage[num_rows:]
        calls = [
            prepared(self._kernel.pack_rows, PACK, *args) for args in self._packings(stage, groups)
        ]

        # The calls know addresses only, so the last argument keeps the memory of the groups.
        def place(x: Floats, _kept: Floats = groups) -> None:
            own[...] = x
            padding.fill(0)
            for call in calls:
                call()

        return place

    @cached_property
    def _are_interleaved(self) -> bool:
        """Whether a group of the least size is packed as [K, rows], as with all known kernels."""
        rows, packed = (
            samples(ROWS_AT_ONCE, 9).astype(np.float32),
            np.empty((9, ROWS_AT_ONCE), np.float32),
        )
        self._kernel.pack_rows(9, ROWS_AT_ONCE, address(rows), 9, address(packed))
        return bool((packed == rows.T).all())

    def tiles_at_once(self, tiles: NDArray[Any], rows: int) -> int:
        num_tiles, num_inputs, width = tiles.shape
        if (
            tiles.dtype != np.float32  # which are widened one by one
            or len(parts_of(num_inputs)) > 1
            or self.are_alike(num_inputs, rows)
        ):
            return 1
        most = CALL_BYTES // (tiles.itemsize * num_inputs * width)
        return int(max(1, min(most, num_tiles // LEAST_CALLS)))

    def product(
        self, groups: Floats, tiles: NDArray[Any], y: Floats, thread: int, at_once: int
    ) -> None:
        y.fill(0)
        if tiles.dtype == y.dtype:
            for args in self._multiplications(groups, tiles, y, at_once):
                self._kernel.multiply(*args)
            return
        # Widen each tile into the CPU cache just before it is multiplied.
        wide = self._wide.take(thread, (1, *tiles.shape[1:]))
        for number in range(len(tiles)):
            widen(tiles[number : number + 1], wide)
            columns = y[:, number * self.width : (number + 1) * self.width]
            for args in self._multiplications(groups, wide, columns, 1):
                self._kernel.multiply(*args)

    def prepared(
        self, groups: Floats, tiles: NDArray[Any], y: Floats, at_once: int
    ) -> Callable[[], object]:
        if tiles.dtype == y.dtype:
            every = list(self._multiplications(groups, tiles, y, at_once))
            if len(every) <= MAX_PREPARED:
                calls = [prepared(self._kernel.multiply, MULTIPLY, *args) for args in every]

                def multiply(_kept: tuple[Floats, ...] = (groups, tiles)) -> None:
                    y.fill(0)
                    for call in calls:
                        call()

                return multiply
        return partial(self.product, groups, tiles, y, 0, at_once)

    def invariant_groups(self, num_inputs: int) -> list[int]:
        """Return the groups whose rows have the bits that a group of four gives, by a trial."""
        if num_inputs not in self._invariant_groups:
            groups = [REFERENCE_GROUP]
            for group in range(2 * ROWS_AT_ONCE, MAX_GROUP + 1, ROWS_AT_ONCE):
                if all(self._is_equal(size, group) for size in _sizes(num_inputs)):
                    groups.append(group)
            self._invariant_groups[num_inputs] = groups
        return self._invariant_groups[num_inputs]

    def are_alike(self, num_inputs: int, num_rows: int) -> bool:
        """Return whether a tile's bits do not depend on which others a call multiplies.

        The kernel may compute the first and last columns of a call in another way. A trial finds
        it for few rows. With more rows, a call is long enough with one tile.
        """
        key = num_inputs, num_rows
        if key not in self._are_alike:
            self._are_alike[key] = num_rows <= MAX_GROUP and all(
                self._is_alike(size, num_rows) for size in _sizes(num_inputs)
            )
        return self._are_alike[key]

    def _is_equal(self, num_inputs: int, group: int) -> bool:
        x, tiles = self._samples(group, num_inputs, 1)
        fours = [
            self._multiply(x[i : i + ROWS_AT_ONCE], tiles) for i in range(0, group, ROWS_AT_ONCE)
        ]
        return bool((self._multiply(x, tiles) == np.concatenate(fours)).all())

    def _is_alike(self, num_inputs: int, num_rows: int) -> bool:
        x, tiles = self._samples(num_rows, num_inputs, TRIAL_TILES)
        alone = [self._multiply(x, tile[None]) for tile in tiles]
        return bool((self._multiply(x, tiles) == np.concatenate(alone, 1)).all())

    def _is_unit(self, num_inputs: int, unit: int) -> bool:
        x, tiles = self._samples(max(TRIAL_ROWS), num_inputs, 1)
        for num_rows in TRIAL_ROWS:
            whole = self._multiply(x[:num_rows], tiles)
            for cut in range(unit, num_rows, unit):
                parts = [self._multiply(x[:cut], tiles), self._multiply(x[cut:num_rows], tiles)]
                if (np.concatenate(parts) != whole).any():
                    return False
        return True

    def _samples(self, num_rows: int, num_inputs: int, num_tiles: int) -> tuple[Floats, Floats]:
        """Return rows [R, K], and tiles [tiles, K * W] of one part."""
        x, tiles = samples(num_rows, num_inputs), samples(num_tiles, num_inputs * self.width)
        return x.astype(np.float32), tiles.astype(np.float32)

    def _multiply(self, x: Floats, tiles: Floats) -> Floats:
        """Return the product of one call."""
        (num_rows, num_inputs), columns = x.shape, len(tiles) * self.width
        rows, y = np.empty_like(x), np.zeros((num_rows, columns), np.float32)
        self._kernel.pack_rows(num_inputs, num_rows, address(x), num_inputs, address(rows))
        operands = address(tiles), address(rows), address(y)
        self._kernel.multiply(columns, num_rows, num_inputs, 1.0, *operands, columns)
        return y

    def _panels(self, tiles: NDArray[Any], start: int, stop: int) -> NDArray[Any]:
        """Return a part of tiles [..., K, W] as [..., panels, K of the part, columns]."""
        flat = tiles.reshape(*tiles.shape[:-2], -1)[..., start * self.width : stop * self.width]
        return flat.reshape(*flat.shape[:-1], -1, stop - start, self._kernel.columns)

    def _packings(self, x: Floats, groups: Floats) -> Iterator[tuple[int, ...]]:
        """Yield the operands of the calls that pack x into groups."""
        num_groups, rows, num_inputs = groups.shape
        source, target, stride = address(x), address(groups), x.strides[0] // x.itemsize
        for group in range(num_groups):
            for start, stop in parts_of(num_inputs):
                place = target + x.itemsize * rows * (group * num_inputs + start)
                begin = source + x.itemsize * (group * rows * stride + start)
                yield stop - start, rows, begin, stride, place

    def _multiplications(
        self, groups: Floats, tiles: NDArray[Any], y: Floats, at_once: int
    ) -> Iterator[tuple[int, int, int, float, int, int, int, int]]:
        """Yield the operands of the calls that multiply groups by tiles into y."""
        (num_groups, rows, num_inputs), size = groups.shape, y.itemsize
        parts, stride = parts_of(num_inputs), y.strides[0] // size
        if len(parts) == 1 and self.are_alike(num_inputs, rows):
            at_once = max(1, len(tiles))
            if num_groups * rows > ROWS_AT_ONCE_PASS:
                at_once = max(1, CALL_BYTES // (size * num_inputs * self.width))
        weights, packed, out = address(tiles), address(groups), address(y)
        for tile in range(0, len(tiles), at_once):
            num_columns = min(at_once, len(tiles) - tile) * self.width
            column = out + size * tile * self.width
            for start, stop in parts:
                part = weights + size * self.width * (tile * num_inputs + start)
                for group in range(num_groups):
                    own = packed + size * rows * (group * num_inputs + start)
                    place = column + size * stride * rows * group
                    yield num_columns, rows, stop - start, 1.0, part, own, place, stride


def width_of(num_inputs: int, num_outputs: int) -> int:
    """Return the width of the packed tiles of a matrix [K, N], with the least padding."""
    widths = PACKED_WIDTHS if len(parts_of(num_inputs)) == 1 else WIDTHS_OF_PARTS
    return min(widths, key=lambda width: ceil_div(num_outputs, width) * width)


def _sizes(num_inputs: int) -> set[int]:
    """Return the sizes of the parts of K."""
    return {stop - start for start, stop in parts_of(num_inputs)}
