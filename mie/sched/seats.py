"""Assign running sequences to seats, which are the runner's rows, and keep queues in order."""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from operator import attrgetter

from mie.memory.manager import KVCacheManager
from mie.memory.table import BlockTable
from mie.sched.plan import NewRow
from mie.sched.sequence import Sequence

_KEY = attrgetter("key")


def enqueue(queue: list[Sequence], seq: Sequence) -> None:
    """Insert a sequence into a queue, which is ordered by the keys."""
    insort(queue, seq, key=_KEY)


def dequeue(queue: list[Sequence], seq: Sequence) -> bool:
    """Remove a sequence from a queue. Return False if it is not there."""
    index = bisect_left(queue, seq.key, key=_KEY)
    is_there = index < len(queue) and queue[index] is seq
    if is_there:
        del queue[index]
    return is_there


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
        """Return the rows that the runner does not know yet. Each is returned once."""
        new_rows = tuple([seq.new_row() for seq in self._new.values()])
        self._new.clear()
        return new_rows

    # The step after a step of decodes. Each sequence that does not end computes one more token, so
    # that step can be launched before the tokens of this one are known. If a sequence turns out to
    # have ended, the work for its row is discarded.

    def reserve_ahead(self, manager: KVCacheManager) -> None:
        """Reserve slots for each decode's token and the one after it, as far as blocks last.

        Call it before admissions, because they pin blocks that are partly filled.
        """
        for seq in self.running:
            table = seq.table
            if seq.is_prefilling or table is None or table.num_tokens + 1 != table.num_writable:
                continue
            if seq.may_continue and not manager.grow(table, table.num_tokens + 2):
                return

    def rows_ahead(self) -> tuple[int, ...]:
        """Return the rows of the step after one in which all sequences decode.

        The result is empty if one of them has no slot yet.
        """
        tables = [seq.table for seq in self.running if seq.may_continue and seq.table is not None]
        if any(table.num_tokens + 2 > table.num_writable for table in tables):
            return ()
        return tuple(sorted(table.row for table in tables))
