"""Render chat templates in a separate process, under limits that the kernel enforces."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mie.errors import ChatTemplateError, RequestError
from mie.text import render_worker

CPU_SECONDS = 0.4  # For a request, including compilation.
MEMORY_BYTES = 128 << 20  # On top of the idle worker's memory.
LARGEST_INPUT = 8 << 20  # bytes of the messages and variables as JSON

_INHERITED = ("LANG", "LC_ALL", "LC_TIME", "LD_LIBRARY_PATH", "TZ")


class TemplateRenderer:
    """Renders templates in a worker process, which it starts, kills and replaces.

    A template is a program that comes with a model or a request. The worker runs it in jinja2's
    sandbox, within `CPU_SECONDS` and `MEMORY_BYTES`. If a template exceeds them, the worker is
    killed and the caller gets a ChatTemplateError. Any number of threads may call; they take turns.
    The worker ends with its parent, and a forked child starts its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget_worker(this()))

    def start(self) -> None:
        """Start the worker before the first template, without waiting for it."""
        with self._lock:
            if self._worker is None:
                self._worker = _Worker()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the worker's reply to a request; see `mie.text.render_worker`.

        Raises:
            RequestError: the request is not JSON, or too large.
            ChatTemplateError: a limit stopped the template, or the worker cannot run.
        """
        data = _as_json(request)
        with self._lock:
            if self._worker is not None and not self._worker.is_alive():
                self._worker.end()  # Something killed it while it was idle.
                self._worker = None
            if self._worker is None:
                self._worker = _Worker()
            return self._exchange(self._worker, data)

    def close(self) -> None:
        """Stop the worker. The next request starts another."""
        with self._lock:
            worker, self._worker = self._worker, None
            if worker is not None:
                worker.end()

    def _exchange(self, worker: _Worker, data: bytes) -> dict[str, Any]:
        reply: dict[str, Any] | None = None
        try:
            reply = worker.exchange(data)
        finally:
            if reply is None or reply["is_last"]:  # an interrupt may have left a partial message
                self._worker = None
                worker.end()
        return reply


class _Worker:
    """One worker process and the socket to it."""

    def __init__(self) -> None:
        mine, its = socket.socketpair()
        with its:
            try:
                process = subprocess.Popen(
                    _command(),
                    stdin=its.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env={name: os.environ[name] for name in _INHERITED if name in os.environ},
                    start_new_session=True,  # Ctrl-C must not reach it.
                )
            except BaseException as error:
                mine.close()
                if isinstance(error, OSError):
                    raise ChatTemplateError(_cannot_start(str(error))) from error
                raise
        self._socket, self._process = mine, process
        self._end = weakref.finalize(self, _end_process, process, mine, os.getpid())

    def exchange(self, data: bytes) -> dict[str, Any]:
        """Return the reply to the request in ``data``.

        Raises:
            ChatTemplateError: the worker ended without a reply.
        """
        reply = None
        try:
            self._socket.sendall(len(data).to_bytes(8, "big") + data, socket.MSG_NOSIGNAL)
            header = self._receive(8)
            reply = header and self._receive(int.from_bytes(header, "big"))
        except OSError:  # It ended before it had read the request.
            pass
        if not reply:
            raise ChatTemplateError(_why(self._process.wait()))
        answer: dict[str, Any] = json.loads(reply.decode("utf-8", "surrogatepass"))
        return answer

    def is_alive(self) -> bool:
        """Return whether the process is running."""
        return self._process.poll() is None

    def end(self) -> None:
        """Kill the process and wait for it."""
        self._end()

    def forget(self) -> None:
        """Leave the process to this process's parent, from which it was forked."""
        self._end.detach()
        self._socket.close()
        self._process.returncode = 0  # it is not a child of this process

    def _receive(self, count: int) -> bytes | None:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            received = self._socket.recv_into(view)
            if not received:
                return None
            view = view[received:]
        return bytes(data)


def _command() -> list[str]:
    if not sys.executable:
        raise ChatTemplateError(_cannot_start("sys.executable is empty"))
    directories = [_directory_of(package) for package in ("jinja2", "markupsafe")]
    return [
        os.path.abspath(sys.executable),
        "-I",
        "-S",
        str(Path(render_worker.__file__).absolute()),
        str(CPU_SECONDS),
        str(MEMORY_BYTES),
        *dict.fromkeys(directories),
    ]


def _directory_of(package: str) -> str:
    """Return the directory of ``package``, without a slow import."""
    for directory in map(Path, sys.path):
        if (directory / package / "__init__.py").is_file():
            return str(directory.absolute())
    raise ChatTemplateError(_cannot_start(f"no directory in sys.path has the package {package}"))


def _end_process(process: subprocess.Popen[bytes], connection: socket.socket, owner: int) -> None:
    if os.getpid() != owner:
        return
    connection.close()
    process.kill()
    process.wait()


def _forget_worker(renderer: TemplateRenderer | None) -> None:
    """Drop the worker and its lock, which another thread may hold, in a forked child."""
    if renderer is not None:
        renderer._lock = threading.Lock()
        worker, renderer._worker = renderer._worker, None
        if worker is not None:
            worker.forget()


def _as_json(request: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(request, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"messages, tools and template variables must be JSON values: {error}"
        ) from error
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > LARGEST_INPUT:
        raise RequestError(
            f"messages, tools and template variables are {len(data):,} bytes of JSON;"
            f" the limit is {LARGEST_INPUT:,}"
        )
    return data


def _plain(value: object) -> Any:
    """Convert mappings and sequences of other types to dicts and lists."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"got a value of type {type(value).__name__}")


def _why(returncode: int) -> str:
    if returncode == -signal.SIGPROF:
        return (
            f"did not end: it was stopped after {CPU_SECONDS:g} s of CPU time;"
            " does it loop, or build huge values?"
        )
    if returncode == render_worker.OUT_OF_MEMORY:
        return (
            f"was stopped: it needed more than {MEMORY_BYTES >> 20} MiB of memory;"
            " does it build huge values?"
        )
    how = f"signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
    return f"could not be rendered: the worker process that renders templates ended ({how})"


def _cannot_start(reason: str) -> str:
    return f"could not be rendered: the worker process cannot be started: {reason}"
