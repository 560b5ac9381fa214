"""Run a persistent pool of threads that share one piece of work at a time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import TypeVar

from mie.ops_cpu.threads import spin
from mie.ops_cpu.threads.cpus import leave_to_caller
from mie.ops_cpu.threads.gains import Gains
from mie.system.resources import available_cpus

Task = Callable[[int], object]
Item = TypeVar("Item")

HELPER_SPINS = 1e-3
"""Seconds that a helper spin-waits for work before it sleeps.

Waking it then takes up to 100 us, which is a tenth of the time it waited.
"""
CALLER_SPINS = 2e-4
"""Seconds that the caller spin-waits for a helper. The helper may be waiting for this CPU."""


class Workers:
    """A pool of ``num_threads`` threads, including the caller, that run the tasks of `run`.

    A thread takes any task that has not begun, so the caller never waits for a helper that is not
    scheduled. Helpers are left out for a while when they do not pay (see `Gains`). The threads end
    with `close` or when the object is deleted. A forked child starts its own threads.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        # A spinning thread would hold up a working thread on the same CPU.
        may_spin = num_threads > 1 and num_threads <= available_cpus()
        tries_per_second = spin.tries_per_second() if may_spin else 0.0
        self._tries = [int(seconds * tries_per_second) for seconds in (HELPER_SPINS, CALLER_SPINS)]
        self._gains = Gains()
        self.are_resting = False
        """Whether the caller runs all tasks, because helper processes need the CPUs."""
        self._helpers: list[_Helper] = []
        self._start_helpers()

    def at_most(self, number: int) -> int:
        """Return ``number``, limited to between one and the number of threads."""
        return max(1, min(number, self.num_threads))

    def run(self, task: Task, num_tasks: int | None = None) -> float:
        """Call task(i) once for each i in range(num_tasks), by default one for each thread.

        Return how many seconds the last helper ended after the caller, or 0 without helpers. A
        helper that has not begun when the caller ends counts as if it were as slow again.

        Any thread may run a task, but task(0) runs in the caller. Tasks may not wait for each
        other, because one thread may run all of them. `run` returns when all are done. If a task
        raises, so does `run`, as soon as no task is running, and tasks that have not begun are
        dropped. An interrupt of the caller, such as Ctrl-C, is treated the same way.
        """
        num_tasks = num_tasks or self.num_threads
        begin = time.perf_counter()
        if num_tasks == 1 or self.are_resting or self._gains.are_paused(begin):
            for index in range(num_tasks):
                task(index)
            return 0.0
        if os.getpid() != self._pid:
            self._start_helpers()
        cpu_begin = time.thread_time()
        helpers, work = self._helpers[: num_tasks - 1], _Work(task, num_tasks)
        # Everything stays inside one try statement. An interrupt can come between any two
        # instructions, and the helpers must be idle before it propagates.
        try:
            for helper in helpers:
                helper.start(work)
            task(0)
            work.take_all()
            cpu_seconds = time.thread_time() - cpu_begin
            own_end = time.perf_counter()
            for helper in helpers:
                helper.wait()
        except BaseException:
            _stop(helpers, work)
            raise
        if work.errors:
            raise work.errors.pop()  # not kept, because its frames refer to the task's data
        end = time.perf_counter()
        self._gains.add(cpu_seconds + work.helpers_seconds - (end - begin), end)
        return (work.helpers_end or end + (end - begin)) - own_end

    def share(
        self,
        work: Callable[[int, Iterable[Item]], object],
        items: Sequence[Item],
        num_threads: int | None = None,
    ) -> float:
        """Call work(thread, items) in some threads, and share out the items between the calls.

        Each item goes to one call. Thread i begins with item i each time, because its CPU cache may
        still hold the data, and then takes the next item that is left. ``thread`` is below
        ``num_threads``, by default all, and no two calls at a time have the same. The result is
        that of `run`.
        """
        number = min(num_threads or self.num_threads, len(items))
        if number == 1:
            work(0, items)
            return 0.0
        others = iter(items[number:])  # its `next` is atomic
        return self.run(
            lambda thread: work(thread, chain(items[thread : thread + 1], others)), number
        )

    def close(self) -> None:
        """End the threads. `run` may not be called afterwards."""
        for helper in self._helpers:
            helper.stop()
        self._helpers = []

    def __del__(self) -> None:
        if hasattr(self, "_helpers"):
            self.close()

    def _start_helpers(self) -> None:
        """Start all helpers. Those of a parent process do not exist in its forked child."""
        self._pid = os.getpid()
        self._helpers = [_Helper(i, *self._tries) for i in range(1, self.num_threads)]


