"""`create_app`: the routes of the server in their middlewares, its health, and how it ends."""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from mie.async_llm import AsyncLLM
from mie.config.params.sampling import SamplingParams
from mie.errors import MieError, ThreadLimitError, shown_text
from mie.serve.access_log import AccessLog, Tracing, new_provider
from mie.serve.asgi import OPEN_ROUTES, Failures, RootPath, WholeBody, answer, route_of
from mie.serve.auth import Authentication
from mie.serve.config import ServeConfig
from mie.serve.cross_site import CrossSite
from mie.serve.errors import MAX_RETRY_AFTER, ApiError, api_error, unavailable
from mie.serve.limits import QueueLimit
from mie.serve.metrics import ServerMetrics
from mie.serve.page.routes import PageRoutes
from mie.serve.routes import routes
from mie.serve.serving import Serving
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


Status = Literal["ok", "draining", "stalled", "dead"]


class Health:
    """Tells whether requests are served, and counts those that are."""

    def __init__(
        self, engine: AsyncLLM, watchdog_timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``watchdog_timeout`` is in seconds of ``clock``; 0 turns the watchdog off."""
        self.is_draining = False
        """Whether new requests are refused, because the server is about to end."""
        self.num_requests = 0
        """Requests that are being served."""
        self._engine = engine
        self._timeout = watchdog_timeout
        self._clock = clock
        self._num_turns = -1
        self._last_turn = clock()

    def sample(self) -> None:
        """Notice whether the engine moves. Call it more often than the watchdog's timeout."""
        pulse = self._engine.pulse
        if not pulse.has_work or pulse.num_turns != self._num_turns:
            self._num_turns, self._last_turn = pulse.num_turns, self._clock()

    @property
    def status(self) -> Status:
        """The state of the server."""
        self.sample()
        if self._engine.dead_error is not None:
            return "draining" if self.is_draining else "dead"
        if self._timeout and self._clock() - self._last_turn > self._timeout:
            return "stalled"
        return "draining" if self.is_draining else "ok"


class Gate:
    """Middleware that counts requests, and refuses new ones while the server drains."""

    def __init__(self, app: ASGIApp, health: Health) -> None:
        self._app = app
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_of(scope) in OPEN_ROUTES:
            return await self._app(scope, receive, send)
        if self._health.is_draining:
            return await answer(_ENDING, scope, receive, send)
        self._health.num_requests += 1
        try:
            return await self._app(scope, receive, send)
        finally:
            self._health.num_requests -= 1


_ENDING = unavailable("the server is shutting down", MAX_RETRY_AFTER)


_NAMES = {
    *SamplingParams.__dataclass_fields__,
    *("cache_salt", "messages", "priority", "prompt"),
    *("tools", "tool_choice", "parallel_tool_calls"),
}
"""The parameters that messages of mie may begin with."""


def create_app(engine: AsyncLLM, config: ServeConfig | None = None) -> Starlette:
    """Return the server's application. The caller shuts the engine down afterwards."""
    config = config or ServeConfig()

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.serving = await Serving.of(engine, config, edge.queue_limit)
        yield
        await edge.page.close()

    edge = Edge(engine, config)
    all_routes = [*routes(), *edge.page_routes()]
    app = Starlette(
        routes=all_routes,
        middleware=edge.middleware([route.path for route in all_routes]),
        exception_handlers={ApiError: _refuse, MieError: _refuse, HTTPException: _refuse_http},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False  # it would send clients to the host that they name
    app.state.edge = edge
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    refused = api_error(error, _NAMES)
    if refused is not error:
        refused.message = request.app.state.serving.without_paths(refused.message)
    return refused.response(route_of(request.scope))


async def _refuse_http(request: Request, error: Exception) -> Response:
    """Answer a request that Starlette itself refuses: an unknown route, or a wrong method."""
    assert isinstance(error, HTTPException)
    path = route_of(request.scope)
    messages = {
        404: f"there is no route {shown_text(path)}",
        405: f"{shown_text(path)} does not take {request.method}",
    }
    refused = ApiError(
        error.status_code,
        messages.get(error.status_code, str(error.detail)),
        code="not_found" if error.status_code == 404 else "method_not_allowed",
        headers=error.headers,
    )
    return refused.response(path)
