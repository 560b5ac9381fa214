"""Order the queues.

Every sequence has one key, fixed when its request arrives, that orders both queues. The smallest
key is admitted first and the largest is preempted first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from mie.config.engine import EngineConfig
from mie.sched.sequence import Request, Sequence

_KEY = attrgetter("key")

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
