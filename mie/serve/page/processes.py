"""The threads and processes of the page, so that its work takes no time from the engine.

`Child` replays the engine's log for all pages. An upload is replayed in a process of its own, under
limits. A `Worker` is a thread that waits for one of them.
"""

import asyncio
import marshal
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from mie.base import worker
from mie.base.threads import refusal_explained, show_name
from mie.errors import TraceError
from mie.serve.errors import ApiError, invalid

T = TypeVar("T")

CPU_SECONDS = 60
MEMORY_BYTES = 2 << 30
OUTPUT_BYTES = 256 << 20
WALL_SECONDS = 600.0
"""Time after which a process that does not answer counts as ended."""


class Worker:
    """Calls functions one after the other in its thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(
            1, thread_name_prefix=name, initializer=lambda: show_name(threading.current_thread())
        )
        self._last: Future[Any] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a function runs, even if its caller has left."""
        return self._last is not None and not self._last.done()

    async def call(self, function: Callable[[], T]) -> T:
        """Return the function's result. It is dropped if its caller leaves before it begins."""
        with refusal_explained(self._name):
            future = self._executor.submit(function)
        self._last = future
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the thread after the function that runs."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class Child:
    """A process that runs `mie.page.follow`. Threads take turns to call it, or close it."""

    def __init__(self) -> None:
        """Start the process, and do not wait for it."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._process = worker.Worker("mie.page.follow", ())

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of `mie.page.follow.Follower`.

        Raises:
            TraceError: the method raised it.
            ApiError: the process has ended.
        """
        try:
            with self._lock:
                if self._is_closed:
                    raise worker.WorkerEnded(-signal.SIGKILL)
                reply = self._process.exchange(marshal.dumps((method, *arguments)), WALL_SECONDS)
        except (worker.WorkerEnded, worker.WorkerSilent) as error:
            raise ApiError(
                503,
                "the process that replays the event log for the page has ended, and the engine "
                "goes on (reload the page to start another)",
                type="server_error",
                code="page_process_ended",
            ) from error
        is_result, value = marshal.loads(reply)
        if not is_result:
            raise TraceError(value)
        return value

    def close(self) -> None:
        """End the process, and a call that waits for it."""
        self._process.kill()
        with self._lock:
            self._is_closed = True
            self._process.end()


def converted(log: bytes) -> bytes:
    """Return the page records of an event log that was uploaded.

    Raises:
        ApiError: the log is refused, or too large to show.
    """
    limits = (CPU_SECONDS, MEMORY_BYTES, OUTPUT_BYTES)
    process = worker.Worker("mie.page.convert", (), *limits)
    try:
        reply = process.exchange(log, WALL_SECONDS)
    except (worker.WorkerEnded, worker.WorkerSilent) as error:
        raise invalid(
            "the trace is too large to be shown: replaying it took more than "
            f"{CPU_SECONDS} s or {MEMORY_BYTES >> 30} GiB (write a page with mie trace --html)",
            code="trace_too_large",
        ) from error
    finally:
        process.end()
    if reply[:1] != b"\0":
        raise invalid(reply[1:].decode("utf-8", "replace")[:2000], code="invalid_trace")
    return reply[1:]
