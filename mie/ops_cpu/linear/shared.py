"""Share the products of a small step among processes.

Such a product takes tens or hundreds of microseconds, and a helper thread begins too late. Each
process multiplies the same rows by its own tiles. The results have places in shared memory. So have
those of SiLU between two products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import CachingAllocator, shared_zeros
from mie.ops_cpu.elementwise import silu_mul_into
from mie.ops_cpu.linear.geometry import MAX_GROUP
from mie.ops_cpu.linear.ready import ReadyProduct
from mie.ops_cpu.linear.tiled import TiledMatrix, TiledPlan
from mie.ops_cpu.processes.balance import UNITS
from mie.ops_cpu.processes.helpers import HelperProcesses

LEAST_BYTES = 1 << 18
"""Bytes of a matrix below which waiting for each other takes longer than it saves."""
LEAST_SILU = 1 << 13
"""Elements of SiLU's result below which each process computes all of them."""
MAX_PRODUCTS = 1 << 12
"""Number of products that are kept ready."""


class SharedProducts:
    """Products of at most ``max_rows`` rows with matrices as large as those that exist by now."""

    def __init__(
        self,
        plan: TiledPlan,
        helpers: HelperProcesses,
        allocator: CachingAllocator,
        max_rows: int,
    ) -> None:
        """Take the memory. ``helpers`` are forked afterwards."""
        self.helpers, self.plan, self.allocator = helpers, plan, allocator
        self._max_rows = max_rows
        max_padded = max_rows + MAX_GROUP
        shapes = [matrix.tiles.shape for matrix in plan.matrices()]
        self.max_columns = max(n * w for n, _, w in shapes)
        self.rows = np.zeros(max_padded * max(k for _, k, _ in shapes), plan.dtype)
        """Where each process puts the rows of a product."""
        # While one process still reads a result, another may compute the next one.
        sizes = [max_padded * self.max_columns] * 2
        self.results = [shared_zeros((size,), plan.dtype) for size in sizes]
        self._turn, self._ends = 0, helpers.ends
        self._products: dict[tuple[int, int, int], ReadyProduct] = {}

    def takes(self, matrix: TiledMatrix, num_rows: int) -> bool:
        """Return whether to share this product. Small ones are not worth it."""
        num_tiles, num_inputs, width = matrix.tiles.shape
        return (
            0 < num_rows <= self._max_rows
            and matrix.tiles.nbytes >= LEAST_BYTES
            and num_tiles * width <= self.max_columns
            and (num_rows + MAX_GROUP) * num_inputs <= self.rows.size
        )

    def apply(
        self, x: Floats, matrix: TiledMatrix, residual: Floats | None, *, is_brief: bool
    ) -> Floats:
        """Compute `TiledPlan.apply`. A brief result is only to be read."""
        self._turn = turn = 1 - self._turn
        if self._ends is not self.helpers.ends:
            self._ends = self.helpers.ends
            self._products.clear()
        key = matrix.number, len(x), turn
        if key not in self._products:
            if len(self._products) >= MAX_PRODUCTS:
                self._products.clear()
            self._products[key] = ReadyProduct(
                matrix,
                len(x),
                list(self._shares(matrix, len(x))),
                self.rows,
                self.results[turn],
                self.allocator,
            )
        return self._products[key].apply(x, residual, self.helpers.share, is_brief=is_brief)

    def silu_mul(self, gate_up: Floats) -> Floats | None:
        """Compute `ops.activation.silu_mul`, or return None if that is too little to share.

        The result is only to be read, and lasts until the next product.
        """
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        size = num_rows * width
        if not LEAST_SILU <= size <= self.results[0].size or num_rows < self.helpers.number:
            return None
        self._turn = turn = 1 - self._turn
        y = self.results[turn][:size].reshape(num_rows, width)
        shares = slices_of(num_rows, self.helpers.ends)
        self.helpers.share([partial(silu_mul_into, y[own], gate_up[own]) for own in shares])
        return y

    def _shares(self, matrix: TiledMatrix, num_rows: int) -> Iterator[slice]:
        """Yield the tiles of each process."""
        [(_, group, _)], _ = matrix.layout.cut(num_rows, matrix.tiles.shape[1])
        at_once = matrix.layout.tiles_at_once(matrix.tiles, group)
        number = ceil_div(len(matrix.tiles), at_once)
        for calls in slices_of(number, self._ends):
            yield slice(calls.start * at_once, calls.stop * at_once)

    def close(self) -> None:
        """Forget what was prepared for matrices."""
        self._products.clear()


def slices_of(number: int, ends: Sequence[int]) -> list[slice]:
    """Return the slice of each process, of this many things, from where the shares begin."""
    rounded = [(number * end + UNITS // 2) // UNITS for end in ends]
    return [slice(start, stop) for start, stop in pairwise(rounded)]
