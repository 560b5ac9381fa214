"""Keep the waiting sequences in order: first come, first served.

Every sequence has one key: its request's rank, the request's number, and the choice's index. The
smallest key is admitted first, and the largest key is preempted first. Other orders are subclasses
of `WaitingQueue` (`mie.sched.orders`).
"""

from collections.abc import Iterable

from mie.config.engine import EngineConfig
from mie.memory.manager import KVCacheManager
from mie.sched.draft import Budget
from mie.sched.rows import RunningRows, insert, remove
from mie.sched.sequence import Request, Sequence


class WaitingQueue:
    """The waiting sequences, and the order in which sequences are admitted and preempted."""

    victim = "last arrived"
    """The sequence that is preempted first, in words for the event log."""

    def __init__(self, config: EngineConfig, rows: RunningRows, manager: KVCacheManager) -> None:
        self._config = config
        self._rows = rows
        self._manager = manager
        self.waiting: list[Sequence] = []

    def clear(self) -> None:
        """Empty the queue."""
        self.waiting.clear()

    def rank(self, request: Request, step: int) -> int:
        """Return the first part of the keys of a request that arrives after ``step`` steps."""
        return 0

    def add(self, seq: Sequence) -> None:
        """Add a sequence, in its place."""
        insert(self.waiting, seq)

    def remove(self, seq: Sequence) -> bool:
        """Remove a waiting sequence. Return False if it does not wait."""
        return remove(self.waiting, seq)

    def first(self) -> Sequence | None:
        """Return the sequence that is admitted next, or None if none may be."""
        return self.waiting[0] if self.waiting else None

    def num_forks(self, seq: Sequence) -> int:
        """Return the number of rows that choices may take when they fork, overtaking none."""
        first = self.first()
        return 0 if first and first.key < seq.key else self._rows.num_free

    # The step.

    def make_way(self, first: Sequence, step: int) -> Iterable[Sequence]:
        """Return the running sequences to preempt for ``first``."""
        return ()

    def budget(self, first: Sequence | None) -> Budget:
        """Return the tokens of a step that may admit ``first``."""
        return Budget(self._config.max_num_batched_tokens)

    def by_preemption(self) -> list[Sequence]:
        """Return the running sequences. The last one is preempted first if blocks run out."""
        return self._rows.running[:]
