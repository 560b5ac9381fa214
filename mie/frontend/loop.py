"""Run one engine for many callers: execute commands, and wake callers with new outputs.

One thread at a time turns an `EngineLoop`: a caller that waits (`LLM`), or a thread of its own
(`AsyncLLM`). A caller that has its outputs wakes another caller to continue. Mutual exclusion
depends only on one lock, always held by ``with``. The records of waiting threads are hints that an
exception may lose, so a sleeping thread also checks every `PATIENCE` seconds.
"""

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from mie.base.threads import raised_by_signal_handler, start_thread
from mie.engine.engine import Engine
from mie.errors import EngineDeadError, MieError, RequestError
from mie.frontend.answer import Answer
from mie.frontend.collector import Collector
from mie.frontend.outputs import RequestOutput
from mie.frontend.prepare import PreparedRequest
from mie.frontend.processor import OutputProcessor
from mie.frontend.waiting import Command, new_future, release, tell_tasks
from mie.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_FAULTS = 2
"""Number of consecutive turns that may fail before the engine is dead.

A failed turn is tried again, because memory may have been short for a moment.
"""
MOST_SHORTAGES = 8
"""Number of consecutive turns without enough memory after which the engine is dead.

After the second one, each turn begins by ending the largest request, and the count starts over.
"""
PATIENCE = 0.1
"""Seconds after which a sleeping thread checks whether another thread turns the loop."""


