"""Who runs: the seats, which are the runner's rows."""

from __future__ import annotations

import heapq
from bisect import insort

from mie.memory.table import BlockTable
from mie.sched.plan import NewRow
from mie.sched.sequence import Sequence


class Seats:
    """The running sequences in order of their keys, each in a row of its own."""

    def __init__(self, count: int) -> None:
        self.running: list[Sequence] = []
        self.rows: list[Sequence | None] = [None] * count
        """Who has which row."""
        self.num_prefilling = 0
        """Of the running, those that have more to compute than the token sampled last."""
        self.num_promised = 0
        """Free seats that choices take when this step is done."""
        self._free = list(range(count))  # a heap: low rows are taken first
        self._new: dict[int, Sequence] = {}  # the runner has yet to hear of them

    @property
    def num_free(self) -> int:
        """How many more may be promised."""
        return len(self._free) - self.num_promised

    @property
    def next_row(self) -> int:
        """The row that is taken next; there must be one."""
        return self._free[0]

    def take(self, seq: Sequence, table: BlockTable, *, is_prefilling: bool) -> None:
        """Let a sequence run, over the blocks of a table that was made for `next_row`."""
        row = heapq.heappop(self._free)
        assert row == table.row, "a table for another row"
        seq.table, seq.row = table, row
        seq.was_admitted, seq.is_prefilling = True, is_prefilling
        self.num_prefilling += is_prefilling
        self.rows[row] = self._new[row] = seq
        insort(self.running, seq, key=lambda seq: seq.key)

    def end_prefill(self, seq: Sequence) -> None:
        """From now on it decodes."""
        self.num_prefilling -= seq.is_prefilling
        seq.is_prefilling = False

    def leave(self, seq: Sequence) -> None:
        """Let a sequence run no longer; its table is closed."""
        assert seq.row is not None
        self.end_prefill(seq)
        self.running.remove(seq)
        heapq.heappush(self._free, seq.row)
        self.rows[seq.row] = None
        self._new.pop(seq.row, None)
        seq.table = seq.row = None

    def take_new(self) -> tuple[NewRow, ...]:
        """What the runner must know of those who came; each is told once."""
        new_rows = tuple([seq.new_row() for seq in self._new.values()])
        self._new.clear()
        return new_rows

    def check_invariants(self) -> None:
        """Assert that the running are in order, and that each row has one owner."""
        assert [seq.key for seq in self.running] == sorted(seq.key for seq in self.running)
        taken = [seq.row for seq in self.running if seq.row is not None]
        assert sorted([*taken, *self._free]) == list(range(len(self.rows)))
        assert all(self.rows[seq.row] is seq for seq in self.running if seq.row is not None)
        assert sum(seq is not None for seq in self.rows) == len(self.running)
        assert self.num_prefilling == sum(seq.is_prefilling for seq in self.running)
        assert set(self._new.items()) <= set(enumerate(self.rows)), "a row of nobody is announced"
