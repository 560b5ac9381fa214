"""Server-sent events, their pace, and requests that end when their client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from json.encoder import encode_basestring as json_string
from typing import Protocol

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mie.serve.asgi import writer_of

__all__ = ["DONE", "DisconnectMiddleware", "EventStream", "Pace", "json_string"]

logger = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"

CLIENT_LEFT = 499
"""The status that logs and metrics have for a request whose client left."""


class Closable(Protocol):
    """Something that ends work when it is closed."""

    def close(self) -> None:
        """End the work. It never waits."""


class EventStream(Response):
    """A response of server-sent events. It closes ``work`` when it ends, however it ends.

    Each piece of ``events`` is one write of one or more whole events. A client that reads slowly
    blocks the write, so that what comes meanwhile is merged into the next piece.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        work: Closable,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._work = work
        self.init_headers(
            {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        write = writer_of(scope, send)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for events in self._events:
                await write({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._work.close()
            await self._events.aclose()


class Pace:
    """The beat of all streams.

    Writing chunks takes time from the engine, which computes in the same process. Each chunk
    therefore postpones the next beat, and tokens that arrive before it are merged. Streams that are
    written together also wake the event loop only once.
    """

    def __init__(self, max_per_second: float) -> None:
        """``max_per_second`` is the number of chunks of all streams together; 0 is no limit."""
        self._seconds = 1 / max_per_second if max_per_second else 0.0
        self._waiting: list[Callable[[], object]] = []
        self._earliest = 0.0

    def hold(self, go: Callable[[], object]) -> None:
        """Call ``go`` at the next beat."""
        if not self._waiting:
            loop = asyncio.get_running_loop()
            loop.call_later(max(0.0, self._earliest - loop.time()), self.beat)
        self._waiting.append(go)

    def beat(self) -> None:
        """Let everything go that is held."""
        waiting, self._waiting = self._waiting, []
        now = asyncio.get_running_loop().time()
        self._earliest = now + len(waiting) * self._seconds
        for go in waiting:
            go()


class DisconnectMiddleware:
    """Cancels the handler of a request whose client leaves, whether it streams or not.

    It reads the whole body first: afterwards the only message is the disconnect.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        if body is None:
            scope["mie.client_left"] = True
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.ensure_future(_disconnected(receive))

        async def receive_again() -> Message:
            if messages:
                return messages.pop()
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        work = asyncio.ensure_future(self._app(scope, receive_again, send))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                scope["mie.client_left"] = True
            gone.cancel()
            work.cancel()
            await asyncio.wait((work, gone))
        if not work.cancelled():
            work.result()


async def _read_body(receive: Receive) -> bytes | None:
    """Return the body, or None if the client left before its end."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        return bytes(message.get("body", b""))
    pieces = []
    while message["type"] == "http.request":
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)
        message = await receive()
    return None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
