"""Order the queues.

Every sequence has one key that orders both queues. The smallest key is admitted first and the
largest is preempted first. The key is fixed when its request arrives, and under the fair policy
(`mie.sched.fair`) when it is admitted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from operator import attrgetter

from mie.config.engine import EngineConfig
from mie.memory.moves import Emit
from mie.sched.sequence import Request, Sequence

_KEY = attrgetter("key")

VICTIM_RULES = {
    "fcfs": "last arrived",
    "priority": "lowest priority, then last arrived",
    "sjf": "longest job",
    "fair": "last admitted",
}
"""Which sequence each policy preempts, in words."""


class Policy:
    """The order of requests whose rank is fixed when they arrive."""

    def __init__(self, config: EngineConfig, emit: Emit) -> None:
        self.victim_rule = VICTIM_RULES[config.scheduling_policy]
        self._config = config
        self._emit = emit

    def rank(self, request: Request, step: int, running: Iterable[Sequence]) -> int:
        """Return the rank of a request that arrives now, and will wait: the first part of its key.

        ``fcfs``: the same for all. ``priority``: the request's own. ``sjf``: the maximum number of
        tokens of a choice. Under ``sjf`` a waiting request ages by ``sjf_ageing`` tokens a step, so
        a request that arrives later starts that far behind. This gives the same differences as
        ageing every request at every step, so a rank never changes.
        """
        if self._config.scheduling_policy == "priority":
            return request.priority
        if self._config.scheduling_policy == "sjf":
            return request.sequences[0].max_tokens + (self._config.sjf_ageing or 1) * step
        return 0

    def first(self, waiting: list[Sequence]) -> Sequence:
        """Return the sequence that is admitted next. The queue must not be empty."""
        return waiting[0]

    def settle(self, running: Iterable[Sequence]) -> None:
        """Charge the running sequences for what they got, before sequences are admitted."""

    def admit(self, seq: Sequence) -> None:
        """Note that a sequence's blocks were opened. It is in no queue."""

    def leave(self, request: Request) -> None:
        """Note that a choice of a request has ended."""

    def restart(self, requests: Iterable[Request]) -> None:
        """Note which requests there are, in order of arrival, because the queues are rebuilt."""


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
