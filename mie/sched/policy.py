"""Who comes first: the order of the queues.

Every sequence has one key, fixed when its request arrives, and both queues are ordered by it: the
smallest is admitted first, the largest is preempted first.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from mie.config import EngineConfig
from mie.sched.sequence import Request, Sequence

VICTIM_RULES = {
    "fcfs": "last arrived",
    "priority": "lowest priority, then last arrived",
    "sjf": "longest job",
}
"""Who is preempted under each policy, in words."""


def rank_of(config: EngineConfig, request: Request, step: int, longest: int) -> int:
    """The first part of a key, before the order of arrival.

    ``fcfs``: the same for all. ``priority``: the request's own. ``sjf``: its job in tokens, prompt
    and answer, at most ``longest``; and since a request that waits ages by ``sjf_ageing`` tokens a
    step, whoever arrives at a later step is that much behind. The difference of two ranks is then
    what it would be if both were aged every step, so that a rank never has to change.
    """
    if config.scheduling_policy == "priority":
        return request.priority
    if config.scheduling_policy == "sjf":
        max_tokens = request.params.max_tokens
        job = longest if max_tokens is None else min(request.num_prompt + max_tokens, longest)
        return job + (config.sjf_ageing or 1) * step
    return 0


class WaitingQueue:
    """Sequences in order of their keys. Adding and taking the first cost the logarithm of the
    length; leaving from the middle is marked, and swept up later."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int, int], Sequence]] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._members

    def __iter__(self) -> Iterator[Sequence]:
        """In order; for tests and the event log."""
        return iter(sorted(self._members, key=lambda seq: seq.key))

    @property
    def first(self) -> Sequence:
        """Who is next; the queue must not be empty."""
        while self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1]

    def add(self, seq: Sequence) -> None:
        assert seq not in self._members, "waits twice"
        if len(self._heap) > 2 * len(self._members) + 64:  # mostly marked: sweep
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
        self._members.add(seq)
        heapq.heappush(self._heap, (seq.key, seq))

    def remove(self, seq: Sequence) -> None:
        self._members.remove(seq)
