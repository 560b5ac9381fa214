"""The surroundings of the routes: keys, limits, health, metrics, logs, shutdown."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from mie.async_llm import AsyncLLM
from mie.errors import ThreadLimitError
from mie.serve.access_log import AccessLog
from mie.serve.asgi import Failures, RootPath, WholeBody
from mie.serve.auth import Authentication
from mie.serve.config import ServeConfig
from mie.serve.cross_site import CrossSite
from mie.serve.health import Gate, Health
from mie.serve.limits import QueueLimit
from mie.serve.metrics import ServerMetrics
from mie.serve.page.routes import PageRoutes
from mie.serve.tracing import Tracing, new_provider
from mie.system.threads import call_in_thread, start_thread

logger = logging.getLogger(__name__)

STEP_SECONDS = 60.0
"""Time that the engine gets to end the step that it computes."""
SAMPLE_SECONDS = 0.25
"""Time between two looks at the engine."""
FLUSH_SECONDS = 5.0
"""Time that responses get to reach their clients after the engine has ended."""


class Edge:
    """One app's middlewares, the routes that belong to them, and their state."""

    def __init__(self, engine: AsyncLLM, config: ServeConfig) -> None:
        model_name = (config.served_model_name or [engine.model])[0]
        self._model_name = model_name
        endpoint = config.otlp_traces_endpoint
        self._spans = None if endpoint is None else new_provider(endpoint)
        settings = engine.engine_config
        self.config = config
        self.health = Health(engine, config.watchdog_timeout)
        self.metrics = ServerMetrics(engine, model_name)
        max_reqs = config.max_num_queued_reqs
        self.queue_limit = QueueLimit(
            engine,
            max_reqs=4 * settings.max_num_seqs if max_reqs is None else max_reqs,
            max_tokens=config.max_num_queued_tokens,
            on_rejection=self.metrics.reject,
        )
        self.page = PageRoutes(engine, config, model_name)
        self._engine = engine

    def page_routes(self) -> list[Route]:
        """Return the routes of the web page."""
        return self.page.routes() if self.config.page else []

    def middleware(self, paths: Sequence[str]) -> list[Middleware]:
        """Return the middlewares from the outermost to the innermost.

        A request without a key is refused before its body is read.
        """
        config = self.config
        tracing = None
        if self._spans is not None:
            tracing = Tracing(self._spans, self._model_name, paths)
        layers = [Middleware(AccessLog, metrics=self.metrics, tracing=tracing, paths=paths)]
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
        # A 500 from here has a request id and may be read by web pages. The outermost answers
        # errors of the layers between the two.
        layers.append(Middleware(Failures))
        layers.insert(0, Middleware(Failures))
        if config.keys is not None or config.admin_keys is not None:
            layers.append(
                Middleware(
                    Authentication,
                    keys=config.keys,
                    sessions=self.page.sessions,
                    wrong_keys=self.page.wrong_keys,
                    admin_keys=config.admin_keys,
                    share_prefix_cache=config.share_prefix_cache,
                )
            )
        layers.append(Middleware(CrossSite, config=config))
        layers.append(Middleware(Gate, health=self.health))
        layers.append(Middleware(WholeBody, max_bytes=config.max_request_bytes))
        return layers

    async def watch(self) -> None:
        """Look at the engine until it is dead, and log when it stops or starts to step."""
        was_stalled = False
        while self._engine.dead_error is None:
            is_stalled = self.health.status == "stalled"
            if is_stalled != was_stalled:
                what = "has work and computes no step" if is_stalled else "computes steps again"
                logger.critical("the engine %s", what)
                was_stalled = is_stalled
            await asyncio.sleep(SAMPLE_SECONDS)

    async def drain(self) -> None:
        """Refuse new requests, and wait until those that run have ended or ran out of time."""
        self.health.is_draining = True
        await self._wait_idle(self.config.shutdown_timeout)

    async def end_engine(self) -> bool:
        """End the engine, which gives the requests that are left a final error.

        Return whether it ended: it may hang in a step.
        """
        ending = threading.Thread(target=self._engine.shutdown, name="mie-end", daemon=True)
        try:
            start_thread(ending)
        except ThreadLimitError as error:
            logger.error("the engine ends with the process: %s", error)
            return False
        await self._wait(lambda: not ending.is_alive(), STEP_SECONDS)
        await self.flush()
        return not ending.is_alive()

    async def flush(self) -> None:
        """Wait, but not long, until responses have ended and the last spans are sent."""
        await self._wait_idle(FLUSH_SECONDS)
        if self._spans is not None:
            await call_in_thread(self._spans.shutdown)

    async def _wait_idle(self, seconds: float) -> None:
        await self._wait(lambda: not self.health.num_requests, seconds)

    async def _wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not is_over() and loop.time() < deadline:
            await asyncio.sleep(0.02)
