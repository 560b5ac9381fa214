"""Share the products of a small step with helper processes.

Such a product takes tens or hundreds of microseconds, and a helper thread begins too late. Rows and
results have fixed places in shared memory, so a few numbers tell a helper what to multiply.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from time import perf_counter

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import CachingAllocator, shared_zeros
from mie.ops_cpu.linear.geometry import MAX_GROUP
from mie.ops_cpu.linear.matrix import work_bytes
from mie.ops_cpu.linear.tiled import TiledMatrix, TiledPlan, tasks_of
from mie.ops_cpu.processes.helpers import HelperProcesses, pack
from mie.ops_cpu.threads.counts import HeadStart, ThreadCount

EARLIER = 1e-6
"""Seconds by which helper processes should end before the caller, which then need not wait."""
LEAST_BYTES = 1 << 18
"""Bytes of a matrix below which a hand-over takes longer than it saves."""
MAX_PRODUCTS = 1 << 12
"""Number of products that are kept ready."""
Turn = tuple[list[bytes], Callable[[], object]]
"""The messages to the helpers, and the caller's own part."""


class SharedProducts:
    """Products of at most ``max_rows`` rows with the matrices of a plan that exist by now."""

    def __init__(
        self, plan: TiledPlan, allocator: CachingAllocator, *, kind: int, max_rows: int
    ) -> None:
        """Take the memory. Messages begin with ``kind``. `helpers` are forked afterwards."""
        self.helpers: HelperProcesses | None = None
        self.allocator = allocator
        self.kind, self.max_rows = kind, max_rows
        self._plan = plan
        matrices = plan.matrices()
        for number, matrix in enumerate(matrices):
            matrix.shared_by, matrix.shared_number = self, number
        # Weak references, so that a model that is no longer used is freed at once.
        self._matrices = [weakref.ref(matrix) for matrix in matrices]
        max_padded = max_rows + MAX_GROUP
        shapes = [matrix.tiles.shape for matrix in matrices]
        self._x = shared_zeros((max_padded * max(k for _, k, _ in shapes),), plan.dtype)
        self._y = shared_zeros((max_padded * max(n * w for n, _, w in shapes),), plan.dtype)
        self._products: dict[tuple[int, int], _Product] = {}
        self._learners: dict[tuple[tuple[int, ...], int], tuple[ThreadCount, HeadStart]] = {}

    def close(self) -> None:
        """Forget the helpers, and what was prepared for matrices."""
        self.helpers = None
        self._products.clear()

    def takes(self, matrix: TiledMatrix, num_rows: int) -> bool:
        """Return whether to share this product. Small ones are not worth it."""
        return (
            matrix.shared_by is self
            and 0 < num_rows <= self.max_rows
            and matrix.tiles.nbytes >= LEAST_BYTES
            and self.helpers is not None
            and self.helpers.are_usable
        )

    def apply(
        self, x: Floats, matrix: TiledMatrix, residual: Floats | None, *, is_brief: bool
    ) -> Floats:
        """Compute `TiledPlan.apply`."""
        key = matrix.shared_number, len(x)
        if key not in self._products:
            if len(self._products) >= MAX_PRODUCTS:
                self._products.clear()
            self._products[key] = _Product(self, matrix, len(x))
        return self._products[key].apply(x, residual, is_brief=is_brief)

    def places(self, matrix: TiledMatrix, num_rows: int) -> tuple[Floats, Floats]:
        """Return the places of the rows [groups, G, K] and of the result [padded rows, columns]."""
        num_tiles, num_inputs, width = matrix.tiles.shape
        [(_, group, number)], num_padded = self._plan.geometry.cut(num_rows, num_inputs, width)
        x = self._x[: num_padded * num_inputs].reshape(number, group, num_inputs)
        return x, self._y[: num_padded * num_tiles * width].reshape(num_padded, -1)

    def learners(self, matrix: TiledMatrix, num_rows: int) -> tuple[ThreadCount, HeadStart]:
        """Return what learns how products of this kind are shared."""
        kind = matrix.tiles.shape, num_rows
        if kind not in self._learners:
            count = self._plan.new_count(matrix.tiles, num_rows)
            head_start = HeadStart(len(matrix.tiles), count.most, EARLIER)
            self._learners[kind] = count, head_start
        return self._learners[kind]

    def bind(self, number: int, num_rows: int, first: int, stop: int) -> Callable[[], object]:
        """Return what multiplies some tiles of a matrix, in any of the processes."""
        matrix, which = self._matrices[number](), slice(first, stop)
        assert matrix is not None, "the caller multiplies by it"
        x, y = self.places(matrix, num_rows)
        num_groups, group, _ = x.shape
        num_tiles, _, width = matrix.tiles.shape
        out = y.reshape(num_groups, group, num_tiles, width).transpose(2, 0, 1, 3)[which]
        tiles = matrix.tiles[which]
        if len(matrix.parts) == 1 and tiles.dtype == x.dtype:
            # The plan computes the same, and prepares it at each call.
            return partial(np.matmul, x, tiles[:, None], out=out, order="C")
        return partial(self._plan.product, x, tiles, matrix.parts, out, 0)


