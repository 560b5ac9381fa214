"""A persistent set of threads that share out one piece of work at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from mie.ops_cpu import spin
from mie.ops_cpu.cpus import available_cpus

Task = Callable[[int], object]


class Workers:
    """``num_threads`` threads, the caller's included, that do `run`'s tasks side by side.

    Handing work over costs two locks a thread, `awake` far less than elsewhere. The threads end
    with `close`, or with the object.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._helpers = [_Helper() for _ in range(num_threads - 1)]
        # A thread that waits busily on the CPU of one that works would hold it up.
        self._may_spin = spin.IS_AVAILABLE and num_threads <= available_cpus()
        self._spins = False

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Inside, from the first `run` on, threads wait for each other busily: to be used where
        little else is done between one `run` and the next."""
        self._spins = self._may_spin
        try:
            yield
        finally:
            self._spins = False
            for helper in self._helpers:
                helper.rest()

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
                helper.start(task, index, self._spins)
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


class _Signal:
    """What one thread waits for and another gives, asleep or busily as both have agreed. One that
    nobody waits for yet is kept."""

    def __init__(self) -> None:
        self._lock, self._spin_lock = threading.Lock(), spin.SpinLock()
        self._lock.acquire()

    def wait(self, *, busily: bool) -> None:
        if busily:
            self._spin_lock.acquire()
        else:
            self._lock.acquire()

    def give(self, *, busily: bool) -> None:
        if busily:
            self._spin_lock.release()
        else:
            with suppress(RuntimeError):  # it was given already, and nobody has looked yet
                self._lock.release()


class _Job:
    """What a thread shares with its helper: not the helper, which it would keep alive."""

    def __init__(self) -> None:
        self.wake, self.done = _Signal(), _Signal()
        self.task: Task | None = None
        self.index = 0
        self.error: BaseException | None = None
        self.is_finished = True
        self.is_last = False
        self.spins = False
        """Whether both wait busily; the caller changes it, never while a task runs."""


class _Helper:
    """One thread, which waits for a task, does it, and waits for the next.

    An interrupt can come between any two lines here, so a signal says "look" and the job's fields
    say what is; a thread that looks once too often does no harm.
    """

    def __init__(self) -> None:
        self.job = _Job()
        threading.Thread(target=_serve, args=(self.job,), daemon=True, name="mie-worker").start()

    def start(self, task: Task, index: int, spins: bool) -> None:
        self.wait()  # what an interrupt left running
        job = self.job
        is_spinning = job.spins
        job.index, job.error, job.is_finished, job.spins, job.task = index, None, False, spins, task
        job.wake.give(busily=True)
        if not is_spinning:
            job.wake.give(busily=False)

    def wake_again(self) -> None:
        if self.job.task is not None:
            self._wake()

    def wait(self) -> None:
        while not self.job.is_finished:
            self.job.done.wait(busily=self.job.spins)

    def take_error(self) -> BaseException | None:
        error, self.job.error = self.job.error, None  # its frames hold what the task held
        return error

    def rest(self) -> None:
        """From now on it sleeps while it waits."""
        if self.job.spins:
            self.job.spins = False
            self.job.wake.give(busily=True)

    def stop(self) -> None:
        self.job.is_last = True
        self._wake()

    def _wake(self) -> None:
        """However it waits: it may be about to change that."""
        self.job.wake.give(busily=True)
        self.job.wake.give(busily=False)


def _serve(job: _Job) -> None:
    while True:
        job.wake.wait(busily=job.spins)
        task, job.task = job.task, None
        if task is not None:
            try:
                task(job.index)
            except BaseException as error:  # the caller's to raise
                job.error = error
            task = None  # what it holds on to may be large
            job.is_finished = True
            job.done.give(busily=job.spins)
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
