"""Order the queues.

Every sequence has one key that orders both queues. The smallest key is admitted first and the
largest is preempted first. The key is fixed when its request arrives, and under the fair policy
(`mie.sched.fair`) when it is admitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from mie.config import EngineConfig
from mie.memory.moves import Emit
from mie.sched.sequence import Request, Sequence

VICTIM_RULES = {
    "fcfs": "last arrived",
    "priority": "lowest priority, then last arrived",
    "sjf": "longest job",
    "fair": "last admitted",
}
"""Which sequence each policy preempts, in words."""


def rank_of(config: EngineConfig, request: Request, step: int, longest: int) -> int:
    """Return the first part of a key, before the order of arrival.

    ``fcfs``: the same for all. ``priority``: the request's own. ``sjf``: the job size in tokens,
    prompt and answer, capped at ``longest``. Under ``sjf`` a waiting request ages by ``sjf_ageing``
    tokens a step, so a request that arrives later starts that far behind. This gives the same
    differences as ageing every request at every step, so a rank never changes.
    """
    if config.scheduling_policy == "priority":
        return request.priority
    if config.scheduling_policy == "sjf":
        max_tokens = request.params.max_tokens
        job = longest if max_tokens is None else min(request.num_prompt + max_tokens, longest)
        return job + (config.sjf_ageing or 1) * step
    return 0


class Policy:
    """The order of requests whose rank is fixed when they arrive."""

    def __init__(self, config: EngineConfig, longest: int, emit: Emit) -> None:
        self.victim_rule = VICTIM_RULES[config.scheduling_policy]
        self._config = config
        self._longest = longest
        self._emit = emit

    def new_queue(self) -> WaitingQueue:
        """Return an empty queue for waiting sequences."""
        return WaitingQueue()

    def rank(self, request: Request, step: int, running: Iterable[Sequence]) -> int:
        """Return the rank of a request that arrives now."""
        return rank_of(self._config, request, step, self._longest)

    def settle(self, running: Iterable[Sequence]) -> None:
        """Take in what the running sequences got, before sequences are admitted."""

    def admit(self, seq: Sequence) -> None:
        """Take in that a sequence's blocks were opened. It is in no queue."""

    def leave(self, request: Request) -> None:
        """Take in that a choice of a request has ended."""


class WaitingQueue:
    """A queue of sequences ordered by their keys.

    Adding and taking the first take logarithmic time. A sequence that leaves from the middle is
    only marked and is removed later.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._members

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in order, for tests and the event log."""
        return iter(sorted(self._members, key=lambda seq: seq.key))

    @property
    def members(self) -> frozenset[Sequence]:
        """The sequences in no order."""
        return frozenset(self._members)

    @property
    def first(self) -> Sequence:
        """The first sequence. The queue must not be empty."""
        while self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def add(self, seq: Sequence) -> None:
        assert seq not in self._members, "waits twice"
        if len(self._heap) > 2 * len(self._members) + 64:  # most entries are marked: remove them
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
        self._members.add(seq)
        heapq.heappush(self._heap, (seq.key, seq))

    def remove(self, seq: Sequence) -> None:
        self._members.remove(seq)