class _Work:
    """The tasks of one `run` call, with those that no thread has taken yet."""

    def __init__(self, task: Task, num_tasks: int) -> None:
        self._task = task
        self._waiting = dict.fromkeys(range(1, num_tasks))
        self.errors: list[BaseException] = []
        self.helpers_seconds = 0.0
        """CPU time of the helpers' tasks."""
        self.helpers_end = 0.0
        """When the last helper had run its own task, or 0 if none has."""

    def help(self, own: int) -> None:
        """Run the task ``own``, and then others if any are left. A helper calls this.

        A thread begins with the same task each time, because its CPU cache may still hold the data.
        """
        begin = time.thread_time()
        try:
            # Each of these dict operations is atomic, so only one thread gets the task.
            if self._waiting.pop(own, self) is None:
                self._task(own)
                self.helpers_end = time.perf_counter()
            self.take_all()
        except BaseException as error:  # The caller raises it.
            self.errors.append(error)
            self.drop()
        self.helpers_seconds += time.thread_time() - begin

    def take_all(self) -> None:
        """Run tasks until none is left."""
        while self._waiting:
            try:
                index, _ = self._waiting.popitem()
            except KeyError:  # Another thread was faster.
                return
            self._task(index)

    def drop(self) -> None:
        """Drop the tasks that have not begun."""
        self._waiting.clear()


class _Signal:
    """A signal that one thread waits for and another gives.

    It means "look": the waiting thread then checks its condition, so an extra signal is harmless.
    """

    def __init__(self, num_tries: int) -> None:
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

    def give(self, thread_id: int | None = None) -> None:
        """Give it. A thread of this id that sleeps wakes up on another CPU than the caller's."""
        self._is_given = True
        if self._spin_lock is not None:
            self._spin_lock.release()
        if self._is_asleep:
            if thread_id is not None and self._num_tries:
                leave_to_caller(thread_id)
            with suppress(RuntimeError):  # The other thread has not woken up.
                self._lock.release()


class _Job:
    """What a helper shares with its thread.

    The thread does not refer to the helper, so the helper ends with its `Workers`.
    """

    def __init__(self, index: int, helper_tries: int, caller_tries: int) -> None:
        self.index = index
        self.wake, self.done = _Signal(helper_tries), _Signal(caller_tries)
        self.work: _Work | None = None
        self.is_busy = False
        self.is_last = False


class _Helper:
    """One thread that waits for work, helps with it, and waits for more."""

    def __init__(self, index: int, helper_tries: int, caller_tries: int) -> None:
        self._job = _Job(index, helper_tries, caller_tries)
        self._thread = threading.Thread(
            target=_serve, args=(self._job,), daemon=True, name="mie-worker"
        )
        self._thread.start()

    def start(self, work: _Work) -> None:
        self.wait()  # an interrupt may have left it busy
        self._job.work = work
        self._job.wake.give(self._thread.native_id)

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
            work.help(job.index)
        del work  # it may hold on to much memory
        job.is_busy = False
        job.done.give()


def _stop(helpers: list[_Helper], work: _Work) -> None:
    """Wait until no helper is busy with ``work``, even if further interrupts come."""
    while True:
        try:
            work.drop()
            for helper in helpers:
                helper.wait()
            return
        except BaseException:  # re-raise the first interrupt when the helpers are idle
            continue
