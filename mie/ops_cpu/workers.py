"""Run a persistent pool of threads that share one piece of work at a time."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from mie.ops_cpu import spin
from mie.system.resources import available_cpus
from mie.system.threads import start_thread

Item = TypeVar("Item")

HELPER_TRIES = 1 << 16
"""Tries of a helper that spin-waits for work, about a millisecond, before it sleeps.

Waking it then takes up to 100 us, which is a tenth of the time it waited.
"""
CALLER_TRIES = 1 << 14
"""Tries of the caller that spin-waits for a helper. The helper may be waiting for this CPU."""


class Workers:
    """A pool of ``num_threads`` threads, including the caller, that share the items of `share`.

    A thread takes any item that has not begun, so the caller never waits for a helper that is not
    scheduled. The threads end with `close` or when the object is deleted. A forked child starts its
    own threads.
    """

    def __init__(self, num_threads: int) -> None:
        """Start the threads.

        Raises:
            ThreadLimitError: the system starts no more threads.
        """
        self.num_threads = num_threads
        # A spinning thread would hold up a working thread on the same CPU.
        self._may_spin = spin.IS_AVAILABLE and num_threads <= available_cpus()
        self._helpers: list[_Helper] = []
        self._pid = os.getpid()
        self._started(num_threads - 1)

    def share(
        self, work: Callable[[Item], object], items: Sequence[Item], num_threads: int | None = None
    ) -> None:
        """Call work(item) once for each item, in at most ``num_threads`` threads (default: all).

        `share` returns when all calls are done. Thread i begins with item i each time, because its
        CPU cache may still hold the data, and then takes items that are left. If a call raises, so
        does `share`, as soon as no call is running, and items that have not begun are dropped. An
        interrupt of the caller, such as Ctrl-C, is treated the same way.
        """
        number = min(num_threads or self.num_threads, self.num_threads, len(items))
        if number <= 1:
            for item in items:
                work(item)
            return
        helpers = self._started(number - 1)
        job = _Work(lambda index: work(items[index]), len(items))
        # Everything stays inside one try statement. An interrupt can come between any two
        # instructions, and the helpers must be idle before it propagates.
        try:
            for helper in helpers:
                helper.start(job)
            job.help(0)
            for helper in helpers:
                helper.wait()
        except BaseException:
            _stop(helpers, job)
            raise
        if job.errors:
            raise job.errors.pop()  # not kept, because its frames refer to the work's data

    def close(self) -> None:
        """End the threads. `share` may not be called afterwards."""
        for helper in self._helpers:
            helper.stop()
        self._helpers = []

    def __del__(self) -> None:
        if hasattr(self, "_helpers"):
            self.close()

    def _started(self, number: int) -> list[_Helper]:
        """Return this many helpers. Those of a parent process do not exist in its forked child."""
        if os.getpid() != self._pid:
            self._pid, self._helpers = os.getpid(), []
        while len(self._helpers) < number:
            self._helpers.append(_Helper(len(self._helpers) + 1, may_spin=self._may_spin))
        return self._helpers[: max(0, number)]


class _Work:
    """The items of one `share` call, with those that no thread has taken yet."""

    def __init__(self, run: Callable[[int], object], number: int) -> None:
        self._run = run
        self._waiting = dict.fromkeys(range(number))
        self.errors: list[BaseException] = []

    def help(self, own: int) -> None:
        """Run the item ``own``, and then others until none is left."""
        # Each of these dict operations is atomic, so only one thread gets the item.
        if self._waiting.pop(own, self) is None:
            self._run(own)
        while self._waiting:
            try:
                index, _ = self._waiting.popitem()
            except KeyError:  # Another thread was faster.
                return
            self._run(index)

    def drop(self) -> None:
        """Drop the items that have not begun."""
        self._waiting.clear()


class _Signal:
    """A signal that one thread waits for and another gives.

    It means "look": the waiting thread then checks its condition, so an extra signal is harmless.
    """

    def __init__(self, num_tries: int) -> None:
        """Spin for ``num_tries`` tries before sleeping."""
        self._num_tries = num_tries
        self._spin_lock = spin.SpinLock() if num_tries else None
        self._lock = threading.Lock()
        self._lock.acquire()
        self._is_given = self._is_asleep = False

    def wait(self) -> None:
        """Wait until it is given, first by spinning and then asleep."""
        if self._spin_lock is not None:
            self._spin_lock.take()  # an earlier signal may have left it free
            if not self._is_given:
                self._spin_lock.acquire(self._num_tries)
        self._is_asleep = True
        while not self._is_given:
            self._lock.acquire()
        self._is_asleep = self._is_given = False

    def give(self) -> None:
        """Give it."""
        self._is_given = True
        if self._spin_lock is not None:
            self._spin_lock.release()
        if self._is_asleep:
            with suppress(RuntimeError):  # The other thread has not woken up.
                self._lock.release()


class _Job:
    """The state that a helper shares with its thread.

    The thread does not refer to the helper, so the helper ends with its `Workers`.
    """

    def __init__(self, index: int, *, may_spin: bool) -> None:
        self.index = index
        self.wake = _Signal(HELPER_TRIES if may_spin else 0)
        self.done = _Signal(CALLER_TRIES if may_spin else 0)
        self.work: _Work | None = None
        self.is_busy = False
        self.is_last = False


class _Helper:
    """One thread that waits for work, helps with it, and waits for more."""

    def __init__(self, index: int, *, may_spin: bool) -> None:
        self._job = _Job(index, may_spin=may_spin)
        self._thread = threading.Thread(
            target=_serve, args=(self._job,), daemon=True, name="mie-worker"
        )
        start_thread(self._thread)

    def start(self, work: _Work) -> None:
        self.wait()  # an interrupt may have left it busy
        self._job.work = work
        self._job.wake.give()

    def wait(self) -> None:
        """Wait until the thread is idle. Work that it has not begun is taken back."""
        self._job.work = None
        while self._job.is_busy:
            self._job.done.wait()

    def stop(self) -> None:
        self._job.is_last = True
        self._job.wake.give()


def _serve(job: _Job) -> None:
    while not job.is_last:
        job.wake.wait()
        # Set busy before looking. A caller that finds the thread idle afterwards has taken the work
        # back.
        job.is_busy = True
        work = job.work
        if work is not None:
            try:
                work.help(job.index)
            except BaseException as error:  # The caller raises it.
                work.errors.append(error)
                work.drop()
        del work  # it may hold on to much memory
        job.is_busy = False
        job.done.give()


def _stop(helpers: Sequence[_Helper], work: _Work) -> None:
    """Wait until no helper is busy with ``work``, even if further interrupts come."""
    while True:
        try:
            work.drop()
            for helper in helpers:
                helper.wait()
            return
        except BaseException:  # re-raise the first interrupt when the helpers are idle
            continue
