"""Run an engine's loop in its own thread, and wake the asyncio tasks that wait for its outputs."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from mie.errors import EngineDeadError
from mie.frontend.loop import Command, EngineLoop
from mie.frontend.outputs import RequestOutput
from mie.frontend.request_state import Collector, CollectorRef
from mie.sched.sequence import Request
from mie.stats.request import RequestMetrics
from mie.system.threads import start_thread

T = TypeVar("T")

Hold = Callable[[Callable[[], object]], object]
"""Calls what it is given, in the event loop's thread, at a moment that it chooses."""


class _News:
    """Wakes the one task that waits for news of a collector.

    It does what an `asyncio.Event` that is cleared after every wait does, at half the cost. The
    task awaits ``arrival`` and then calls `expect_more`.
    """

    def __init__(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        self.arrival: asyncio.Future[None] = self.event_loop.create_future()
        self.hold: Hold | None = None

    def expect_more(self) -> None:
        """Start waiting for news that arrives from now on."""
        self.arrival = self.event_loop.create_future()

    def set(self) -> None:
        """End the wait. Call it in the event loop's thread."""
        if not self.arrival.done():
            self.arrival.set_result(None)

    def come(self) -> None:
        """End the wait, now or when ``hold`` lets it end."""
        if self.hold is None:
            self.set()
        else:
            self.hold(self.set)


class OutputStream:
    """The outputs of requests that were added together, for one task.

    while stream.num_unfinished:
        await stream.arrival
        for output in stream.take():
            …
    """

    def __init__(
        self, thread: EngineThread, loop: EngineLoop, collector: Collector, num_requests: int
    ) -> None:
        self.num_unfinished = num_requests
        """Requests whose final output was not taken yet."""
        self.requests: tuple[Request, ...] = ()
        """The requests, once they are added."""
        self._thread = thread
        self._loop = loop
        self._collector = collector
        self._news = thread.listen(collector)

    @property
    def arrival(self) -> asyncio.Future[None]:
        """The future that is done when there may be something to take.

        Raises:
            EngineDeadError: the engine cannot go on.
        """
        if not self._collector.has_news:
            self._loop.check_alive()
        return self._news.arrival

    @property
    def num_generated(self) -> int:
        """The number of tokens that the requests got so far."""
        return sum(seq.num_generated for request in self.requests for seq in request.sequences)

    @property
    def metrics(self) -> list[RequestMetrics]:
        """The times and counts of each request so far."""
        return [request.metrics for request in self.requests]

    def take(self) -> list[RequestOutput]:
        """Return one output for each request with news, merged since it was last taken."""
        self._news.expect_more()
        outputs = self._collector.take()
        for output in outputs:
            self.num_unfinished -= output.finished
        return outputs

    def delay(self, hold: Hold) -> None:
        """Let ``hold`` choose when the task hears of news from now on."""
        self._news.hold = hold

    def nudge(self) -> None:
        """End the wait for `arrival`, in the event loop's own thread."""
        self._news.set()

    def progress(self) -> tuple[int, int]:
        """Return the number of computed tokens of unfinished prompts, and of all their tokens."""
        requests = map(self._loop.engine.request, list(self._collector.ref.request_ids))
        unfinished = [request for request in requests if request is not None]
        computed = sum(min(r.sequences[0].num_computed, r.num_prompt) for r in unfinished)
        return computed, sum(request.num_prompt for request in unfinished)

    def close(self) -> None:
        """End the requests that are unfinished before the next step. It never waits."""
        self._thread.stop_listening(self._collector)
        if self.num_unfinished:
            self.num_unfinished = 0
            processor, ref = self._loop.processor, self._collector.ref
            self._thread.post(Command(lambda: processor.drop(ref)))


class EngineThread:
    """Runs an `EngineLoop` in its own thread."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._process_id = os.getpid()
        self._listeners: dict[CollectorRef, _News] = {}
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        loop.processor.when_gone = partial(self._wake.put, None)  # may be called anywhere
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="mie-engine", daemon=True)
        start_thread(self._thread)

    def listen(self, collector: Collector) -> _News:
        """Wake the current task when a collector gets news, until `stop_listening`."""
        news = self._listeners[collector.ref] = _News()
        return news

    def stop_listening(self, collector: Collector) -> None:
        """Wake the task no more."""
        self._listeners.pop(collector.ref, None)

    def post(self, command: Command[Any]) -> None:
        """Queue a command to run before the next step."""
        self._loop.inbox.append(command)
        self._wake.put(None)
        self._refuse_if_dead()

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function between two steps and return its result."""
        self.check_alive()
        done = _News()
        command = Command(function, lambda: _set_all(done.event_loop, [done]))
        self.post(command)
        await done.arrival
        return command.result()

    def call_and_wait(self, function: Callable[[], T]) -> T:
        """Do what `call` does for a thread without an event loop."""
        self.check_alive()
        done = threading.Event()
        command = Command(function, done.set)
        self.post(command)
        done.wait()
        return command.result()

    def check_alive(self) -> None:
        """Raise `EngineDeadError` if the engine is dead or belongs to another process."""
        if self._process_id != os.getpid():
            raise EngineDeadError(
                "the engine's thread belongs to the parent process; load an AsyncLLM after the fork"
            )
        self._loop.check_alive()

    def stop(self) -> None:
        """End the thread after its current step."""
        self._is_stopping = True
        self._wake.put(None)
        if self._process_id == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        changed = self._loop.processor.changed
        try:
            while not self._is_stopping:
                if not self._loop.has_work:
                    self._sleep()
                self._loop.turn()
                self._tell(changed)
                changed.clear()
        except EngineDeadError:
            pass  # the callers are notified below
        finally:
            if self._loop.dead_error is None:
                self._loop.die("the engine was shut down")
            self._refuse_if_dead()
            self._tell(list(self._listeners))

    def _sleep(self) -> None:
        self._wake.get()
        while not self._wake.empty():
            self._wake.get()

    def _refuse_if_dead(self) -> None:
        """Refuse queued commands if the engine is dead."""
        while self._loop.dead_error is not None and self._loop.inbox:
            with suppress(IndexError):  # another thread popped it first
                self._loop.inbox.popleft().refuse(self._loop.dead_error)

    def _tell(self, collectors: Iterable[CollectorRef]) -> None:
        """Wake the tasks that wait for collectors with news, once per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[_News]] = {}
        for ref in collectors:
            news = self._listeners.get(ref)
            if news is not None:
                by_loop.setdefault(news.event_loop, []).append(news)
        for event_loop, all_news in by_loop.items():
            _set_all(event_loop, all_news)


def _set_all(event_loop: asyncio.AbstractEventLoop, all_news: list[_News]) -> None:
    """Wake tasks from another thread. A closed event loop has no waiting tasks."""

    def set_here() -> None:
        for news in all_news:
            news.come()

    with suppress(RuntimeError):
        event_loop.call_soon_threadsafe(set_here)
