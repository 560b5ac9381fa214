"""`create_app`: the routes of the server in their middlewares, and how it ends."""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mie.base.threads import start_thread
from mie.config.params.sampling import SamplingParams
from mie.errors import EngineDeadError, MieError, ThreadLimitError, shown_text
from mie.frontend.async_llm import AsyncLLM
from mie.serve.access_log import AccessLog
from mie.serve.asgi import Failures, RootPath, WholeBody, route_of
from mie.serve.auth import Authentication
from mie.serve.config import ServeConfig
from mie.serve.cross_site import CrossSite
from mie.serve.departs import HEADER
from mie.serve.errors import ApiError, api_error
from mie.serve.health import Gate, Health, ServerHealth
from mie.serve.limits import QueueLimit
from mie.serve.metrics import ServerMetrics
from mie.serve.page.routes import PageRoutes
from mie.serve.page.shell import PageShell
from mie.serve.routes import routes
from mie.serve.serving import Serving, in_utf8, names_of, without_paths

logger = logging.getLogger(__name__)

STEP_SECONDS = 60.0
"""Time that the engine gets to end the step that it computes."""
SAMPLE_SECONDS = 0.25
"""Time between two looks at the engine."""
FLUSH_SECONDS = 5.0
"""Time that responses get to reach their clients after the engine has ended."""


class Edge(ABC):
    """One server's middlewares, the routes that belong to them, and their state."""

    def __init__(self, config: ServeConfig, health: ServerHealth, metrics: ServerMetrics) -> None:
        self.config = config
        self.health = health
        self.metrics = metrics
        self.shell = PageShell(config)

    def middleware(self, paths: Sequence[str]) -> list[Middleware]:
        """Return the middlewares from the outermost to the innermost.

        A request without a key is refused before its body is read.
        """
        config = self.config
        layers = [Middleware(Failures)]
        if config.root_path:
            layers.append(Middleware(RootPath, path=config.root_path))
        layers.append(Middleware(AccessLog, metrics=self.metrics, paths=paths))
        if config.allowed_origins:
            layers.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=list(config.allowed_origins),
                    allow_methods=["GET", "POST"],
                    allow_headers=["*"],
                    expose_headers=["x-request-id", "retry-after", HEADER],
                )
            )
        # A 500 from here has a request id and may be read by web pages. The outermost answers
        # errors of the layers between the two.
        layers.append(Middleware(Failures))
        if config.has_keys:
            layers.append(
                Middleware(
                    Authentication,
                    keys=config.keys,
                    sessions=self.shell.sessions,
                    wrong_keys=self.shell.wrong_keys,
                    admin_keys=config.admin_keys,
                    share_prefix_cache=config.share_prefix_cache,
                )
            )
        layers.append(Middleware(CrossSite, config=config))
        layers.append(Middleware(Gate, health=self.health))
        layers.append(Middleware(WholeBody, max_bytes=config.max_request_bytes))
        return layers

    @property
    @abstractmethod
    def dead_error(self) -> EngineDeadError | None:
        """Why the server cannot go on, or None if it can."""

    @abstractmethod
    async def summary(self) -> list[str]:
        """Return the lines of a start."""

    @abstractmethod
    def without_paths(self, message: str) -> str:
        """Return a message without directories, because they are no client's business."""

    @abstractmethod
    async def watch(self) -> None:
        """Look at the engine until it is dead, and log when it stops or starts to step."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine after its step. It waits, and is called in a thread."""

    async def drain(self) -> None:
        """Refuse new requests, and wait until running requests have ended or ran out of time."""
        self.health.is_draining = True
        await self._wait_idle(self.config.shutdown_timeout)

    async def end_engine(self) -> bool:
        """End the engine. The requests that are left get a final error.

        Return whether it ended: it may hang in a step.
        """
        ending = threading.Thread(target=self.shutdown, name="mie-end", daemon=True)
        try:
            start_thread(ending)
        except ThreadLimitError as error:
            logger.error("the engine ends with the process: %s", error)
            return False
        await self._wait(lambda: not ending.is_alive(), STEP_SECONDS)
        await self.flush()
        return not ending.is_alive()

    async def flush(self) -> None:
        """Wait, but not long, until responses have ended."""
        await self._wait_idle(FLUSH_SECONDS)

    async def _wait_idle(self, seconds: float) -> None:
        await self._wait(lambda: not self.health.num_requests, seconds)

    async def _wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not is_over() and loop.time() < deadline:
            await asyncio.sleep(0.02)


