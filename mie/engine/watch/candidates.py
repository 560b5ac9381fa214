"""Choose the waiting sequences that a step may check before it plans."""

from __future__ import annotations

from itertools import islice

from mie.sched.scheduler import Scheduler
from mie.sched.sequence import Sequence


class Candidates:
    """The waiting sequences that may be admitted next. Each of them comes once while it waits."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._seen: set[tuple[int, int]] = set()

    def take(self) -> list[Sequence]:
        """Return the new candidates that may read the prefix cache."""
        waiting = self._scheduler.waiting
        if not waiting:
            return []
        num_free = self._scheduler.config.max_num_seqs - len(self._scheduler.running)
        near = [*islice(waiting, num_free)]
        self._seen &= {seq.seq_id for seq in near}
        new = [seq for seq in near if seq.may_read_cache and seq.seq_id not in self._seen]
        self._seen |= {seq.seq_id for seq in new}
        return new
