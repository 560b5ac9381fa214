"""The innermost and the outermost middlewares, their common parts, and streams of events."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from json.encoder import encode_basestring
from types import MappingProxyType
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mie.serve.errors import ApiError, api_error

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""The status that logs and metrics have for a request after its client left."""
MAX_LOGIN_BYTES = 16 << 10
"""Maximum size of the body of a login. A login needs no key."""
OPEN_ROUTES = frozenset({"/health", "/ping", "/version", "/ready"})
"""The routes that need no key and are answered while the server drains."""
SHELL_ROUTES = frozenset({"/", "/chat", "/story.html", "/mie/login", "/mie/logout"})
"""The routes of the web page that show no data, and the routes of the login."""


def is_open(route: str) -> bool:
    """Return whether a route needs no key."""
    return route in OPEN_ROUTES or route in SHELL_ROUTES or route.startswith("/mie/page/")


def route_of(scope: Scope) -> str:
    """Return the path for the router: without the path under which a proxy serves."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    is_below = bool(root) and path.startswith(f"{root}/")
    return path[len(root) :] if is_below else path


class RootPath:
    """Middleware that passes the path of a proxy to the router.

    Requests are found with that path and without it, since some proxies remove it.
    """

    def __init__(self, app: ASGIApp, path: str) -> None:
        """``path`` begins with a slash and does not end with one."""
        self._app = app
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            scope["root_path"] = self._path
        await self._app(scope, receive, send)


class Failures:
    """Middleware that answers a bug with a 500, and logs it with its traceback.

    Starlette answers as well, but raises the exception again. Uvicorn then closes the connection,
    although the answer has promised to keep it, and the client's next request is lost.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope.setdefault("mie.send", send)
        has_begun = has_ended = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun, has_ended
            await send(message)
            has_begun = True
            has_ended = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self._app(scope, receive, send_and_note)
        except Exception as error:
            if has_begun and not has_ended:
                raise  # uvicorn logs it, and closes the connection: the answer cannot be completed
            request_id, failed = scope.get("mie.request_id"), api_error(error)
            if failed.status == 500:
                logger.error("request %s met a bug: %r", request_id, error, exc_info=error)
            else:
                logger.error("request %s was not served: %r", request_id, error)
            if not has_begun:
                if request_id is not None:
                    failed.message += f"; the request's id is {request_id}"
                await answer(failed, scope, receive, send)


class WholeBody:
    """Middleware that reads the body, up to a limit, and cancels the handler of a client that left.

    Afterwards, the only message from the client is the disconnect, whether the answer streams or
    not.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        most = MAX_LOGIN_BYTES if route_of(scope) in SHELL_ROUTES else self._max_bytes
        try:
            body = await _read_body(scope, receive, most)
        except ApiError as refusal:
            return await answer(refusal, scope, receive, send)
        if body is None:
            scope["mie.client_left"] = True
            return None
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
        return None if work.cancelled() else work.result()


async def _read_body(scope: Scope, receive: Receive, most: int) -> bytes | None:
    """Return the body, or None if the client left before its end.

    Raises:
        ApiError: it is too large; it is not read further.
    """
    length = header(scope, b"content-length")
    if length is not None and length.isdecimal() and int(length[:20]) > most:
        raise _too_large(f"has {int(length[:20])} bytes; the limit is {most}")
    pieces, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        pieces.append(message.get("body", b""))
        num_bytes += len(pieces[-1])
        if num_bytes > most:
            raise _too_large(f"is longer than {most}")
        if not message.get("more_body"):
            return b"".join(pieces)


def _too_large(what: str) -> ApiError:
    return ApiError(
        413,
        f"the request's body {what} bytes (send less, or start the server with a larger "
        "--max-request-bytes)",
        code="request_too_large",
        headers={"connection": "close"},  # the rest of the body is not read
    )


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def header(scope: Scope, name: bytes) -> str | None:
    """Return the first header of this name (in lower case), or None."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


async def answer(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request with an error, in the shape that its route's clients read."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    await error.response(route_of(scope))(scope, receive, send)


def facts_of(scope: Scope) -> dict[str, Any]:
    """Return the facts in a request's log line, for handlers to add to."""
    facts: dict[str, Any] = scope.setdefault("mie.facts", {})
    return facts


json_string = encode_basestring
DONE = "data: [DONE]\n\n"
SSE = "text/event-stream"
NDJSON = "application/x-ndjson"


class EventStream:
    """An answer of events, one after another. It calls `close` when it ends, however it ends.

    Each piece of ``events`` is one write of one or more whole events. A client that reads slowly
    blocks the write. Tokens that come meanwhile are merged into the next piece.
    """

    media_type = SSE
    """The content type."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._events = events
        self._headers = headers

    def close(self) -> None:
        """Release everything that the stream holds. Called at the end of the stream."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Middlewares look at the first message and at the last, and each token has one in between.
        write: Send = scope.get("mie.send", send)
        is_text = self.media_type.startswith("text/")
        kind = f"{self.media_type}; charset=utf-8" if is_text else self.media_type
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **self._headers}
        raw = Headers({**headers, "content-type": kind}).raw
        start = {"type": "http.response.start", "status": 200, "headers": raw}
        try:
            await send(start)
            async for events in self._events:
                await write({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self.close()
            await self._events.aclose()


class Pace:
    """The beat of all streams.

    Writing chunks takes time from the engine, because it computes in the same process. Each chunk
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
        """Release everything that is held."""
        waiting, self._waiting = self._waiting, []
        now = asyncio.get_running_loop().time()
        self._earliest = now + len(waiting) * self._seconds
        for go in waiting:
            go()