class EngineLoop:
    """An engine, its callers' commands, and the threads and tasks that wait for outputs."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer | None, *, survives_fork: bool = True
    ) -> None:
        """If the engine does not survive a fork, it is refused in a forked child."""
        self.engine = engine
        self.processor = OutputProcessor(engine, tokenizer)
        self.inbox: deque[Command] = deque()
        """Commands to run between two steps. Any thread may append."""
        self.num_turns = 0
        self.dead_error: EngineDeadError | None = None
        """The reason why the engine is dead, or None."""
        self._survives_fork = survives_fork
        self._num_faults = 0
        self._is_short = False  # of memory: the next turn begins by ending the largest request
        self._thread: threading.Thread | None = None
        self._is_stopping = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # an item wakes the thread
        self._begin()

    def _begin(self) -> None:
        self._process_id = os.getpid()
        self._role = threading.Lock()  # Its holder turns the loop.
        self._turning: int | None = None  # the thread that holds the lock
        self._entering: set[int] = set()  # Threads about to take the lock.
        # The condition that each sleeper waits for.
        self._sleepers: dict[threading.Lock, Callable[[], bool]] = {}
        self._is_behind = False  # a turn was interrupted, so some outputs may not be filed

    # Called by callers, in any thread.

    def add(self, prepared: Sequence[PreparedRequest], collector: Collector) -> list[str]:
        """Queue requests, all or none, and return their ids.

        Raises:
            RequestError: one of them could never be served; nothing was added.
        """
        self._check_may_wait()
        answers: list[Answer] = []
        command = self.post(partial(self.processor.add_all, prepared, collector, answers))
        try:
            self._wait(lambda: command.is_done, may_step=False)
            command.value()
            return [answer.request_id for answer in answers]
        except MieError:
            raise
        except BaseException:  # The caller gets no ids.
            self.post(partial(self.processor.retract, answers))
            raise

    def abort(self, request_id: str) -> None:
        """End a request before the next step; its collector gets a final output.

        An observer or a signal handler may call this method, although both run inside a step.
        """
        self._check_process()
        if self.dead_error is None:
            command = self.post(partial(self.processor.abort, request_id))
            if not self._is_turning_here:
                self._wait(lambda: command.is_done, may_step=False)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function between two steps and return its result.

        Raises:
            RuntimeError: the caller is inside a step.
        """
        self._check_may_wait()
        command = self.post(function)
        self._wait(lambda: command.is_done, may_step=False)
        result: T = command.value()
        return result

    async def call_async(self, function: Callable[[], T]) -> T:
        """Call a function like `call`, for a task. The loop must have a thread of its own."""
        self.check_alive()
        done, when_done = new_future()
        command = self.post(function, when_done)
        await done
        result: T = command.value()
        return result

    def post(
        self, function: Callable[[], Any], when_done: Callable[[], object] | None = None
    ) -> Command:
        """Queue a function to run before the next step. It never waits."""
        command = Command(function, when_done)
        self.inbox.append(command)
        self._wake_thread()
        if self.dead_error is not None:
            self._refuse_commands()
        return command

    def wait(self, collector: Collector) -> list[RequestOutput]:
        """Wait for outputs, turning the loop if no other thread does, and return them.

        Raises:
            EngineDeadError: the engine is dead.
        """
        self._check_collector(collector)
        self._wait(lambda: collector.has_news, may_step=True)
        return collector.take()

    def step(self, collector: Collector) -> list[RequestOutput]:
        """Return a collector's outputs, after one more step if it has none."""
        self._check_collector(collector)
        num_turns = self.num_turns
        self._wait(lambda: collector.has_news or self.num_turns != num_turns, may_step=True)
        return collector.take()

    def settle(self) -> None:
        """Run queued commands, and abort the requests of callers that are gone."""
        self._check_process()
        if self.has_chores and not self._is_turning_here and not self.dead_error:
            self.call(lambda: None)

    def new_collector(self) -> Collector:
        """Return a collector for one caller's requests."""
        self._check_process()
        return Collector(self.note_gone)

    def note_gone(self, request_ids: set[str]) -> None:
        """Abort the requests of a caller before the next step.

        It never waits, because the garbage collector may call it between any two lines.
        """
        self.processor.gone.append(request_ids)
        self._wake_thread()

    @property
    def has_work(self) -> bool:
        """Whether a turn has anything to do."""
        return self.engine.has_work or self.has_chores

    @property
    def has_chores(self) -> bool:
        """Whether a turn has something to do apart from a step."""
        return self.has_mail or self._is_behind

    @property
    def has_mail(self) -> bool:
        """Whether a caller has sent a command, or is gone, since the last turn began."""
        return bool(self.inbox) or bool(self.processor.gone)

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the engine is dead, or its thread is another process's."""
        if self._thread is not None:
            self._check_process()
        if self.dead_error is not None:
            raise EngineDeadError(str(self.dead_error)) from self.dead_error.__cause__

    # Waiting, and turning the loop meanwhile.

    def _wait(self, is_ready: Callable[[], bool], *, may_step: bool) -> None:
        """Turn the loop until a condition holds, or sleep while another thread turns it."""
        assert not self._is_turning_here, "a step waits for another step"
        me = threading.get_ident()
        sleeper: threading.Lock | None = None
        try:
            while not is_ready():
                self.check_alive()
                if not self._role.locked():
                    self._entering.add(me)
                    with self._role:
                        self._entering.discard(me)
                        self._turning = me
                        try:
                            while not is_ready():
                                self.turn(may_step=may_step)
                                self._wake_ready()
                                if self._entering:
                                    break
                                assert is_ready() or self.has_work, "waits in vain"
                        finally:
                            self._turning = None
                    if is_ready():
                        break
                if sleeper is None:
                    sleeper = threading.Lock()
                    sleeper.acquire()
                self._sleepers[sleeper] = is_ready
                if is_ready() or not (self._role.locked() or self._entering):
                    continue
                if not sleeper.acquire(timeout=PATIENCE) and not self._role.locked():
                    self._entering.clear()  # an exception left an entry behind
        finally:
            self._entering.discard(me)
            if sleeper is not None:
                self._sleepers.pop(sleeper, None)
            for other in self._sleepers.copy():  # let one of them turn the loop
                release(other)
                break

    def turn(self, *, may_step: bool = True) -> None:
        """Run commands, run a step if there is work, and file its outputs.

        If a signal handler raises an exception, it reaches the caller, and the next turn does the
        rest of this one.

        Raises:
            EngineDeadError: the engine is dead.
        """
        self.check_alive()
        try:
            if self._is_short:
                self.processor.fail_largest()
                self._is_short, self._num_faults = False, MOST_FAULTS - 1
            if self._is_behind:
                self.processor.catch_up()
            self._is_behind = True
            self.processor.drop_orphans()
            while self.inbox:
                command = self.inbox[0]
                if not command.is_done:
                    try:
                        command.result = command.function()
                    except Exception as error:
                        if raised_by_signal_handler(error):
                            raise
                        command.error = error
                    command.is_done = True
                if command.when_done is not None:
                    command.when_done()
                self.inbox.popleft()
                if command.error is not None and not isinstance(command.error, MieError):
                    self.processor.catch_up()  # it broke off, which is more than a refusal
            if may_step and self.engine.has_work:
                self.processor.process(self.engine.step())
            self._is_behind = False
            self._num_faults = 0
            self.num_turns += 1
        except Exception as error:
            if raised_by_signal_handler(error):
                raise
            self._count_fault(error)

    def _count_fault(self, error: Exception) -> None:
        """Count a failed turn for which no request is to blame."""
        self._num_faults += 1
        is_short = isinstance(error, MemoryError)
        if self._num_faults < (MOST_SHORTAGES if is_short else MOST_FAULTS):
            self._is_short = is_short and self._num_faults >= MOST_FAULTS
            logger.error("a step failed and will be retried: %r", error, exc_info=error)
            return
        logger.critical("the engine is dead: %r", error, exc_info=error)
        self._die(
            f"the engine is dead and its requests are lost: {type(error).__name__}: {error} (load "
            "the model again)",
            error,
        )
        self.check_alive()

    def _die(self, message: str, cause: Exception | None = None) -> None:
        """Refuse all requests and commands from now on."""
        self.dead_error = EngineDeadError(message)
        self.dead_error.__cause__ = cause

    def _wake_ready(self) -> None:
        """Wake the threads and the tasks with new outputs."""
        changed = self.processor.changed
        tell_tasks(changed)
        changed.clear()
        for sleeper, is_ready in self._sleepers.copy().items():
            if is_ready():
                release(sleeper)

    @property
    def _is_turning_here(self) -> bool:
        return self._turning == threading.get_ident() and self._role.locked()

    def _check_may_wait(self) -> None:
        self._check_process()
        if self._is_turning_here:
            raise RuntimeError(
                "the engine is in the middle of a step of this thread; an observer or a signal "
                "handler may only abort requests"
            )

    def _check_process(self) -> None:
        """Start over in a forked child, because locks and requests belong to the parent."""
        if self._process_id == os.getpid():
            return
        if self._thread is not None:
            raise EngineDeadError(
                "the engine's thread belongs to the parent process; load an AsyncLLM after the fork"
            )
        if not self._survives_fork:
            raise EngineDeadError(
                "this process was forked after the model was loaded on a GPU or on several ranks, "
                "which do not survive a fork (load the model after the fork)"
            )
        self.inbox.clear()
        self.processor.drop_all()
        self._begin()

    def _check_collector(self, collector: Collector) -> None:
        self._check_process()
        if collector.process_id != self._process_id:
            raise RequestError("this request belongs to the parent process, which gets its outputs")

    # A thread of its own.

    def start(self) -> None:
        """Turn the loop in a thread of its own until `stop`."""
        self._thread = threading.Thread(target=self._run, name="mie-engine", daemon=True)
        start_thread(self._thread)

    def stop(self) -> None:
        """End the thread after its current step."""
        self._is_stopping = True
        self._wake_thread()
        thread = self._thread
        if thread and self._process_id == os.getpid() and threading.current_thread() is not thread:
            thread.join()

    def _run(self) -> None:
        try:
            with self._role:
                self._turning = threading.get_ident()
                while not self._is_stopping:
                    if not self.has_work:
                        self._sleep()
                    self.turn()
                    try:
                        self._wake_ready()
                    except MemoryError as error:
                        self._is_behind = True  # the next turn comes at once and wakes them
                        self._count_fault(error)
        except EngineDeadError:
            pass  # the callers are notified below
        finally:
            if self.dead_error is None:
                self._die("the engine was shut down")
            self._refuse_commands()
            tell_tasks(self.processor.collectors())

    def _sleep(self) -> None:
        self._wake.get()
        while not self._wake.empty():
            self._wake.get()

    def _wake_thread(self) -> None:
        if self._thread is not None:
            self._wake.put(None)

    def _refuse_commands(self) -> None:
        """Refuse queued commands, because the engine is dead."""
        while self.inbox:
            with suppress(IndexError):  # another thread popped it first
                command = self.inbox.popleft()
                command.error, command.is_done = self.dead_error, True
                if command.when_done is not None:
                    command.when_done()
