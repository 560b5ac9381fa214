"""Keep the running sequences, each in a row of the runner."""

import heapq
from bisect import bisect_left, insort
from operator import attrgetter

from mie.memory.table import BlockTable
from mie.sched.plan import NewRow
from mie.sched.sequence import Sequence

_KEY = attrgetter("key")


def insert(seqs: list[Sequence], seq: Sequence) -> None:
    """Insert a sequence into a list in the order of the keys."""
    insort(seqs, seq, key=_KEY)


def remove(seqs: list[Sequence], seq: Sequence) -> bool:
    """Remove a sequence from a list in the order of the keys. Return False if it is not there."""
    index = bisect_left(seqs, seq.key, key=_KEY)
    is_there = index < len(seqs) and seqs[index] is seq
    if is_there:
        del seqs[index]
    return is_there


class RunningRows:
    """The running sequences in the order of their keys, and the row of each."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.running: list[Sequence] = []
        self.by_row: dict[int, Sequence] = {}
        """The sequence in each row that is taken."""
        self.forking: list[Sequence] = []
        """The choices that take a free row when this step is done."""
        self._new: dict[int, Sequence] = {}  # not yet announced to the runner
        self.clear()

    def clear(self) -> None:
        """Free every row."""
        for seqs in (self.running, self.by_row, self.forking, self._new):
            seqs.clear()
        self.num_prefilling = 0
        """Number of running sequences with more to compute than the last sampled token."""
        self._free = list(range(self._count))  # a heap, so that low rows are taken first

    @property
    def num_free(self) -> int:
        """The number of rows that are free and not reserved for choices that fork."""
        return len(self._free) - len(self.forking)

    @property
    def next_row(self) -> int:
        """The row that is taken next. There must be one."""
        return self._free[0]

    def take(self, seq: Sequence, table: BlockTable, step: int, *, is_prefilling: bool) -> None:
        """Start a sequence over the blocks of a table that was made for `next_row`."""
        row = heapq.heappop(self._free)
        assert row == table.row, "the table is for another row"
        seq.table, seq.running_since = table, (step, seq.num_tokens)
        seq.was_admitted, seq.is_prefilling = True, is_prefilling
        self.num_prefilling += is_prefilling
        self.by_row[row] = self._new[row] = seq
        insert(self.running, seq)

    def end_prefill(self, seq: Sequence) -> None:
        """Mark a sequence as decoding from now on."""
        self.num_prefilling -= seq.is_prefilling
        seq.is_prefilling = False

    def free(self, seq: Sequence) -> BlockTable:
        """Free the row of a running sequence. Return the sequence's table. It is still open."""
        table = seq.table
        assert table is not None
        self.end_prefill(seq)
        remove(self.running, seq)
        heapq.heappush(self._free, table.row)
        del self.by_row[table.row]
        self._new.pop(table.row, None)
        seq.table = None
        seq.request.metrics.num_copied_blocks += table.num_copies
        return table

    def take_new(self) -> tuple[NewRow, ...]:
        """Return the rows that were not announced to the runner. Each is returned once."""
        new_rows = tuple([seq.new_row() for seq in self._new.values()])
        self._new.clear()
        return new_rows
