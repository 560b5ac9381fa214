"""Accept connections, and refuse them while few file descriptors are left.

A connection takes a file descriptor. Without a limit, idle clients would take all of them, and the
server could neither start a worker nor read a file. asyncio would log each failed attempt.
"""

import asyncio
import errno
import json
import logging
import resource
import socket
import time
from contextlib import suppress
from typing import Any

from mie.serve.errors import unavailable

logger = logging.getLogger(__name__)

EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
"""The errors of a system that has nothing left for another connection."""
RESERVED = 64
"""File descriptors that connections leave to the server, but at most a quarter of the limit."""
REPORT_SECONDS = 1.0
"""Minimum time between two lines of the log about refused connections."""
REST_SECONDS = 0.5
"""Time without another attempt after a failed one.

asyncio waits for a second before it tries again, but some of its versions first repeat the attempt
for every place of the backlog.
"""
_MESSAGE = "the server has too many connections (try again, or raise its limit, `ulimit -n`)"


def _refusal() -> bytes:
    error = unavailable(_MESSAGE, 1)
    body = json.dumps(error.body()).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


REFUSAL = _refusal()


class Listener(socket.socket):
    """A listening socket that refuses connections while few file descriptors are left."""

    is_encrypted = False
    """Whether connections begin with TLS, so that a refusal cannot say why."""
    _rest_until = _next_report = 0.0
    _num_refused = 0

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection.

        Raises:
            BlockingIOError: there is none, or it was refused.
            OSError: the system has nothing left for a connection.
        """
        if time.monotonic() < self._rest_until:
            raise BlockingIOError
        try:
            connection, address = super().accept()
        except OSError as error:
            if error.errno in EXHAUSTED:
                self._rest_until = time.monotonic() + REST_SECONDS
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The system gives the lowest free number, so all lower ones are in use.
        is_near = connection.fileno() >= limit - min(RESERVED, limit // 4)
        if limit == resource.RLIM_INFINITY or not is_near:
            return connection, address
        self._refuse(connection)
        self.report(f"file descriptors run short at a limit of {limit}")
        raise BlockingIOError

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Log one line for failed attempts of an event loop, instead of a traceback for each."""
        loop.set_exception_handler(self._handle)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in EXHAUSTED:
            self.report(str(error))
        else:
            loop.default_exception_handler(context)

    def _refuse(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            if self.is_encrypted:
                return
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.recv(1 << 16)  # unread bytes would cancel the answer
            connection.send(REFUSAL)
            connection.shutdown(socket.SHUT_WR)

    def report(self, why: str) -> None:
        """Count a refused connection, and log the count once a second."""
        self._num_refused += 1
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + REPORT_SECONDS
            logger.error("%d connections refused: %s", self._num_refused, why)
            self._num_refused = 0
