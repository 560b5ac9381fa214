"""Kill a process at a call of the system, or let its disk be full.

A killed process ends either by `SIGKILL` or, in a test, by `Killed` at each of its later calls. Its
files stay as they are.
"""

import errno
import os
import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from mie.disk import segment, store


class Killed(BaseException):
    """The process is dead."""


class FaultyDisk:
    """The calls of the system that `mie.disk` makes."""

    def __init__(
        self,
        rng: random.Random,
        *,
        calls_left: int | None = None,
        bytes_left: int | None = None,
        is_real: bool = False,
    ) -> None:
        """Let a process live for ``calls_left`` calls, on a disk with ``bytes_left`` bytes.

        ``is_real`` ends this process by `SIGKILL`.
        """
        self.is_dead = False
        self._rng, self._is_real = rng, is_real
        self._calls_left, self._bytes_left = calls_left, bytes_left
        self._lock = threading.Lock()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let `mie.disk` make its calls here."""
        report = threading.excepthook

        def report_others(args: threading.ExceptHookArgs) -> None:
            if not issubclass(args.exc_type, Killed):
                report(args)

        with (
            patch.object(threading, "excepthook", report_others),
            patch.object(store, "os", self),
            patch.object(segment, "os", self),
            patch.object(segment, "open", self._file, create=True),
        ):
            yield

    def call(self) -> None:
        """Count a call, and kill the process at the last one."""
        with self._lock:
            if self._calls_left is not None:
                self._calls_left -= 1
                self.is_dead = self.is_dead or self._calls_left < 0
        if self.is_dead:
            if self._is_real:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed

    def take(self, size: int) -> int:
        """Return how many bytes still fit on the disk."""
        if self._bytes_left is None:
            return size
        taken = min(size, self._bytes_left)
        self._bytes_left -= taken
        return taken

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        if name not in ("open", "pread", "replace", "stat", "unlink", "utime"):
            return found

        def call(*args: Any, **options: Any) -> Any:
            self.call()
            return found(*args, **options)

        return call

    def _file(self, path: Any, mode: str) -> Any:
        file = open(path, mode, buffering=0)  # noqa: SIM115  # the caller closes it
        try:
            self.call()
        except Killed:
            file.close()
            raise
        return file if mode == "rb" else _File(file, self, self._rng)


class _File:
    """A file that is written at once, and perhaps in part."""

    def __init__(self, file: Any, disk: FaultyDisk, rng: random.Random) -> None:
        self._file, self._disk, self._rng = file, disk, rng
        self.tell = file.tell

    def write(self, data: bytes) -> None:
        """Write data in two parts. The process may die between them."""
        middle = self._rng.randrange(len(data) + 1)
        self._write(data[:middle])
        self._disk.call()
        self._write(data[middle:])

    def _write(self, data: bytes) -> None:
        taken = self._disk.take(len(data))
        self._file.write(data[:taken])
        if taken < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
