"""`Child`: a process that replays the engine's log, so that pages take no time from the engine."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from mie.errors import TraceError
from mie.page import follow
from mie.serve.errors import ApiError

START = "import sys; sys.path.append(sys.argv[1]); from mie.page.follow import main; main()"


class Child:
    """A process that runs `mie.page.follow`. Threads call it one after the other, or close it."""

    def __init__(self) -> None:
        """Start the process, and do not wait for it."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, str(Path(follow.__file__).parents[2])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,  # Ctrl-C must not reach it.
        )

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """Return what a method of `mie.page.follow.Desk` returns.

        Raises:
            TraceError: the method raised it.
            ApiError: the process has ended.
        """
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            with self._lock:
                if self._is_closed:
                    raise EOFError("it was closed")
                follow.send(requests, (method, *arguments))
                is_result, value = follow.receive(answers)
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
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                with suppress(OSError):  # the rest of a request that the process did not read
                    pipe.close()
