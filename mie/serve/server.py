"""Runs the application under uvicorn, until a signal or the end of the engine ends it."""

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from mie.base.resources import raise_open_files
from mie.errors import ConfigError
from mie.frontend.async_llm import AsyncLLM
from mie.serve.access_log import escaped, logging_as
from mie.serve.app import FLUSH_SECONDS, Edge, create_app
from mie.serve.config import ServeConfig
from mie.serve.http_protocol import LimitedProtocol
from mie.serve.keys import Keys
from mie.serve.listener import Listener
from mie.serve.router import ModelsEdge, create_router

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048
"""Connections that wait to be accepted."""
HANG_UP_SECONDS = 1.0
"""Time after which connections are cut that do not end by themselves when the server has ended."""
EXIT_AT_ONCE = 130
"""The exit code after a second signal."""


def serve(load: Callable[[], AsyncLLM | ModelsEdge], config: ServeConfig) -> int:
    """Load an engine, serve until a signal ends it, and return the exit code: 1 if it died.

    ``load`` may return several models instead, to be loaded on demand.

    Call it in the main thread, because that thread takes the signals. The address is taken before
    the engine is loaded, because loading may take minutes. Connections are accepted afterwards.

    Raises:
        ConfigError: the server cannot listen there, or a certificate is unusable.
    """
    check_sockets(config)
    raise_open_files()
    with bound(config) as listener, logging_as(config.log_format):
        engine = load()
        gc.collect()
        gc.freeze()  # loaded objects stay: a collection of them takes as long as ten steps
        try:
            return asyncio.run(Server(engine, config).run(listener))
        finally:
            engine.shutdown()


class Server:
    """A server in an event loop, also in a test's loop."""

    def __init__(self, engine: AsyncLLM | ModelsEdge, config: ServeConfig) -> None:
        check_sockets(config)
        self.app: Starlette = (
            create_router(engine) if isinstance(engine, ModelsEdge) else create_app(engine, config)
        )
        self._config = config
        self._edge: Edge = self.app.state.edge
        self._is_ending: asyncio.Event | None = None
        self._uvicorn = Uvicorn(uvicorn_config(self.app, config))

    async def run(
        self, listener: socket.socket, on_ready: Callable[[str], object] = lambda url: None
    ) -> int:
        """Serve until `stop` is called or the engine dies, and return the exit code.

        ``on_ready`` gets the server's URL when connections are accepted.
        """
        loop = asyncio.get_running_loop()
        self._is_ending = asyncio.Event()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.stop, signal.Signals(number).name)
        try:
            return await self._run(listener, on_ready)
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    async def _run(self, listener: socket.socket, on_ready: Callable[[str], object]) -> int:
        assert self._is_ending is not None
        if isinstance(listener, Listener):
            listener.watch(asyncio.get_running_loop())
        for line in await self._edge.summary():
            self._say(line)
        listen(listener)
        serving = asyncio.ensure_future(self._uvicorn.serve([listener]))
        started = asyncio.ensure_future(self._uvicorn.is_started.wait())
        await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        if not serving.done():
            url = url_of(listener, self._config)
            self._say(f"listening on {url}")
            on_ready(url)
        ending = asyncio.ensure_future(self._is_ending.wait())
        watching = asyncio.ensure_future(self._edge.watch())
        await asyncio.wait((serving, ending, watching), return_when=asyncio.FIRST_COMPLETED)
        was_asked = ending.done()
        if was_asked:
            await self._edge.drain()
        has_failed = not was_asked or self._edge.dead_error is not None
        if has_failed:
            logger.critical("the server ends: %s", self._edge.dead_error or "it did not start")
            await self._edge.flush()
        elif not await self._edge.end_engine():
            logger.critical("the engine hangs in a step: the server ends without it")
            os._exit(1)
        ending.cancel()
        watching.cancel()
        self._uvicorn.should_exit = True
        await asyncio.wait((serving,), timeout=HANG_UP_SECONDS)
        self._uvicorn.hang_up()
        await serving
        return int(has_failed)

    @property
    def is_ending(self) -> bool:
        """Whether the server takes no new requests."""
        return self._is_ending is not None and self._is_ending.is_set()

    def stop(self, why: str = "stop") -> None:
        """End the server: running requests first get their time. The second call ends at once."""
        assert self._is_ending is not None, "it does not run"
        if not self.is_ending:
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
        os._exit(EXIT_AT_ONCE)

    def _say(self, line: str) -> None:
        """Notify the person, or the machine, that started the server."""
        if self._config.log_format == "json":
            logger.info("%s", line)
        else:
            print(f"[{escaped(line)}]", file=sys.stderr, flush=True)


