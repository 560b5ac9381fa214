"""Let any number of threads share one engine that has no thread: a waiting caller drives it.

A caller that waits for its outputs turns the engine's loop if no other thread does. When it has
its outputs, it wakes another caller, which continues. Mutual exclusion depends only on one lock,
which is always held by ``with``. The records of waiting threads are hints that an exception may
lose, so a sleeping thread also checks every `PATIENCE` seconds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

from mie.errors import EngineDeadError, MieError, RequestError
from mie.frontend.loop import Command, EngineLoop
from mie.frontend.outputs import RequestOutput
from mie.frontend.request_state import Collector, PreparedRequest

T = TypeVar("T")

PATIENCE = 0.1
"""Seconds after which a sleeping thread checks whether another thread drives."""


class _Sleeper:
    """A sleeping thread and its condition."""

    def __init__(self, is_ready: Callable[[], bool]) -> None:
        self.is_ready = is_ready
        self._lock = threading.Lock()
        self._lock.acquire()

    def sleep(self) -> bool:
        """Wait to be woken, at most `PATIENCE` seconds, and return whether it was woken."""
        return self._lock.acquire(timeout=PATIENCE)

    def wake(self) -> None:
        """End the current sleep or the next one."""
        if self._lock.locked():
            try:
                self._lock.release()
            except RuntimeError:  # another thread released it first
                return


class Driver:
    """Turns an engine's loop in a thread that waits for it."""

    def __init__(self, loop: EngineLoop, *, survives_fork: bool = True) -> None:
        """Drive a loop. If its engine does not survive a fork, it is refused in a forked child."""
        self._loop = loop
        self._survives_fork = survives_fork
        self._begin()

    def _begin(self) -> None:
        self._process_id = os.getpid()
        self._role = threading.Lock()  # Its holder turns the loop.
        self._driving: int | None = None  # the thread that holds the lock
        self._entering: set[int] = set()  # Threads about to take the lock.
        self._sleepers: set[_Sleeper] = set()

    def new_collector(self) -> Collector:
        """Return a collector for one caller's requests."""
        self._check_process()
        return self._loop.processor.new_collector()

    def add(self, prepared: list[PreparedRequest], collector: Collector) -> list[str]:
        """Queue requests, all or none, and return their ids.

        Raises:
            RequestError: one of them could never be served; nothing was added.
        """
        processor = self._loop.processor
        try:
            return self.call(lambda: processor.add_all(prepared, collector))
        except MieError:
            raise
        except BaseException:  # The caller gets no ids.
            self._loop.inbox.append(Command(lambda: processor.retract(prepared)))
            raise

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its collector gets a final output.

        An observer or a signal handler, which run inside a step, may call this method.
        """
        self._check_process()
        command = Command(lambda: self._loop.processor.abort(request_id))
        if self._is_driving_here:
            self._loop.inbox.append(command)
        elif self._loop.dead_error is None:
            self._run(command)

    def release(self, collector: Collector) -> None:
        """End the requests of an unused collector before the next step.

        This never waits, because the garbage collector may close a stream inside any other call.
        """
        ref = collector.ref
        if (ref.request_ids or ref.beam_ids) and collector.process_id == os.getpid():
            self._loop.inbox.append(Command(lambda: self._loop.processor.drop(ref)))

    def keep_beams(self, collector: Collector, request_ids: list[str]) -> None:
        """Free the blocks that a collector's finished beams keep, except for ``request_ids``."""
        self.call(lambda: self._loop.processor.release(collector.ref, request_ids))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function between two steps and return its result.

        Raises:
            RuntimeError: the caller is inside a step.
        """
        self._check_process()
        if self._is_driving_here:
            raise RuntimeError(
                "the engine is in the middle of a step of this thread; an observer or a signal "
                "handler may only abort requests"
            )
        return self._run(Command(function))

    def _run(self, command: Command[T]) -> T:
        self._loop.inbox.append(command)
        self._wait(lambda: command.is_done, may_step=False)
        return command.result()

    def wait(self, collector: Collector) -> list[RequestOutput]:
        """Wait for outputs, driving the engine if no other thread does, and return them.

        Raises:
            EngineDeadError: the engine is dead.
        """
        self._check_collector(collector)
        self._wait(lambda: collector.has_news, may_step=True)
        return collector.take()

    def step(self, collector: Collector) -> list[RequestOutput]:
        """Return a collector's outputs, after one more step if it has none."""
        self._check_collector(collector)
        num_turns = self._loop.num_turns
        self._wait(lambda: collector.has_news or self._loop.num_turns != num_turns, may_step=True)
        return collector.take()

    def settle(self) -> None:
        """Run queued commands, and abort the requests of callers that are gone."""
        self._check_process()
        if self._loop.has_chores and not self._is_driving_here and not self._loop.dead_error:
            self._run(Command(lambda: None))

    @property
    def _is_driving_here(self) -> bool:
        return self._driving == threading.get_ident() and self._role.locked()

    def _wait(self, is_ready: Callable[[], bool], *, may_step: bool) -> None:
        assert not self._is_driving_here, "a step waits for another step"
        sleeper = _Sleeper(is_ready)
        try:
            while not is_ready():
                self._loop.check_alive()
                if not self._role.locked():
                    self._drive(is_ready, may_step)
                self._sleepers.add(sleeper)
                if is_ready() or not (self._role.locked() or self._entering):
                    continue
                if not sleeper.sleep() and not self._role.locked():
                    self._entering.clear()  # an exception left an entry behind
        finally:
            self._entering.discard(threading.get_ident())
            self._sleepers.discard(sleeper)
            self._wake_one()

    def _drive(self, is_ready: Callable[[], bool], may_step: bool) -> None:
        """Turn the loop until this thread has its outputs or another thread wants to drive."""
        me = threading.get_ident()
        self._entering.add(me)
        with self._role:
            self._entering.discard(me)
            self._driving = me
            try:
                while not is_ready():
                    self._loop.turn(may_step=may_step)
                    self._wake_ready()
                    if self._entering:
                        break
                    assert is_ready() or self._loop.has_work, "waits for outputs that cannot arrive"
            finally:
                self._driving = None

    def _wake_ready(self) -> None:
        self._loop.processor.changed.clear()  # each sleeper checks its own condition
        for sleeper in self._sleepers.copy():
            if sleeper.is_ready():
                sleeper.wake()

    def _wake_one(self) -> None:
        """Let another caller drive."""
        for sleeper in self._sleepers.copy():
            sleeper.wake()
            return

    def _check_process(self) -> None:
        """Start over in a forked child, because locks and requests belong to the parent."""
        if self._process_id != os.getpid():
            if not self._survives_fork:
                raise EngineDeadError(
                    "this process was forked after the model was loaded on a GPU, and CUDA does "
                    "not survive a fork (load the model after the fork)"
                )
            self._loop.forget()
            self._begin()

    def _check_collector(self, collector: Collector) -> None:
        self._check_process()
        if collector.process_id != self._process_id:
            raise RequestError("this request belongs to the parent process, which gets its outputs")
