"""A replica: an engine, and the server's own application on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from ray import serve
from starlette.types import Message

from mie.async_llm import AsyncLLM
from mie.errors import EngineDeadError
from mie.ray.call import Answer, Call
from mie.serve.app import create_app
from mie.serve.config import ServeConfig


class Replica:
    """The callable of a deployment. Ray creates it in a process of its own."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engine: Mapping[str, Any], server: ServeConfig
    ) -> None:
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._engine = await asyncio.to_thread(lambda: AsyncLLM(**engine))
        self._app = create_app(self._engine, server)
        self._lifespan = self._app.router.lifespan_context(self._app)
        await self._lifespan.__aenter__()

    def check_health(self) -> None:
        """Raise an error if the engine is dead or hangs, so that Ray replaces this replica."""
        status = self._app.state.edge.health.status
        if status in ("dead", "stalled"):
            raise EngineDeadError(f"the engine of replica {self._name} is {status}")

    async def stream(self, call: Call) -> AsyncGenerator[list[Message], None]:
        """Yield the messages of the answer. Those that come while one is sent are joined.

        Closing the generator tells the application that the client has left.
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
            waiting.append(message)
            news.set()

        work = asyncio.ensure_future(self._app(dict(call.scope), receive, send))
        work.add_done_callback(lambda _: news.set())
        try:
            while waiting or not work.done():
                await news.wait()
                news.clear()
                if waiting:
                    yield _taken(waiting)
            work.result()
        finally:
            has_left.set()
            await asyncio.wait([work])

    async def answer(self, call: Call) -> Answer:
        """Return the whole answer."""
        messages = [message async for batch in self.stream(call) for message in batch]
        head, *rest = messages
        body = b"".join(message.get("body", b"") for message in rest)
        return Answer(self._name, head["status"], list(head.get("headers", ())), body)


def _taken(waiting: list[Message]) -> list[Message]:
    """Take all messages, with neighbouring pieces of the body joined."""
    taken: list[Message] = []
    for message in waiting:
        if taken and taken[-1]["type"] == message["type"]:
            body = taken.pop().get("body", b"") + message.get("body", b"")
            message = {**message, "body": body}
        taken.append(message)
    waiting.clear()
    return taken
