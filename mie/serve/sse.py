"""Server-sent events and their pace."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from json.encoder import encode_basestring as json_string

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mie.serve.asgi import writer_of

__all__ = ["DONE", "EventStream", "Pace", "json_string"]

DONE = "data: [DONE]\n\n"


class EventStream(Response):
    """A response of server-sent events. It calls ``on_end`` when it ends, however it ends.

    Each piece of ``events`` is one write of one or more whole events. A client that reads slowly
    blocks the write. Tokens that come meanwhile are merged into the next piece.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        on_end: Callable[[], object] = lambda: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self._on_end = on_end
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
            self._on_end()
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
