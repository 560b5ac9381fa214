"""A replica: an engine, and the server's own application on it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

from ray import serve
from starlette.types import Message

from mie.async_llm import AsyncLLM
from mie.errors import EngineDeadError
from mie.ray.front.call import Call, ReplicaAnswer, piped
from mie.serve.access_log import logging_as
from mie.serve.app import create_app
from mie.serve.config import ServeConfig
from mie.serve.server import summary

logger = logging.getLogger(__name__)


class Replica:
    """The callable of a deployment. Ray creates it in a separate process."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, engine: Mapping[str, Any], server: ServeConfig
    ) -> None:
        self._name: str = serve.get_replica_context().replica_id.unique_id
        self._engine = await asyncio.to_thread(lambda: AsyncLLM(**engine))
        self._app = create_app(self._engine, server)
        self._stack = AsyncExitStack()  # Ray ends the process
        self._stack.enter_context(logging_as(server.log_format))
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
        for line in await summary(self._engine):
            logger.info("%s", line)

    def check_health(self) -> None:
        """Raise an error if the engine is dead or hangs, so that Ray replaces this replica."""
        status = self._app.state.edge.health.status
        if status in ("dead", "stalled"):
            raise EngineDeadError(f"the engine of replica {self._name} is {status}")

    async def stream(self, call: Call) -> AsyncGenerator[list[Message], None]:
        """Yield the messages of the answer."""
        async with aclosing(piped(self._app, call)) as batches:
            async for messages in batches:
                yield messages

    async def answer(self, call: Call) -> ReplicaAnswer:
        """Return the whole answer."""
        return await ReplicaAnswer.of(self._name, piped(self._app, call))
