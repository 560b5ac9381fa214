"""Keep the slots of adapters on the device, and launch the kernels of their changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.adapters.low_rank import AdapterOperators, LowRank, SlotShape
from mie.ops.backend import Array
from mie.ops_gpu.arena import Empty
from mie.ops_gpu.arrays import kernel_type, next_power_of_two
from mie.ops_gpu.few_rows import MOST_SHARED, Norm
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.queue import Queue, in_queue

if TYPE_CHECKING:
    from mie.ops_gpu.steps import Steps
    from mie.ops_gpu.weights import CupyLinear

THREADS = 256
MANY_ROWS = 17
"""Rows of a step from which a block takes eight at a time. Fewer rows would not fill the chip."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Slots:
    """The adapters of one matrix [N, K]. kernels/adapters.cu has the shapes."""

    shape: SlotShape
    a: Array
    b: Array
    ranks: Array
    ends: Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Changes:
    """The changes of the rows of one product, of which x A^T is computed."""

    adapters: CupyAdapters
    slots: Slots
    of_tokens: Array  # [T]
    shrunk: Array  # [T, parts, R]

    def of(self, rows: slice) -> Array:
        """Return the changes [R, N] of some rows in float32, for the kernels of few rows."""
        count, width = len(self.of_tokens[rows]), sum(self.slots.shape.counts)
        out = self.adapters.empty("changes", (count * width,), np.dtype(np.float32))
        out = out.reshape(count, width)
        self._expand(rows, out, is_added=False)
        return out

    def add(self, out: Array) -> None:
        """Add the changes to a product [T, N]."""
        self._expand(slice(None), out, is_added=True)

    def _expand(self, rows: slice, out: Array, *, is_added: bool) -> None:
        slots, (num_rows, width) = self.slots, out.shape
        of_tokens, shrunk = self.of_tokens[rows], self.shrunk[rows]
        block_rows = rows_of_a_block(len(self.of_tokens))
        name = f"expand_rows<{kernel_type(out)}, {block_rows}>"
        arrays = (shrunk, of_tokens, slots.b, slots.ranks, slots.ends, out)
        sizes = (num_rows, width, len(slots.shape.counts), slots.shape.max_rank, is_added)
        grid = (ceil_div(num_rows, block_rows), ceil_div(width, THREADS))
        kernel = self.adapters.launcher.kernel("adapters.cu", name)
        kernel(grid, (THREADS,), (*arrays, *map(np.int32, sizes)))


class CupyAdapters(AdapterOperators):
    """The operators of adapters. A and B are float32, and so are the sums."""

    def __init__(self, launcher: Launcher, queue: Queue, empty: Empty, steps: Steps) -> None:
        self.launcher, self.empty = launcher, empty
        self._queue, self._steps = queue, steps

    def slot_bytes(self, shape: SlotShape) -> int:
        num_numbers = shape.num_inputs * len(shape.counts) + sum(shape.counts)
        return 4 * shape.num_slots * shape.max_rank * num_numbers

    def step_bytes(self, shapes: Sequence[SlotShape], num_tokens: int) -> int:
        """Count both buffers twice, because captured steps may keep earlier ones."""
        shrunk = num_tokens * max(len(shape.counts) * shape.max_rank for shape in shapes)
        changes = min(num_tokens, MOST_SHARED) * max(sum(shape.counts) for shape in shapes)
        return 2 * 4 * (next_power_of_two(shrunk) + next_power_of_two(changes))

    @in_queue
    def with_slots(self, weight: CupyLinear, shape: SlotShape) -> CupyLinear:
        zeros, num_parts = self.launcher.xp.zeros, len(shape.counts)
        first, rank = shape.num_slots, shape.max_rank
        self._steps.has_adapters = True
        slots = Slots(
            shape=shape,
            a=zeros((first, num_parts, rank, shape.num_inputs), np.float32),
            b=zeros((first, rank, sum(shape.counts)), np.float32),
            ranks=zeros((first, num_parts), np.int32),
            ends=self.launcher.xp.asarray(np.cumsum(shape.counts).astype(np.int32)),
        )
        return replace(weight, slots=slots)

    @in_queue
    def put(self, weight: CupyLinear, slot: int, changes: Sequence[LowRank | None]) -> None:
        slots = weight.slots
        assert slots is not None
        on_device, ends = (slots.a, slots.b, slots.ranks), np.cumsum(slots.shape.counts)
        a, b, ranks = (np.zeros(array.shape[1:], array.dtype) for array in on_device)
        for part, (change, end) in enumerate(zip(changes, ends, strict=True)):
            if change is not None:
                ranks[part] = rank = change.rank
                a[part, :rank] = change.a
                columns = slice(end - slots.shape.counts[part], end)
                b[:rank, columns] = change.b.T * np.float32(change.scale)
        for host, array in zip((a, b, ranks), on_device, strict=True):
            array[slot - 1] = self.launcher.xp.asarray(host)

    def changes(self, x: Array, weight: CupyLinear, norm: Norm | None) -> Changes | None:
        """Compute x A^T of a product's rows [T, K], or return None without slots."""
        slots, of_tokens = weight.slots, self._steps.adapters
        if slots is None or of_tokens is None:
            return None
        num_rows, depth = x.shape
        num_parts, rank = len(slots.shape.counts), slots.shape.max_rank
        of_tokens = of_tokens[:num_rows]
        flat = self.empty("shrunk", (num_rows * num_parts * rank,), np.dtype(np.float32))
        shrunk = flat.reshape(num_rows, num_parts, rank)
        block_rows = rows_of_a_block(num_rows)
        name = f"shrink_rows<{kernel_type(x)}, {block_rows}>"
        by: tuple[Any, Any] = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        arrays = (x, by[0], of_tokens, slots.a, slots.ranks, shrunk)
        sizes = (num_rows, depth, rank)
        grid = (ceil_div(num_rows, block_rows), num_parts, ceil_div(rank, THREADS // 32))
        kernel = self.launcher.kernel("adapters.cu", name)
        kernel(grid, (THREADS,), (*arrays, *map(np.int32, sizes), np.float32(by[1])))
        return Changes(adapters=self, slots=slots, of_tokens=of_tokens, shrunk=shrunk)


def rows_of_a_block(num_rows: int) -> int:
    """Return the rows of a block of the kernels. The bits of a row do not depend on it."""
    return 8 if num_rows >= MANY_ROWS else 1
