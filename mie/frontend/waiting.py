"""Define the commands of a loop's callers, and wake the threads and tasks that wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mie.frontend.collector import CollectorRef

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future


@dataclass(eq=False)
class Command:
    """A function that a caller runs between two steps, and its result.

    After an interrupt it is called again, so it must be repeatable. Once ``is_done`` is set it is
    not, because the caller may already have the result.
    """

    function: Callable[[], Any]
    when_done: Callable[[], object] | None = None
    is_done: bool = False
    result: Any = None
    error: Exception | None = None

    def value(self) -> Any:
        """Return the function's result or raise its exception."""
        if self.error is not None:
            raise self.error
        return self.result


def release(sleeper: threading.Lock) -> None:
    """End the current sleep of a thread, or its next one."""
    if sleeper.locked():
        with suppress(RuntimeError):  # another thread released it first
            sleeper.release()


def new_future() -> tuple[Future[None], Callable[[], None]]:
    """Return a future of the running event loop, and a function for any thread that ends it."""
    import asyncio  # a program without tasks need not load it

    future = asyncio.get_running_loop().create_future()
    return future, partial(_call_soon, future.get_loop(), partial(_end, future))


def tell_tasks(collectors: Iterable[CollectorRef]) -> None:
    """Wake the tasks that wait for collectors, once for each event loop."""
    by_loop: dict[AbstractEventLoop, list[CollectorRef]] = {}
    for ref in collectors:
        collector = ref()
        if collector is not None and collector.event_loop is not None:
            by_loop.setdefault(collector.event_loop, []).append(ref)
    for event_loop, refs in by_loop.items():
        _call_soon(event_loop, partial(_arrive, refs))


def _call_soon(event_loop: AbstractEventLoop, function: Callable[[], object]) -> None:
    """Call a function in an event loop's thread. A closed event loop has no waiting tasks."""
    with suppress(RuntimeError):
        event_loop.call_soon_threadsafe(function)


def _end(future: Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _arrive(refs: Iterable[CollectorRef]) -> None:
    for ref in refs:
        collector = ref()
        if collector is not None:
            collector.arrive()
