"""What the middlewares share. Each one is a plain ASGI app around the next."""

from __future__ import annotations

import logging
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mie.serve.errors import ApiError, api_error

logger = logging.getLogger(__name__)

OPEN_ROUTES = frozenset({"/health", "/ping", "/version", "/ready"})
"""The routes that need no key and are answered while the server drains."""


SHELL_ROUTES = frozenset({"/", "/mie/login", "/mie/logout"})
"""The routes of the web page that show nothing, and with which one logs in."""


def is_open(route: str) -> bool:
    """Return whether a route needs no key."""
    return route in OPEN_ROUTES or route in SHELL_ROUTES or route.startswith("/mie/page/")


def route_of(scope: Scope) -> str:
    """Return the path as the router sees it: without the path under which a proxy serves."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    is_below = bool(root) and path.startswith(f"{root}/")
    return path[len(root) :] if is_below else path


class RootPath:
    """Middleware that tells the router under which path a proxy serves.

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


def writer_of(scope: Scope, send: Send) -> Send:
    """Return what sends the middle of a response past the middlewares.

    They look at the first message and at the last. A stream has one in between for each token.
    """
    writer: Send = scope.get("mie.send", send)
    return writer


class Failures:
    """Middleware that answers a bug with a 500, and logs it with its traceback.

    Starlette answers as well, but raises the exception again. Uvicorn then closes the connection,
    which the answer has promised to keep, and the client's next request is lost.
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
            request_id = scope.get("mie.request_id")
            logger.error("request %s met a bug: %r", request_id, error, exc_info=error)
            if not has_begun:
                failed = api_error(error)
                if request_id is not None:
                    failed.message += f"; the request's id is {request_id}"
                await answer(failed, scope, receive, send)


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
    """Return what the log line of a request says about it, for handlers to add to."""
    facts: dict[str, Any] = scope.setdefault("mie.facts", {})
    return facts
