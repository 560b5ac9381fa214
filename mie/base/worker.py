"""Run a program of mie in a separate process that can be killed and replaced.

The program is a module with a function ``main``. It reads requests from its standard input, a
socket, with the functions of `mie.base.worker_side`.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mie.errors import WorkerError

_INHERITED = ("LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "TZ")
_PROGRAM = """
import importlib, json, sys
sys.path += json.loads(sys.argv[1])
importlib.import_module(sys.argv[2]).main(*sys.argv[3:])
"""


class WorkerEnded(Exception):
    """The worker ended without a reply."""

    def __init__(self, returncode: int) -> None:
        super().__init__(f"signal {-returncode}" if returncode < 0 else f"status {returncode}")
        self.returncode = returncode
        """Exit status of the worker, or minus the number of the signal that killed it."""


class WorkerSilent(Exception):
    """The worker did not reply in time."""


class Worker:
    """A worker process and the socket to it. One thread at a time may use it.

    The process ends with its parent, or when this object is collected.
    """

    def __init__(
        self,
        module: str,
        packages: Sequence[str],
        *arguments: object,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start ``main(*arguments)`` of a module in an isolated Python that finds ``packages``.

        The process also has the file descriptors ``inherited``, with their numbers.

        Raises:
            WorkerError: the process cannot be started.
        """
        command = _command(module, packages, arguments)
        try:
            mine, its = socket.socketpair()
        except OSError as error:
            raise _cannot_start(str(error)) from error
        with its:
            try:
                process = subprocess.Popen(
                    command,
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=_environment(),
                    pass_fds=inherited,
                    start_new_session=True,  # Ctrl-C must not reach it.
                )
            except BaseException as error:
                mine.close()
                if isinstance(error, OSError):
                    raise _cannot_start(str(error)) from error
                raise
        self._socket, self._process = mine, process
        self._end = weakref.finalize(self, _end_process, process, mine, os.getpid())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def exchange(self, data: bytes, seconds: float) -> bytes:
        """Send a request and return the reply. After an exception, only `end` may be called.

        Raises:
            WorkerEnded: the worker ended first.
            WorkerSilent: there is no reply after so many seconds.
        """
        deadline = time.monotonic() + seconds
        self.send(data, deadline)
        return self.receive(deadline)

    def send(self, data: bytes, deadline: float) -> None:
        """Send a message until a time of the monotonic clock; see `exchange`."""
        view = memoryview(len(data).to_bytes(8, "big") + data)
        while view:
            self._await_socket(deadline)
            try:
                view = view[self._socket.send(view, socket.MSG_NOSIGNAL) :]
            except TimeoutError:
                raise WorkerSilent from None
            except OSError:  # it ended before it had read the message
                raise self._ended(deadline) from None

    def receive(self, deadline: float) -> bytes:
        """Return the worker's next message; see `send`."""
        return self._receive(int.from_bytes(self._receive(8, deadline), "big"), deadline)

    def wait(self, wake: socket.socket, deadline: float) -> bool:
        """Wait for a message or for ``wake`` to be readable; return whether it is a message."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(wake, select.POLLIN)
        readable = poll.poll(1000 * max(deadline - time.monotonic(), 0))
        if not readable:
            raise WorkerSilent
        return self._socket.fileno() in dict(readable)

    def is_alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process, for which another thread may wait."""
        self._process.kill()

    def end(self) -> None:
        """Kill the process and wait for it."""
        self._end()

    def forget(self) -> None:
        """Leave the process to this process's parent, from which it was forked."""
        self._end.detach()
        self._socket.close()
        self._process.returncode = 0  # it is not a child of this process

    def _receive(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            self._await_socket(deadline)
            try:
                received = self._socket.recv_into(view)
            except TimeoutError:
                raise WorkerSilent from None
            except OSError:
                received = 0
            if not received:
                raise self._ended(deadline)
            view = view[received:]
        return bytes(data)

    def _await_socket(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise WorkerSilent
        self._socket.settimeout(left)

    def _ended(self, deadline: float) -> WorkerEnded | WorkerSilent:
        """Return why the socket is closed. The process ends by itself then."""
        with suppress(subprocess.TimeoutExpired):
            return WorkerEnded(self._process.wait(max(deadline - time.monotonic(), 0)))
        return WorkerSilent()


def _command(module: str, packages: Sequence[str], arguments: Sequence[object]) -> list[str]:
    if not sys.executable:
        raise _cannot_start("sys.executable is empty")
    directories = list(dict.fromkeys(map(_directory_of, ("mie", *packages))))
    program = [os.path.abspath(sys.executable), "-I", "-S", "-c", _PROGRAM]
    return [*program, json.dumps(directories), module, *map(str, arguments)]


def _environment() -> dict[str, str]:
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    return {**inherited, "MALLOC_ARENA_MAX": "1"}  # a thread's arena reserves 64 MiB of addresses


def _directory_of(package: str) -> str:
    """Return the directory of ``package``, without a slow import."""
    if package == "mie":
        return str(Path(__file__).absolute().parents[2])
    for directory in map(Path, sys.path):
        if (directory / package / "__init__.py").is_file():
            return str(directory.absolute())
    raise _cannot_start(f"no directory in sys.path has the package {package}")


def _cannot_start(reason: str) -> WorkerError:
    return WorkerError(f"a worker process cannot be started: {reason}")


def _end_process(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return
    connection.close()
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGKILL)
    process.wait()
