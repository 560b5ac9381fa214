"""Prepare the product of a few rows with one matrix, because a small product takes microseconds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import CachingAllocator

if TYPE_CHECKING:
    from mie.ops_cpu.linear.tiled import TiledMatrix

Task = Callable[[], object]


class ReadyProduct:
    """The product of some number of rows with one matrix, at fixed places in memory."""

    def __init__(
        self,
        matrix: TiledMatrix,
        num_rows: int,
        shares: Sequence[slice],
        rows: Floats,
        result: Floats,
        allocator: CachingAllocator,
    ) -> None:
        """Place the rows in ``rows`` and their product in ``result``.

        Each task multiplies by a share of the tiles. What lasts is copied to memory of
        ``allocator``.
        """
        num_tiles, num_inputs, width = matrix.tiles.shape
        [(_, group, num_groups)], num_padded = matrix.layout.cut(num_rows, num_inputs)
        groups = rows[: num_padded * num_inputs].reshape(num_groups, group, num_inputs)
        y = result[: num_padded * num_tiles * width].reshape(num_padded, -1)
        self._tasks: Sequence[Task] = [_task(matrix, groups, y, share) for share in shares]
        self._allocator = allocator
        self._place = matrix.layout.placer(groups, num_rows)
        self._y = y[:num_rows, : matrix.num_outputs]
        self._bias = None if matrix.bias is None else matrix.bias[: matrix.num_outputs]
        self._may_be_brief = matrix.bias is None and self._y.flags.c_contiguous

    def apply(
        self,
        x: Floats,
        residual: Floats | None,
        share: Callable[[Sequence[Task]], object],
        *,
        is_brief: bool,
    ) -> Floats:
        """Compute `TiledPlan.apply`, after share(tasks) has done the tasks."""
        self._place(x)
        share(self._tasks)
        y, bias = self._y, self._bias
        if is_brief and self._may_be_brief and residual is None:
            return y
        result: Floats = self._allocator.empty(y.shape, y.dtype)
        if bias is not None:
            np.add(y, bias, out=result)
            y = result
        if residual is not None:
            np.add(y, residual, out=result)
        elif bias is None:
            result[...] = y
        return result


def do_alone(tasks: Sequence[Task]) -> None:
    """Do the tasks one after another."""
    for task in tasks:
        task()


def _task(matrix: TiledMatrix, groups: Floats, y: Floats, which: slice) -> Task:
    """Return what multiplies by some tiles of a matrix."""
    columns = slice(which.start * matrix.layout.width, which.stop * matrix.layout.width)
    at_once = matrix.layout.tiles_at_once(matrix.tiles, groups.shape[1])
    return matrix.layout.prepared(groups, matrix.tiles[which], y[:, columns], at_once)
