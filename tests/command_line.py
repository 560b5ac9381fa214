"""``mie`` as a person runs it: a process with its streams."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

# Warnings are errors here too, and text comes as UTF-8 whatever the machine's locale.
COMMAND = [sys.executable, "-W", "error", "-m", "mie"]
ENVIRONMENT = {**os.environ, "PYTHONUTF8": "1", "COLUMNS": "80"}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)  # or argparse would meet a closed pipe, and hide it

PATIENCE = 240.0
"""Seconds after which a process that should have ended, or said something, has failed. It is far
more than anything takes on a slow and busy machine."""

NUMBERS = re.compile(
    r"\[(?P<requests>\d+) requests? · (?P<tokens>\d+) tokens? in [\d.]+ s · [\d.]+ tokens/s"
    r" · first token after [\d.]+ s · peak (?P<blocks>\d+) blocks?"
    r"(?: · (?P<hits>\d+) of \d+ prompt tokens cached)?"
    r"(?: · (?P<preemptions>\d+) preemptions?)?(?: · (?P<failed>\d+) failed)?\]"
)


def mie(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Return the finished process; it must not have shown a traceback."""
    process = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env=ENVIRONMENT,
        timeout=PATIENCE,
        check=False,
    )
    assert b"Traceback" not in process.stderr, process.stderr.decode()
    return process


def start(*arguments: str | Path, **streams: Any) -> subprocess.Popen[bytes]:
    """Return a running process with pipes."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    settings = {"env": ENVIRONMENT, **pipes, **streams}
    return subprocess.Popen([*COMMAND, *map(str, arguments)], **settings)


class NarrowPipe:
    """A pipe with room for ``room`` bytes. A process that writes more waits until they are read, so
    it cannot end before the test has done something to it, however slow the test is."""

    def __init__(self, room: int = 32) -> None:
        self.reader, self.writer = os.pipe()
        capacity = fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 1)  # rounded up to a page
        self._filling = os.write(self.writer, bytes(capacity - room))

    def wait_for_bytes(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process has written something, or has ended."""
        while self._num_waiting() == self._filling and process.poll() is None:
            time.sleep(0.01)  # leaves the CPU to it

    def read(self) -> bytes:
        """Read what the process writes until it ends; it must be the only one that has the pipe."""
        with open(self.reader, "rb") as file:
            return file.read()[self._filling :]

    def close_writer(self) -> None:
        """Leave the writing end to the process that was started."""
        os.close(self.writer)

    def close_reader(self) -> None:
        """Refuse to read any more."""
        os.close(self.reader)

    def _num_waiting(self) -> int:
        number = bytearray(4)
        fcntl.ioctl(self.reader, termios.FIONREAD, number)
        return int.from_bytes(number, sys.byteorder)


def error_line(process: subprocess.CompletedProcess[bytes]) -> str:
    """Return the one line that a refused command leaves on standard error, with exit code 2."""
    assert process.returncode == 2, process.stderr.decode()
    assert process.stdout == b""
    (line,) = process.stderr.decode().splitlines()
    assert line.startswith("mie: error: ")
    return line
