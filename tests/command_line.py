"""Run ``mie`` as a user does: as a process with streams."""

import atexit
import contextlib
import fcntl
import functools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import IO, Any

from deadlines import PATIENCE, run

# Warnings are errors here too, and text is UTF-8 in any locale.
COMMAND = [sys.executable, "-W", "error", "-m", "mie"]
ENVIRONMENT = {**os.environ, "PYTHONUTF8": "1", "COLUMNS": "80"}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)  # or argparse would meet a closed pipe, and hide it

NUMBERS = re.compile(
    r"\[(?P<requests>\d+) requests? · (?P<tokens>\d+) tokens? in [\d.]+ s · [\d.]+ tokens/s"
    r" · first token after [\d.]+ s · peak (?P<blocks>\d+) blocks?"
    r"(?: · (?P<hits>\d+) of \d+ prompt tokens cached)?"
    r"(?: · (?P<preemptions>\d+) preemptions?)?(?: · (?P<failed>\d+) failed)?\]"
)


def mie(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run a command, check that it shows no traceback, and return the finished process.

    The process is a fork of one that has imported everything; see ``warm_process.py``. Where the
    start itself matters, `start` starts a new one.
    """
    process = run_warm(None, *arguments, stdin=stdin)
    assert b"Traceback" not in process.stderr, process.stderr.decode()
    return process


def run_warm(
    program: Path | None, *arguments: str | Path, stdin: bytes = b"", directory: Path | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a Python program, or ``mie`` if it is None, in a fork of the warm process."""
    wanted = {
        "program": program and str(program),
        "arguments": [*map(str, arguments)],
        "directory": str(directory or Path.cwd()),
    }
    with contextlib.ExitStack() as stack:
        case, inputs, output, errors = (
            stack.enter_context(tempfile.TemporaryFile()) for _ in range(4)
        )
        case.write(json.dumps(wanted).encode())
        inputs.write(stdin)
        for file in (case, inputs):
            file.seek(0)
        code = _warm_process().run(case, inputs, output, errors)
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess(wanted, code, output.read(), errors.read())


class _WarmProcess:
    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(PATIENCE)
        program = Path(__file__).with_name("warm_process.py")
        command = [sys.executable, "-W", "error", program, str(theirs.fileno())]
        process = subprocess.Popen(command, env=ENVIRONMENT, pass_fds=[theirs.fileno()])
        theirs.close()
        atexit.register(self._end, process)

    def run(self, *files: IO[bytes]) -> int:
        """Return the exit code of a command line whose case and streams are ``files``."""
        socket.send_fds(self._connection, [b"."], [file.fileno() for file in files])
        answer = b""
        while not answer.endswith(b"\n"):
            more = self._connection.recv(64)
            assert more, "the warm process is gone"
            answer += more
        return int(answer)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        self._connection.close()
        process.wait(PATIENCE)


_warm_process = functools.cache(_WarmProcess)


def python(
    *arguments: str | Path, code: int = 0, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a new Python process, check its exit code, and return it with its output."""
    done = run([sys.executable, *map(str, arguments)], **options)
    assert done.returncode == code, done.stderr[-2000:]
    return done


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
