"""A persistent set of threads that share out one piece of work at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Workers:
    """``num_threads`` threads, the caller's included, that do `run`'s tasks side by side.

    Handing work over costs two locks a thread. The threads end with `close`, or with the object.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._helpers = [_Helper() for _ in range(num_threads - 1)]

    def run(self, task: Callable[[int], object]) -> None:
        """task(i) for each i in range(num_threads), side by side; task(0) in the caller's thread.

        Returns when all are done; then raises what one of them raised.
        """
        for index, helper in enumerate(self._helpers, start=1):
            helper.start(task, index)
        try:
            task(0)
        finally:
            errors = [helper.wait() for helper in self._helpers]
        for error in errors:
            if error is not None:
                raise error

    def close(self) -> None:
        """End the threads. `run` may not be called any more."""
        for helper in self._helpers:
            helper.stop()
        self._helpers = []

    def __del__(self) -> None:
        self.close()


class _Helper:
    """One thread, which waits for a task, does it, and waits for the next."""

    def __init__(self) -> None:
        self._wake, self._done = threading.Lock(), threading.Lock()
        self._wake.acquire()
        self._done.acquire()
        # Together in one list, so that the thread does not keep the helper itself alive.
        self._job: list[object] = []
        args = (self._job, self._wake, self._done)
        threading.Thread(target=_serve, args=args, daemon=True, name="mie-worker").start()

    def start(self, task: Callable[[int], object], index: int) -> None:
        self._job[:] = [task, index]
        self._wake.release()

    def wait(self) -> BaseException | None:
        """What the task raised, once it is done."""
        self._done.acquire()
        error = self._job.pop() if self._job else None
        assert error is None or isinstance(error, BaseException)
        return error

    def stop(self) -> None:
        self._job.clear()
        self._wake.release()


def _serve(job: list[object], wake: threading.Lock, done: threading.Lock) -> None:
    while True:
        wake.acquire()
        if not job:
            return
        task, index = job
        job.clear()
        try:
            task(index)  # type: ignore[operator]  # what `start` put there
        except BaseException as error:  # the caller's to raise
            job.append(error)
        finally:
            task = None  # what it holds on to may be large
            done.release()


def available_cpus() -> int:
    """CPUs that this process may run on, by its affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