class _Product:
    """The product of some number of rows with one matrix."""

    def __init__(self, shared: SharedProducts, matrix: TiledMatrix, num_rows: int) -> None:
        self._shared, self._number, self._num_rows = shared, matrix.shared_number, num_rows
        groups, y = shared.places(matrix, num_rows)
        rows = groups.reshape(-1, groups.shape[2])
        self._place, self._padding = rows[:num_rows], rows[num_rows:]
        self._y = y[:num_rows, : matrix.num_outputs]
        self._bias = None if matrix.bias is None else matrix.bias[: matrix.num_outputs]
        self._num_tiles = len(matrix.tiles)
        self._num_bytes = work_bytes(matrix.tiles.nbytes, num_rows)
        self._count, self._head_start = shared.learners(matrix, num_rows)
        self._alone = self._bind(slice(0, self._num_tiles))
        self._bound: tuple[tuple[int, int], list[Turn]] = (0, 0), []

    def apply(self, x: Floats, residual: Floats | None, *, is_brief: bool) -> Floats:
        """Compute `TiledPlan.apply`."""
        self._place[...] = x
        self._padding.fill(0)
        self._multiply()
        y, bias = self._y, self._bias
        if is_brief and bias is None and residual is None and y.flags.c_contiguous:
            return y
        result: Floats = self._shared.allocator.empty(y.shape, y.dtype)
        if bias is not None:
            np.add(y, bias, out=result)
            y = result
        if residual is not None:
            np.add(y, residual, out=result)
        elif bias is None:
            result[...] = y
        return result

    def _multiply(self) -> None:
        helpers, count = self._shared.helpers, self._count
        num_processes = count.choose()
        begin = perf_counter()
        if num_processes == 1 or helpers is None or helpers.are_paused():
            self._alone()
        else:
            turns = self._turns_of(num_processes)
            for messages, own in turns:
                lag = helpers.run(messages, own)
            if len(turns) == 1:
                self._head_start.note(lag, perf_counter() - begin)
        if count.is_trial:
            count.note(perf_counter() - begin)

    def _turns_of(self, number: int) -> list[Turn]:
        """Return the turns of this many processes, with the head start that was learned."""
        key = number, round(self._head_start.extra)
        if self._bound[0] != key:
            tasks = tasks_of(self._num_tiles, 1, number, self._num_bytes, key[1])
            shares = [tiles for tiles, _ in tasks]
            turns = [shares[i : i + number] for i in range(0, len(shares), number)]
            self._bound = (
                key,
                [
                    ([self._message(share) for share in others], self._bind(own))
                    for own, *others in turns
                ],
            )
        return self._bound[1]

    def _message(self, share: slice) -> bytes:
        return pack(self._shared.kind, self._number, self._num_rows, share.start, share.stop)

    def _bind(self, share: slice) -> Callable[[], object]:
        return self._shared.bind(self._number, self._num_rows, share.start, share.stop)
