"""Order the queues.

Every sequence has one key, fixed when its request arrives, that orders both queues. The smallest
key is admitted first and the largest is preempted first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from mie.config.engine import EngineConfig
from mie.sched.sequence import Request, Sequence

VICTIM_RULES = {
    "fcfs": "last arrived",
    "priority": "lowest priority, then last arrived",
    "sjf": "longest job",
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
