"""What surrounds the routes: keys, limits, health, metrics, logs, shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from mie.async_llm import AsyncLLM
from mie.serve.access_log import AccessLog
from mie.serve.asgi import RootPath
from mie.serve.auth import Authentication
from mie.serve.config import ServeConfig
from mie.serve.health import Gate, Health
from mie.serve.limits import BodyLimit, QueueLimit
from mie.serve.metrics import ServerMetrics

SAMPLE_SECONDS = 0.25
"""Time between two looks at the engine."""
FLUSH_SECONDS = 5.0
"""Time that responses get to reach their clients after the engine has ended."""


class Edge:
    """One app's middlewares, the routes that belong to them, and their state."""

    def __init__(self, engine: AsyncLLM, config: ServeConfig) -> None:
        model_name = (config.served_model_name or [engine.model])[0]
        settings = engine.engine_config
        self.config = config
        self.health = Health(engine, config.watchdog_timeout)
        self.metrics = ServerMetrics(engine, model_name)
        max_reqs = config.max_num_queued_reqs
        self.queue_limit = QueueLimit(
            engine,
            max_num_seqs=settings.max_num_seqs,
            max_reqs=4 * settings.max_num_seqs if max_reqs is None else max_reqs,
            max_tokens=config.max_num_queued_tokens,
            on_rejection=self.metrics.reject,
        )
        self._is_fair = settings.scheduling_policy == "fair"
        self._engine = engine

    def routes(self) -> list[Route]:
        """Return the routes that belong to the middlewares."""
        return [*self.health.routes(), *self.metrics.routes()]

    def middleware(self, paths: Sequence[str]) -> list[Middleware]:
        """Return the middlewares from the outermost to the innermost.

        A request without a key is refused before its body is read.
        """
        config = self.config
        layers = [Middleware(AccessLog, metrics=self.metrics, paths=paths)]
        if config.root_path:
            layers.insert(0, Middleware(RootPath, path=config.root_path))
        if config.allowed_origins:
            layers.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(config.allowed_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=["x-request-id", "retry-after"],
                )
            )
        if config.keys is not None:
            layers.append(
                Middleware(
                    Authentication,
                    keys=config.keys,
                    share_prefix_cache=config.share_prefix_cache,
                    is_fair=self._is_fair,
                )
            )
        layers.append(Middleware(Gate, health=self.health))
        layers.append(Middleware(BodyLimit, max_bytes=config.max_request_bytes))
        return layers

    async def watch(self) -> None:
        """Look at the engine until it is dead."""
        while self._engine.dead_error is None:
            self.health.sample()
            await asyncio.sleep(SAMPLE_SECONDS)

    async def drain(self) -> None:
        """Refuse new requests, and wait until those that run have ended or ran out of time.

        Those that are left get a final error when the engine ends.
        """
        self.health.is_draining = True
        await self._wait_idle(self.config.shutdown_timeout)
        await asyncio.to_thread(self._engine.shutdown)
        await self.flush()

    async def flush(self) -> None:
        """Wait, but not long, until clients have read what the end of the engine means to them."""
        await self._wait_idle(FLUSH_SECONDS)

    async def _wait_idle(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while self.health.num_requests and loop.time() < deadline:
            await asyncio.sleep(0.02)
