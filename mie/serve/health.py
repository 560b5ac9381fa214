"""Whether requests are served, and the gate that counts running requests."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

from starlette.types import ASGIApp, Receive, Scope, Send

from mie.frontend.async_llm import AsyncLLM
from mie.serve.asgi import OPEN_ROUTES, answer, route_of
from mie.serve.errors import MAX_RETRY_AFTER, ApiError, unavailable

Status = Literal["ok", "draining", "stalled", "dead"]


class ServerHealth(ABC):
    """Reports whether requests are served, and counts running requests."""

    def __init__(self) -> None:
        self.is_draining = False
        """Whether new requests are refused, because the server is about to end."""
        self.num_requests = 0
        """Requests that are being served."""

    @property
    @abstractmethod
    def status(self) -> Status:
        """The state of the server."""


class Health(ServerHealth):
    """The health of a server with one engine."""

    def __init__(
        self, engine: AsyncLLM, watchdog_timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``watchdog_timeout`` is in seconds of ``clock``; 0 turns the watchdog off."""
        super().__init__()
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

    def __init__(self, app: ASGIApp, health: ServerHealth) -> None:
        self._app = app
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or route_of(scope) in OPEN_ROUTES:
            return await self._app(scope, receive, send)
        if self._health.is_draining:
            return await answer(ending(), scope, receive, send)
        self._health.num_requests += 1
        try:
            return await self._app(scope, receive, send)
        finally:
            self._health.num_requests -= 1


def ending() -> ApiError:
    """The 503 of a server that is about to end."""
    return unavailable("the server is shutting down", MAX_RETRY_AFTER)