class EngineEdge(Edge):
    """The edge of one engine."""

    health: Health
    serving: Serving
    """The state of the routes, from `start` on."""
    app: Starlette
    """The routes, if this is one of several engines of a server."""

    def __init__(self, engine: AsyncLLM, config: ServeConfig) -> None:
        name = in_utf8((config.served_model_name or names_of(engine.model))[0])
        metrics = ServerMetrics(engine, name)
        super().__init__(config, Health(engine, config.watchdog_timeout), metrics)
        self.queue_limit = QueueLimit(engine, config, metrics.reject)
        self.page = PageRoutes(engine, config, name)
        self.engine = engine

    async def start(self) -> Serving:
        """Read the facts that the routes need from the engine."""
        self.serving = await Serving.of(self.engine, self.config, self.queue_limit)
        return self.serving

    @property
    def dead_error(self) -> EngineDeadError | None:
        return self.engine.dead_error

    async def summary(self) -> list[str]:
        return await summary(self.engine)

    def without_paths(self, message: str) -> str:
        return without_paths(message, self.serving.facts.directories)

    async def watch(self) -> None:
        was_stalled = False
        while self.engine.dead_error is None:
            is_stalled = self.health.status == "stalled"
            if is_stalled != was_stalled:
                what = "has work and computes no step" if is_stalled else "computes steps again"
                logger.critical("the engine %s", what)
                was_stalled = is_stalled
            await asyncio.sleep(SAMPLE_SECONDS)

    def shutdown(self) -> None:
        self.engine.shutdown()


async def summary(engine: AsyncLLM) -> list[str]:
    """Return the lines of a start: the model, its cache, and the sampling defaults."""
    facts, generation = await engine.get_model_config(), engine.generation_config
    defaults = "sampling defaults: neutral"
    if generation.sampling:
        values = ", ".join(f"{name}={value}" for name, value in generation.sampling.items())
        note = "--generation-config vllm ignores the file"
        defaults = f"sampling defaults of {generation.source}: {values} ({note})"
    more = {
        name: value
        for name, value in generation.conversation.items()
        if name not in generation.sampling
    }
    if more:
        values = ", ".join(f"{name}={value}" for name, value in more.items())
        note = "the model recommends none; --generation-config vllm ignores them"
        defaults += f"; in conversations on /chat and Ollama's routes: {values} ({note})"
    return [
        f"{facts.model} · {facts.backend} · {facts.dtype} · context of "
        f"{facts.max_model_len:,} tokens · {facts.num_blocks:,} blocks of {facts.block_size} "
        f"tokens · at most {facts.max_num_seqs} sequences at once",
        defaults,
    ]


_NAMES = {
    *SamplingParams.__dataclass_fields__,
    *("cache_salt", "messages", "priority", "prompt"),
    *("tools", "tool_choice", "parallel_tool_calls", "continue_final_message"),
}
"""The parameters that messages of mie may begin with."""


def create_app(engine: AsyncLLM, config: ServeConfig | None = None) -> Starlette:
    """Return the server's application. The caller shuts the engine down afterwards."""
    edge = EngineEdge(engine, config or ServeConfig())

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.serving = await edge.start()
        yield
        await edge.page.close()
        edge.shell.close()

    page = [*edge.shell.routes(), *edge.page.routes()] if edge.config.page else []
    all_routes = [*routes(), *page]
    layers = edge.middleware([route.path for route in all_routes])
    return new_app(edge, all_routes, layers, lifespan=lifespan)


def new_app(
    edge: Edge, routes: Sequence[Route], middleware: Sequence[Middleware], **more: Any
) -> Starlette:
    """Return an application with the errors of the server."""
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={ApiError: _refuse, MieError: _refuse, HTTPException: _refuse_http},
        **more,
    )
    app.router.redirect_slashes = False  # it would send clients to the host that they name
    app.state.edge = edge
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    refused = api_error(error, _NAMES)
    if refused is not error:
        refused.message = request.app.state.edge.without_paths(refused.message)
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
