"""Requests and batches of answers on the hop between the front and a replica.

A hop costs as much for one message as for many.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from mie.sched.routing import beginning_of

_CROSSES = (
    "type",
    "http_version",
    "method",
    "scheme",
    "root_path",
    "path",
    "raw_path",
    "query_string",
    "headers",
    "client",
    "server",
)
"""The keys of an ASGI scope that cross. The rest belongs to the process with the connection."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """An HTTP request on its way to a replica, and the parts of it that a router reads."""

    scope: Mapping[str, Any]
    body: bytes
    beginning: bytes
    salt: str

    @classmethod
    def of(cls, scope: Scope, body: bytes, tenant: str) -> Call:
        """Return the request that has arrived. A replica refuses a body that is not JSON."""
        try:
            values = json.loads(body)
        except (ValueError, RecursionError):
            values = None
        values = values if isinstance(values, dict) else {}
        return cls(
            scope={name: scope[name] for name in _CROSSES if name in scope},
            body=body,
            beginning=beginning_of(values),
            salt=f"{tenant}\0{values.get('cache_salt')}",
        )

    @property
    def prompt(self) -> str:
        """The text that Ray's own prefix-aware router compares. It may not be empty."""
        return self.beginning.decode()


class ReplicaAnswer(NamedTuple):
    """A replica's whole answer to a request that goes to all of them."""

    replica: str
    status: int
    headers: Mapping[str, str]
    """Without the length of the body, which may be replaced."""
    body: bytes

    @classmethod
    async def of(cls, replica: str, batches: AsyncIterable[list[Message]]) -> ReplicaAnswer:
        """Return the answer that messages make up."""
        head, *rest = [message async for batch in batches for message in batch]
        body = b"".join(message.get("body", b"") for message in rest)
        headers = {**Headers(raw=head["headers"])}
        headers.pop("content-length", None)
        return cls(replica, head["status"], headers, body)


async def piped(app: ASGIApp, call: Call) -> AsyncGenerator[list[Message], None]:
    """Yield the messages of the answer. Pieces of the body that wait are joined.

    Closing the generator, or cancelling its task, tells the application that the client has left.
    """
    waiting: list[Message] = []
    request: list[Message] = [{"type": "http.request", "body": call.body}]
    news, has_left = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        if request:
            return request.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if waiting and waiting[-1]["type"] == message["type"]:  # a piece of the body
            message = {**message, "body": waiting.pop().get("body", b"") + message.get("body", b"")}
        waiting.append(message)
        news.set()

    work = asyncio.ensure_future(app(dict(call.scope), receive, send))
    work.add_done_callback(lambda _: news.set())
    try:
        while waiting or not work.done():
            await news.wait()
            news.clear()
            if waiting:
                taken, waiting[:] = waiting[:], []
                yield taken
        work.result()
    finally:
        has_left.set()
        await asyncio.wait([work])