async def serve_app(
    app: Starlette, config: ServeConfig, listener: socket.socket, title: str
) -> None:
    """Serve an application without an engine of its own until a signal, and wait for requests."""
    raise_open_files()
    if isinstance(listener, Listener):
        listener.watch(asyncio.get_running_loop())
    server = Uvicorn(uvicorn_config(app, config))
    server.config.timeout_graceful_shutdown = int(config.shutdown_timeout)

    def stop() -> None:
        if server.should_exit:
            os._exit(EXIT_AT_ONCE)
        server.should_exit = True

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop)
    listen(listener)
    print(f"[{title}]\n[listening on {url_of(listener, config)}]", file=sys.stderr, flush=True)
    await server.serve([listener])


class Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers, and with an event for its start."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_started = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `Server`."""
        yield

    def hang_up(self) -> None:
        """Cut the connections that are left, as if their clients had left."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and set the event."""
        await super().startup(sockets=sockets)
        self.is_started.set()


def check_sockets(config: ServeConfig) -> None:
    """Raise `ConfigError` unless the options of sockets fit together and certificates load."""
    for name in ("keys", "admin_keys"):
        if not isinstance(getattr(config, name), (Keys, type(None))):
            raise ConfigError(f"{name} must be a Keys (Keys.of(['KEY', …]) makes one)")
    if config.keys is not None and config.admin_keys is not None:
        for name in config.keys.names & config.admin_keys.names:
            raise ConfigError(f"the name {name!r} is the admin key's; give the client's another")
    root = config.root_path
    if root and (not root.startswith("/") or root.endswith("/")):
        raise ConfigError(f"root_path must be like '/llm', with no slash at its end; got {root!r}")
    if (config.ssl_keyfile is None) != (config.ssl_certfile is None):
        raise ConfigError("ssl_keyfile and ssl_certfile belong together; give both, or none")
    if config.ssl_certfile is None:
        if config.ssl_ca_certs is not None:
            raise ConfigError("ssl_ca_certs needs ssl_certfile and ssl_keyfile")
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        if config.ssl_ca_certs is not None:
            context.load_verify_locations(config.ssl_ca_certs)
    except (OSError, ssl.SSLError) as error:
        files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)
        raise ConfigError(
            f"TLS cannot use {', '.join(filter(None, files))}: {error} (give PEM files)"
        ) from error


def uvicorn_config(app: Starlette, config: ServeConfig) -> uvicorn.Config:
    """Return how uvicorn serves an application."""
    return uvicorn.Config(
        app,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED,
        http=LimitedProtocol,
        backlog=BACKLOG,
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=65,
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
    )


@contextmanager
def bound(config: ServeConfig) -> Iterator[Listener]:
    """Return a socket that has the server's address, and does not listen yet.

    Raises:
        ConfigError: the address is taken, or not one of this machine.
    """
    if config.uds is None:
        listener = _bound_to_port(config.host, config.port)
    else:
        listener = _bound_to_path(config.uds)
    listener.is_encrypted = config.ssl_certfile is not None
    try:
        with listener:
            yield listener
    finally:
        if config.uds is not None:
            Path(config.uds).unlink(missing_ok=True)


def _bound_to_port(host: str, port: int) -> Listener:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Without the protocol, asyncio does not see a TCP socket, and leaves Nagle's algorithm on.
        # The body of an answer then waits 40 ms for the client to acknowledge the head.
        listener = Listener(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error} (choose another "
            "--host or --port)"
        ) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Listen on a socket of `bound`, or raise `ConfigError`."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:  # another process has bound the address as well
        address = listener.getsockname()
        raise ConfigError(f"cannot listen on {address}: {error.strerror}") from error


def _bound_to_path(path: str) -> Listener:
    """Take a Unix socket for this user and group. A socket without a server is replaced."""
    listener = Listener(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.stat(path).st_mode) and not _is_served(path):
                os.unlink(path)
        listener.bind(path)
        os.chmod(path, 0o660)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on the Unix socket {path}: {error.strerror or error} (choose another "
            "--uds)"
        ) from error
    return listener


def _is_served(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        try:
            client.connect(path)
        except OSError:
            return False
    return True


def url_of(listener: socket.socket, config: ServeConfig) -> str:
    """Return where clients find the server."""
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds is not None:
        return f"unix:{config.uds}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}{config.root_path}"
