"""The threads and processes of the page, so that its work takes no time from the engine.

`Child` replays the engine's log for all pages. An upload is replayed in a process of its own, under
limits. A `Worker` is a thread that waits for one of them.
"""

import asyncio
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from mie.errors import TraceError
from mie.events.page import convert, follow
from mie.serve.errors import ApiError, invalid
from mie.system.threads import refusal_explained

T = TypeVar("T")

PYTHON = (sys.executable, "-I", "-S")
PACKAGE = str(Path(follow.__file__).parents[3])
FOLLOW = "import sys; sys.path.append(sys.argv[1]); from mie.events.page.follow import main; main()"

CPU_SECONDS = 60
MEMORY_BYTES = 2 << 30
OUTPUT_BYTES = 256 << 20


class Worker:
    """Calls functions one after the other in its thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
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
    """A process that runs `mie.events.page.follow`. Threads call it in turn, or close it."""

    def __init__(self) -> None:
        """Start the process, and do not wait for it."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._process = subprocess.Popen(
            [*PYTHON, "-c", FOLLOW, PACKAGE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,  # Ctrl-C must not reach it.
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method of `mie.events.page.follow.Follower`.

        Raises:
            TraceError: the method raised it.
            ApiError: the process has ended.
        """
        try:
            with self._lock:
                if self._is_closed:
                    raise EOFError("it was closed")
                follow.send(self._requests, (method, *arguments))
                is_result, value = follow.receive(self._answers)
        except (OSError, EOFError) as error:
            raise ApiError(
                503,
                "the process that replays the event log for the page has ended, and the engine "
                "goes on (reload the page to start another)",
                type="server_error",
                code="page_process_ended",
            ) from error
        if not is_result:
            raise TraceError(value)
        return value

    def close(self) -> None:
        """End the process, and a call that waits for it."""
        self._process.kill()
        with self._lock:
            self._is_closed = True
            self._process.wait()
            for pipe in (self._requests, self._answers):
                with suppress(OSError):  # the rest of a request that the process did not read
                    pipe.close()


def converted(log: bytes) -> bytes:
    """Return the page records of an event log that was uploaded.

    Raises:
        ApiError: the log is refused, or too large to show.
    """
    limits = map(str, (CPU_SECONDS, MEMORY_BYTES, OUTPUT_BYTES))
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        source.write(log)
        source.seek(0)
        done = subprocess.run(
            [*PYTHON, convert.__file__, PACKAGE, *limits],
            stdin=source,
            stdout=target,
            stderr=subprocess.PIPE,
            cwd="/",
            env={},
            start_new_session=True,
            check=False,
        )
        if done.returncode == 0:
            target.seek(0)
            return target.read()
    if done.returncode == convert.REFUSED:
        raise invalid(done.stderr.decode("utf-8", "replace")[:2000], code="invalid_trace")
    raise invalid(
        "the trace is too large to be shown: replaying it took more than "
        f"{CPU_SECONDS} s or {MEMORY_BYTES >> 30} GiB (write a page with mie trace --html)",
        code="trace_too_large",
    )
