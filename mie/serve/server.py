"""Runs the application under uvicorn, until a signal or the end of the engine ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from mie.async_llm import AsyncLLM
from mie.errors import ConfigError
from mie.serve.access_log import logging_as
from mie.serve.app import create_app
from mie.serve.config import ServeConfig
from mie.serve.edge import Edge

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048


def serve(
    engine: AsyncLLM, config: ServeConfig, on_ready: Callable[[str], object] = lambda url: None
) -> int:
    """Serve until a signal ends it, and return the exit code: 1 if the engine died.

    Call it in the main thread, which takes the signals. ``on_ready`` gets the server's URL when
    connections are accepted. The engine is shut down in the end.

    Raises:
        ConfigError: the server cannot listen there, or a certificate is unusable.
    """
    with logging_as(config.log_format):
        try:
            return asyncio.run(Server(engine, config).run(on_ready))
        finally:
            engine.shutdown()


class Server:
    """A server in an event loop, which may be that of a test."""

    def __init__(self, engine: AsyncLLM, config: ServeConfig) -> None:
        check_sockets(config)
        self.app: Starlette = create_app(engine, config)
        self._engine = engine
        self._config = config
        self._edge: Edge = self.app.state.edge
        self._is_ending: asyncio.Event | None = None
        self._uvicorn = _Uvicorn(_options(self.app, config))

    async def run(self, on_ready: Callable[[str], object] = lambda url: None) -> int:
        """Serve until `stop` is called or the engine dies, and return the exit code."""
        loop = asyncio.get_running_loop()
        self._is_ending = asyncio.Event()
        with _listen(self._config) as listener:
            for number in SIGNALS:
                loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
            try:
                return await self._run(listener, on_ready)
            finally:
                for number in SIGNALS:
                    loop.remove_signal_handler(number)
                if self._config.uds is not None:
                    Path(self._config.uds).unlink(missing_ok=True)

    async def _run(self, listener: socket.socket, on_ready: Callable[[str], object]) -> int:
        assert self._is_ending is not None
        serving = asyncio.ensure_future(self._uvicorn.serve([listener]))
        await asyncio.wait((serving, asyncio.ensure_future(self._uvicorn.is_started.wait())),
                           return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            url = _url(listener, self._config)
            logger.info("ready at %s", url)
            on_ready(url)
        ending = asyncio.ensure_future(self._is_ending.wait())
        watching = asyncio.ensure_future(self._edge.watch())
        await asyncio.wait((serving, ending, watching), return_when=asyncio.FIRST_COMPLETED)
        is_dead = watching.done() and not ending.done()
        if is_dead:
            logger.critical("the server ends: %s", self._engine.dead_error)
            await self._edge.flush()
        elif ending.done():
            await self._edge.drain()
        ending.cancel()
        watching.cancel()
        self._uvicorn.should_exit = True
        await serving
        return int(is_dead)

    def stop(self, why: str = "stop") -> None:
        """End the server: running requests first get their time. The second call ends at once."""
        assert self._is_ending is not None, "it does not run"
        if not self._is_ending.is_set():
            seconds = self._config.shutdown_timeout
            logger.info(
                "%s: no new requests; %d that run have %g s to end (again: end at once)",
                why,
                self._edge.health.num_requests,
                seconds,
            )
            self._is_ending.set()
            return
        logger.warning("%s again: the server ends at once", why)
        os._exit(0)


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers, and with an event that tells that it has started."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_started = asyncio.Event()

    def capture_signals(self) -> _Nothing:  # type: ignore[override]  # a context manager as well
        return _Nothing()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.is_started.set()
