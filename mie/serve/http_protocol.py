"""Limits on the size and the duration of a request's head and body, and the end of a connection."""

import socket
from asyncio import TimerHandle, Transport
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Bytes of a request line and headers. Bytes that arrived with the last of them are not counted."""
HEAD_SECONDS = 60.0
"""Time in which a request line and headers must arrive."""
BODY_SECONDS = 60.0
"""Time in which the next `BODY_PIECE` bytes of a body, or the rest of it, must arrive."""
BODY_PIECE = 64 * 1024
FIRST_LOOK_SECONDS = 0.05
"""Time between the first two looks whether a client that sends no more has left."""
LAST_LOOK_SECONDS = 5.0
"""Maximum time between two looks. Each interval is twice as long as the interval before."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TIMEOUT = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class LimitedProtocol(HttpToolsProtocol):
    """Uvicorn's protocol with limits on the size of headers and on the time of bodies."""

    _num_head_bytes = 0
    _num_body_bytes = 0
    _is_in_body = False
    _timer: TimerHandle | None = None
    _is_half_closed = False

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # uvicorn always closes
        """Return whether the connection stays open after the client's last byte.

        A client that has left looks the same as a client that only sends no more, but its system
        refuses data. Interim responses find this out, and clients skip them. HTTP/1.0 has no
        interim responses, a begun answer has no place for one, and TLS cannot end one half of a
        connection. In these cases, the client has left.
        """
        if self._is_half_closed:  # reading was paused and resumed
            return True
        cycle = self.cycle
        if (
            cycle is None
            or cycle.more_body
            or cycle.response_started
            or self.pipeline
            or self.scheme != "http"
            or cycle.scope["http_version"] != "1.1"
        ):
            return False
        self._is_half_closed, cycle.keep_alive = True, False
        self._look(FIRST_LOOK_SECONDS)
        return True

    def _look(self, seconds: float) -> None:
        """Hang up if the client has left. Otherwise, look again after ``seconds``."""
        if self.transport.is_closing() or self.cycle.response_started:
            return  # from then on, writing the answer finds out
        connection = self.transport.get_extra_info("socket")
        if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
            return
        self.transport.write(CONTINUE)
        self.loop.call_later(seconds, self._look, min(2 * seconds, LAST_LOOK_SECONDS))

    def on_message_begin(self) -> None:
        """Begin to wait for the end of the headers."""
        super().on_message_begin()
        self._wait(HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, but none that follows the body: those have no limit and no reader."""
        if not self._is_in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin to wait for the body. Another limit holds for the size of the body."""
        self._num_body_bytes = 0
        self._wait(BODY_SECONDS)
        self._is_in_body = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, and wait for the next."""
        self._num_body_bytes += len(body)
        if self._num_body_bytes >= BODY_PIECE:
            self._num_body_bytes = 0
            self._wait(BODY_SECONDS)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Count from the beginning if another request follows."""
        self._stop_waiting()
        self._is_in_body, self._num_head_bytes = False, 0
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parse new bytes, and give up if the headers are too long."""
        self._num_head_bytes += len(data)
        super().data_received(data)
        if self._is_in_body:
            self._num_head_bytes = 0
        elif self._num_head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The request's headers exceed {MAX_HEAD_BYTES} bytes.")

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(seconds, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> Any:
        if self.transport.is_closing():
            return
        if self.flow.read_paused:  # the server itself reads no more for now
            self._wait(BODY_SECONDS)
            return
        if self._is_in_body and not self.cycle.response_started:
            self.transport.write(TIMEOUT)
        self.transport.close()
