"""Assign running sequences to seats, which are the runner's rows."""

from __future__ import annotations

import heapq
from collections import Counter

from mie.memory.table import BlockTable
from mie.sched.plan import NewRow
from mie.sched.queues import dequeue, enqueue
from mie.sched.sequence import Sequence


class Seats:
    """The running sequences in order of their keys, each in its own row."""

    def __init__(self, count: int) -> None:
        self.running: list[Sequence] = []
        self.rows: dict[int, Sequence] = {}
        """The sequence in each row that is taken."""
        self.num_prefilling = 0
        """The number of running sequences with more to compute than the last sampled token."""
        self.promised: Counter[str | None] = Counter()
        """The number of free seats that each client's choices take when this step is done."""
        self._free = list(range(count))  # a heap, so that low rows are taken first
        self._new: dict[int, Sequence] = {}  # not yet announced to the runner

    @property
    def num_promised(self) -> int:
        """The number of free seats that choices take when this step is done."""
        return self.promised.total() if self.promised else 0

    @property
    def held(self) -> Counter[str | None]:
        """The number of seats that each client has, or that its choices take after this step."""
        return self.promised + Counter([seq.request.client for seq in self.running])

    @property
    def num_free(self) -> int:
        """The number of seats that can still be promised."""
        return len(self._free) - self.num_promised

    @property
    def next_row(self) -> int:
        """The row that is taken next. There must be one."""
        return self._free[0]

    def take(self, seq: Sequence, table: BlockTable, step: int, *, is_prefilling: bool) -> None:
        """Start a sequence over the blocks of a table that was made for `next_row`."""
        row = heapq.heappop(self._free)
        assert row == table.row, "the table is for another row"
        seq.table, seq.turn = table, (step, seq.num_tokens)
        seq.was_admitted, seq.is_prefilling = True, is_prefilling
        self.num_prefilling += is_prefilling
        self.rows[row] = self._new[row] = seq
        enqueue(self.running, seq)

    def end_prefill(self, seq: Sequence) -> None:
        """Mark a sequence as decoding from now on."""
        self.num_prefilling -= seq.is_prefilling
        seq.is_prefilling = False

    def leave(self, seq: Sequence) -> BlockTable:
        """Remove a running sequence. Return its table, which is still open."""
        table = seq.table
        assert table is not None
        self.end_prefill(seq)
        dequeue(self.running, seq)
        heapq.heappush(self._free, table.row)
        del self.rows[table.row]
        self._new.pop(table.row, None)
        seq.table = None
        seq.request.metrics.num_copied_blocks += table.num_copies
        return table

    def take_new(self) -> tuple[NewRow, ...]:
        """Return what the runner must know of the new sequences. Each is returned once."""
        new_rows = tuple([seq.new_row() for seq in self._new.values()])
        self._new.clear()
        return new_rows
