"""Keep queues of sequences in the order of their keys."""

from bisect import bisect_left, insort
from operator import attrgetter

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
