"""Share a small step's attention with helper processes.

The KV cache is in memory that they share. Every process plans the step from the same numbers, and
so with the same items. It computes its own share of them.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from mie.ops.arrays import Floats, Ints
from mie.ops.backend import StepBatch
from mie.ops_cpu.allocator import shared_zeros
from mie.ops_cpu.attention.attention import Attention, Plan, PlanKey
from mie.ops_cpu.processes.helpers import HelperProcesses, pack

NUM_BATCHES = 4
"""Batches that plans are made from: the last two without a window, and with one."""
MOST_INTS = 1 << 16
"""Maximum number of integers of a batch, which are block ids for the most part."""
NO_WINDOW = _NO_LAYER = -1


class SharedAttention:
    """Attention of steps with at most ``max_rows`` tokens over the KV cache of the last step."""

    def __init__(
        self,
        attention: Attention,
        *,
        kind: int,
        max_rows: int,
        num_processes: int,
    ) -> None:
        """Take the memory. Messages begin with ``kind``. `helpers` are forked afterwards."""
        cache, num_heads = attention.cache, attention.num_heads
        assert cache is not None
        self.helpers: HelperProcesses | None = None
        self.num_processes = num_processes
        self.cache = cache
        self._attention, self._kind, self._num_heads = attention, kind, num_heads
        num_kv_heads, head_dim = cache.shape[-2:]
        shape = max_rows, num_kv_heads, num_heads // num_kv_heads, head_dim
        self._q, self._out = (shared_zeros(shape, cache.dtype) for _ in range(2))
        self._batches = shared_zeros((NUM_BATCHES, MOST_INTS), np.int64)
        self._lengths = shared_zeros((max_rows,), np.int64)
        """The lengths of the sequences in the current step."""
        self._batch: StepBatch | None = None
        self._num_plans = self._num_steps = 0
        self._has_windowed = False
        """Whether a plan with a window was made in this step. Models have one window at most."""
        self._plans: dict[int, Plan] = {}
        self._steps: dict[int, int] = {}
        """The plans by number, and the step that each was last used in."""

    def plan(self, batch: StepBatch, cache: Floats, key: PlanKey, num_threads: int) -> Plan:
        """Make a plan in so many processes at the same time."""
        num_heads, window, invariant = key
        self._begin(batch)
        is_possible = self._is_possible() and _size_of(batch) <= MOST_INTS
        # The batch of a step's windowed plan is not overwritten by another one's.
        is_possible = is_possible and num_heads == self._num_heads
        if window is not None:
            is_possible = is_possible and not self._has_windowed
            self._has_windowed = True
        if num_threads == 1 or not is_possible:
            return self._attention.plan(batch, cache, key, 1)
        self._num_plans += 1
        # Windowed plans serve for one step. They may not overwrite the batch of one that lasts.
        number = 2 * self._num_plans + (window is not None)
        header = num_threads, NO_WINDOW if window is None else window, int(invariant)
        _write(self._batches[number % NUM_BATCHES], (self._num_steps, *header), batch)
        message = pack(self._kind, number, self._num_steps, _NO_LAYER)
        assert self.helpers is not None
        self.helpers.run([message] * (num_threads - 1), partial(self._make, number))
        plan = self._plans[number]
        plan.number = number if plan.num_threads > 1 else 0
        return plan

    def run(self, plan: Plan, batch: StepBatch, q: Floats, layer: int, out: Floats) -> None:
        """Compute a layer into ``out``. q and out [T, Hkv, G, Dh]."""
        if not plan.number or not self._is_possible():
            plan.run_items(q, layer, out, 0, range(plan.num_items))
            return
        self._begin(batch)
        self._q[: len(q)] = q
        numbers = self._kind, plan.number, self._num_steps, layer, len(q)
        messages = [pack(*numbers, share) for share in range(1, plan.num_threads)]
        assert self.helpers is not None
        self.helpers.run(messages, partial(self._run_share, plan, 0, layer, len(q)))
        out[...] = self._out[: len(q)]

    def do(self, number: int, step: int, layer: int, num_rows: int, share: int) -> None:
        """Compute one share of a plan's items, in any of the processes, or only make the plan."""
        if number not in self._plans:
            self._make(number)
        if self._steps[number] != step:
            self._plans[number].lengthen(self._lengths.tolist())
            self._steps[number] = step
        if layer != _NO_LAYER:
            self._run_share(self._plans[number], share, layer, num_rows)

    def _make(self, number: int) -> None:
        """Make a plan from the batch that the caller has written."""
        (step, num_threads, window, invariant), batch = _read(self._batches[number % NUM_BATCHES])
        key = self._num_heads, None if window == NO_WINDOW else window, bool(invariant)
        plan = self._attention.plan(batch, self.cache, key, num_threads, may_combine=False)
        if len(self._plans) >= NUM_BATCHES:
            oldest = next(iter(self._plans))
            del self._plans[oldest], self._steps[oldest]
        self._plans[number], self._steps[number] = plan, step

    def _is_possible(self) -> bool:
        helpers = self.helpers
        return helpers is not None and helpers.are_usable and not helpers.are_paused()

    def _run_share(self, plan: Plan, share: int, layer: int, num_rows: int) -> None:
        numbers = range(share, plan.num_items, plan.num_threads)
        plan.run_items(self._q[:num_rows], layer, self._out[:num_rows], share, numbers)

    def _begin(self, batch: StepBatch) -> None:
        if batch is not self._batch:
            self._num_steps += 1
            self._lengths[: len(batch.seq_lens)] = batch.seq_lens
            self._has_windowed = False
            self._batch = batch  # now, because an interrupt may come before


def _size_of(batch: StepBatch) -> int:
    num_sequences, num_blocks = batch.block_tables.shape
    return int(6 + (num_sequences + 1) + num_sequences + num_sequences * num_blocks)


def _write(memory: Ints, header: tuple[int, int, int, int], batch: StepBatch) -> None:
    tables = batch.block_tables
    numbers = [*header, *tables.shape], batch.cu_seqlens_q, batch.seq_lens, tables.ravel()
    memory[: _size_of(batch)] = np.concatenate(numbers)


def _read(memory: Ints) -> tuple[list[int], StepBatch]:
    *header, num_sequences, num_blocks = memory[:6].tolist()
    sizes = num_sequences + 1, num_sequences, num_sequences * num_blocks
    ends = 6 + np.cumsum(sizes)
    starts, lengths, tables = np.split(memory[6 : ends[-1]].copy(), ends[:2] - 6)
    none = np.empty(0, np.int64)
    return header, StepBatch(
        token_ids=none,
        positions=none,
        slot_mapping=none,
        cu_seqlens_q=starts,
        seq_lens=lengths,
        block_tables=tables.reshape(num_sequences, num_blocks),
        logits_rows=none,
    )
