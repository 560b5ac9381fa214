"""A persistent set of threads that share out one piece of work at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

Task = Callable[[int], object]


class Workers:
    """``num_threads`` threads, the caller's included, that do `run`'s tasks side by side.

    Handing work over costs two locks a thread. The threads end with `close`, or with the object.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._helpers = [_Helper() for _ in range(num_threads - 1)]

    def at_most(self, number: int) -> int:
        """``number`` threads, but one at least, and no more than there are."""
        return max(1, min(number, self.num_threads))

    def run(self, task: Task, num_threads: int | None = None) -> None:
        """task(i) for each i in range(num_threads), side by side; task(0) in the caller's thread.

        Returns when all are done; then raises what one of them raised. By default all threads take
        part. Ctrl-C ends the caller's task only; it reaches the caller when the others are done.
        """
        helpers = self._helpers[: (num_threads or self.num_threads) - 1]
        try:
            for index, helper in enumerate(helpers, start=1):
                helper.start(task, index)
            task(0)
        except BaseException:
            for helper in helpers:
                helper.wake_again()  # the interrupt may have come between the job and the lock
            raise
        finally:
            _wait_for(helpers)
        errors = [helper.take_error() for helper in helpers]
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


class _Job:
    """What a thread shares with its helper: not the helper, which it would keep alive."""

    def __init__(self) -> None:
        self.wake, self.done = threading.Lock(), threading.Lock()
        self.wake.acquire()
        self.done.acquire()
        self.task: Task | None = None
        self.index = 0
        self.error: BaseException | None = None
        self.is_finished = True
        self.is_last = False


class _Helper:
    """One thread, which waits for a task, does it, and waits for the next.

    An interrupt can come between any two lines here, so a lock says "look" and the job's fields
    say what is; a thread that looks once too often does no harm.
    """

    def __init__(self) -> None:
        self.job = _Job()
        threading.Thread(target=_serve, args=(self.job,), daemon=True, name="mie-worker").start()

    def start(self, task: Task, index: int) -> None:
        self.wait()  # what an interrupt left running
        job = self.job
        job.index, job.error, job.is_finished, job.task = index, None, False, task
        _release(job.wake)

    def wake_again(self) -> None:
        if self.job.task is not None:
            _release(self.job.wake)

    def wait(self) -> None:
        while not self.job.is_finished:
            self.job.done.acquire()

    def take_error(self) -> BaseException | None:
        error, self.job.error = self.job.error, None  # its frames hold what the task held
        return error

    def stop(self) -> None:
        self.job.is_last = True
        _release(self.job.wake)


def _serve(job: _Job) -> None:
    while True:
        job.wake.acquire()
        task, job.task = job.task, None
        if task is not None:
            try:
                task(job.index)
            except BaseException as error:  # the caller's to raise
                job.error = error
            task = None  # what it holds on to may be large
            job.is_finished = True
            _release(job.done)
        if job.is_last:
            return


def _wait_for(helpers: Sequence[_Helper]) -> None:
    """Wait until all are done, whatever interrupts; then let the interrupt through."""
    try:
        for helper in helpers:
            helper.wait()
    except BaseException:
        _wait_for(helpers)
        raise


def _release(lock: threading.Lock) -> None:
    with suppress(RuntimeError):  # it is released already, and nobody has looked yet
        lock.release()
