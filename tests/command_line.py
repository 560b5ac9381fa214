"""Run ``mie`` as a user does: as a process with streams."""

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

# Warnings are errors here too, and text is UTF-8 in any locale.
COMMAND = [sys.executable, "-W", "error", "-m", "mie"]
ENVIRONMENT = {**os.environ, "PYTHONUTF8": "1", "COLUMNS": "80"}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)  # or argparse would meet a closed pipe, and hide it

PATIENCE = 240.0
"""Seconds after which a silent process counts as failed, far more than a slow and busy machine
needs."""

NUMBERS = re.compile(
    r"\[(?P<requests>\d+) requests? · (?P<tokens>\d+) tokens? in [\d.]+ s · [\d.]+ tokens/s"
    r" · first token after [\d.]+ s · peak (?P<blocks>\d+) blocks?"
    r"(?: · (?P<hits>\d+) of \d+ prompt tokens cached)?"
    r"(?: · (?P<preemptions>\d+) preemptions?)?(?: · (?P<failed>\d+) failed)?\]"
)


def mie(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command, check that it shows no traceback, and return the finished process."""
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
    """A pipe with a buffer of ``room`` bytes.

    A process that writes more waits until they are read. So it cannot end before the test has acted
    on it, however slow the test is.
    """

    def __init__(self, room: int = 32) -> None:
        self.reader, self.writer = os.pipe()
        capacity = fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, 1)  # rounded up to a page
        self._filling = os.write(self.writer, bytes(capacity - room))

    def wait_for_bytes(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process has written something, or has ended."""
        while self._num_waiting() == self._filling and process.poll() is None:
            time.sleep(0.01)  # yields the CPU

    def read(self) -> bytes:
        """Read until the process ends. No other process may have the pipe."""
        with open(self.reader, "rb") as file:
            return file.read()[self._filling :]

    def close_writer(self) -> None:
        """Close the writing end, which the started process has inherited."""
        os.close(self.writer)

    def close_reader(self) -> None:
        """Close the reading end."""
        os.close(self.reader)

    def _num_waiting(self) -> int:
        number = bytearray(4)
        fcntl.ioctl(self.reader, termios.FIONREAD, number)
        return int.from_bytes(number, sys.byteorder)


def error_line(process: subprocess.CompletedProcess[bytes]) -> str:
    """Return the only line on standard error of a refused command, which exits with code 2."""
    assert process.returncode == 2, process.stderr.decode()
    assert process.stdout == b""
    (line,) = process.stderr.decode().splitlines()
    assert line.startswith("mie: error: ")
    return line
