"""Let callers take turns, so that one with many jobs does not keep the others waiting."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Job(Generic[K]):
    """A job and those who wait for it."""

    def __init__(self, key: K) -> None:
        self.key = key
        self.futures: set[Future[Any]] = set()
        self.callers: set[Hashable] = set()


class Turns(Generic[K]):
    """The jobs that wait, in a queue for each caller. Jobs with equal keys are one.

    The owner's lock protects it.
    """

    def __init__(self) -> None:
        self._jobs: dict[K, Job[K]] = {}  # that wait or run
        self._queues: OrderedDict[Hashable, deque[Job[K]]] = OrderedDict()
        self._running: Job[K] | None = None
        self._last: Hashable = None  # the caller who had the last turn

    def join(self, key: K, caller: Hashable, future: Future[Any]) -> Job[K]:
        """Queue a job, or wait for the one with the same key, and return it.

        A job that several callers wait for has a place in each of their queues.
        """
        job = self._jobs.setdefault(key, Job(key))
        job.futures.add(future)
        if caller not in job.callers and job is not self._running:
            job.callers.add(caller)
            self._queues.setdefault(caller, deque()).append(job)
        return job

    def leave(self, job: Job[K], future: Future[Any]) -> None:
        """Stop waiting for a job. It ends if nothing else waits for it."""
        job.futures.discard(future)
        if not job.futures:
            self.end(job)

    def begin(self) -> Job[K] | None:
        """Return the next job of the caller whose turn it is. The last caller's is the last."""
        self._running = None
        if self._last in self._queues:
            self._queues.move_to_end(self._last)
        if self._queues:
            self._last = next(iter(self._queues))
            self._running = self._queues[self._last][0]
            self._leave_queues(self._running)
        return self._running

    def end(self, job: Job[K]) -> None:
        """Forget a job. An equal one that comes later is a new one."""
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]
            self._leave_queues(job)

    def _leave_queues(self, job: Job[K]) -> None:
        for caller in job.callers:
            self._queues[caller].remove(job)
            if not self._queues[caller]:
                del self._queues[caller]
        job.callers.clear()
