"""Keep the slots of adapters as kernels read them, and record products with adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.adapters.low_rank import AdapterOperators, LowRank, SlotShape
from mie.ops.arrays import Floats
from mie.ops_jit.layout import ADAPTED_TILE, EXPAND_SHARES, LANES, NUM_ADAPTED, NUM_TOKENS
from mie.ops_jit.memory import HugePages, JitMatrix
from mie.ops_jit.program import Value, room_for
from mie.ops_jit.recorder import Recorder

KERNELS = ("shrink_rows", "expand_rows")


@dataclass(frozen=True, eq=False)
class Slots:
    """The adapters of one matrix. Slot 1 is the first entry of each array."""

    shape: SlotShape
    a: Floats
    """A of each part: [slots, parts, R, K]."""
    b: Floats
    """B times the scale, in panels of 16 outputs of one part: [slots, panels, R, 16]."""
    ranks: NDArray[np.int64]
    """[slots, parts]. A part of rank 0 is not changed."""
    panels: NDArray[np.int64]
    """[panels, 3]: first output, number of outputs, part."""

    @classmethod
    def new(cls, shape: SlotShape, pages: HugePages) -> Slots:
        """Return empty slots."""
        panels, first = [], 0
        for part, count in enumerate(shape.counts):
            for begin in range(0, count, LANES):
                panels.append([first + begin, min(LANES, count - begin), part])
            first += count
        num_slots, rank, num_parts = shape.num_slots, shape.max_rank, len(shape.counts)
        return cls(
            shape,
            pages.zeros((num_slots, num_parts, rank, shape.num_inputs), np.float32),
            pages.zeros((num_slots, len(panels), rank, LANES), np.float32),
            np.zeros((num_slots, num_parts), np.int64),
            np.array(panels, np.int64),
        )

    def put(self, slot: int, changes: Sequence[LowRank | None]) -> None:
        """Replace the contents of slot ``slot - 1`` of the arrays."""
        for part, change in enumerate(changes):
            self.ranks[slot - 1, part] = rank = change.rank if change else 0
            if change is None:
                continue
            self.a[slot - 1, part, :rank] = change.a
            scaled = change.b.T * np.float32(change.scale)
            own = self.b[slot - 1, self.panels[:, 2] == part, :rank]
            padded = np.zeros((rank, len(own) * LANES), np.float32)
            padded[:, : scaled.shape[1]] = scaled
            panels = padded.reshape(rank, -1, LANES).swapaxes(0, 1)
            self.b[slot - 1, self.panels[:, 2] == part, :rank] = panels


class JitAdapters(AdapterOperators):
    """The operators of adapters."""

    def __init__(self, recorder: Recorder, pages: HugePages) -> None:
        self._recorder, self._pages = recorder, pages

    def slot_bytes(self, shape: SlotShape) -> int:
        num_outputs = sum(ceil_div(count, LANES) * LANES for count in shape.counts)
        num_numbers = shape.num_inputs * len(shape.counts) + num_outputs
        return 4 * shape.num_slots * shape.max_rank * num_numbers

    def step_bytes(self, shapes: Sequence[SlotShape], num_tokens: int) -> int:
        """Count x A^T, and gate and up: their product is not fused with the activation."""
        widths = {len(shape.counts) * shape.max_rank for shape in shapes}
        most = max(sum(shape.counts) for shape in shapes)
        return 4 * room_for(num_tokens) * (sum(widths) + most)

    def with_slots(self, weight: JitMatrix, shape: SlotShape) -> JitMatrix:
        self._recorder.more_kernels = (*{*self._recorder.more_kernels, *KERNELS},)
        return replace(weight, slots=Slots.new(shape, self._pages))

    def put(self, weight: JitMatrix, slot: int, changes: Sequence[LowRank | None]) -> None:
        assert weight.slots is not None
        weight.slots.put(slot, changes)


def add_adapters(recorder: Recorder, x: Value, slots: Slots, out: Value) -> None:
    """Record the changes of a product ``out`` [T, N] by the adapters of its rows."""
    program, shape = recorder.program, slots.shape
    num_parts, rank, width = len(shape.counts), shape.max_rank, sum(shape.counts)
    h = program.value(NUM_TOKENS, num_parts, rank)
    shrunk = x, slots.a, slots.ranks, h, shape.num_inputs, rank, num_parts
    program.emit("shrink_rows", NUM_ADAPTED, ADAPTED_TILE, num_parts, *shrunk)
    program.emit(
        "expand_rows", NUM_ADAPTED, ADAPTED_TILE, EXPAND_SHARES,
        h, slots.b, slots.ranks, slots.panels, out, width, rank, num_parts, len(slots.panels),
    )  # fmt: skip
