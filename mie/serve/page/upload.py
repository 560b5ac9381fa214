"""Event logs that are sent to the page: a child process replays them, under limits."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from mie.page import convert
from mie.serve.errors import ApiError, invalid
from mie.serve.page.worker import Worker

CPU_SECONDS = 60
MEMORY_BYTES = 2 << 30
OUTPUT_BYTES = 256 << 20


class Uploads:
    """Converts event logs into page records, one at a time."""

    def __init__(self) -> None:
        self._worker = Worker("mie-page-upload")

    async def convert(self, log: bytes) -> bytes:
        """Return the page records of a log.

        Raises:
            ApiError: the log is refused, too large to show, or another one is being converted.
        """
        if self._worker.is_busy:
            raise ApiError(
                429,
                "another trace is being opened (try again in a moment)",
                type="rate_limit_error",
                code="busy",
                headers={"retry-after": "2"},
            )
        return await self._worker.call(lambda: _convert(log))

    def close(self) -> None:
        """End the thread."""
        self._worker.close()


def _convert(log: bytes) -> bytes:
    root = str(Path(convert.__file__).parents[2])
    limits = map(str, (CPU_SECONDS, MEMORY_BYTES, OUTPUT_BYTES))
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as target:
        source.write(log)
        source.seek(0)
        done = subprocess.run(
            [sys.executable, "-I", "-S", convert.__file__, root, *limits],
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
    message = done.stderr.decode("utf-8", "replace")[:2000]
    if done.returncode == convert.REFUSED:
        raise invalid(message, code="invalid_trace")
    raise invalid(
        "the trace is too large to be shown: replaying it took more than "
        f"{CPU_SECONDS} s or {MEMORY_BYTES >> 30} GiB (write a page with mie trace --html)",
        code="trace_too_large",
    )
