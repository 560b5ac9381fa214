"""An answer as batches of messages, because a hop costs as much for one as for many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp, Message

from mie.front.call import Call


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
