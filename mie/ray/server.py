"""``mie serve --replicas``: a front in this process, and its replicas on Ray."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from mie.errors import ConfigError, EngineDeadError
from mie.ray.app import build_replicas
from mie.ray.config import ReplicaConfig
from mie.ray.front import front_app
from mie.serve.access_log import logging_as
from mie.serve.server import (
    EXIT_AT_ONCE,
    SIGNALS,
    Uvicorn,
    bound,
    check_sockets,
    listen,
    url_of,
    uvicorn_config,
)

APP = "mie"
"""The name of the application on the cluster."""


def serve_replicas(config: ReplicaConfig, address: str | None = None) -> int:
    """Start replicas, serve until a signal, and return the exit code 0.

    Without the ``address`` of a cluster, Ray runs on this machine, and ends with this process.

    Raises:
        ConfigError: the server cannot listen there, or the machine is too small.
        EngineDeadError: the replicas did not start.
    """
    check_sockets(config.server)
    with (
        bound(config.server) as listener,
        connected(address, config.num_replicas * config.num_cpus),
        replicas(config) as handle,
        logging_as(config.server.log_format),
    ):
        return asyncio.run(_Server(handle, config).run(listener))


@contextmanager
def connected(address: str | None, num_cpus: float) -> Iterator[None]:
    """Connect to a cluster, or run one on this machine that has that many CPUs.

    Raises:
        ConfigError: there is no cluster at the address, or this machine is too small.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address, include_dashboard=None if address else False, log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(f"there is no Ray cluster at {address}: {error}") from error
    try:
        has_cpus = ray.cluster_resources().get("CPU", 0)
        if address is None and num_cpus > has_cpus:
            raise ConfigError(
                f"the replicas need {num_cpus:g} CPUs, and this machine has {has_cpus:g} (start "
                "fewer, lower --replica-cpus, or give the --ray-address of a cluster)"
            )
        yield
    finally:
        ray.shutdown()


@contextmanager
def replicas(config: ReplicaConfig) -> Iterator[DeploymentHandle]:
    """Run the replicas of a model, and return the handle that reaches them.

    Raises:
        ConfigError: the cluster serves them already.
        EngineDeadError: they did not start.
    """
    serve.start(proxy_location="Disabled")
    if APP in serve.status().applications:
        raise ConfigError(
            f"the cluster serves an application named {APP!r} already (end that mie serve, or run: "
            "serve shutdown)"
        )
    try:
        try:
            handle = serve.run(build_replicas(config), name=APP, route_prefix=None)
        except RuntimeError as error:
            raise EngineDeadError(f"the replicas did not start: {error}") from error
        yield handle
    finally:
        serve.delete(APP)


class _Server:
    """The front under uvicorn."""

    def __init__(self, handle: DeploymentHandle, config: ReplicaConfig) -> None:
        self._config = config
        self._uvicorn = Uvicorn(uvicorn_config(front_app(handle, config.server), config.server))
        # Uvicorn waits as long for requests that run when it is told to end.
        self._uvicorn.config.timeout_graceful_shutdown = int(config.server.shutdown_timeout)

    async def run(self, listener: socket) -> int:
        """Serve until a signal, and let the requests that run end."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._stop)
        listen(listener)
        serving = asyncio.ensure_future(self._uvicorn.serve([listener]))
        started = asyncio.ensure_future(self._uvicorn.is_started.wait())
        await asyncio.wait((serving, started), return_when=asyncio.FIRST_COMPLETED)
        started.cancel()
        model, url = (
            self._config.engine.get("model", "bundled"),
            url_of(listener, self._config.server),
        )
        print(f"[replicas of {model} on Ray]\n[listening on {url}]", file=sys.stderr, flush=True)
        await serving
        return 0

    def _stop(self) -> None:
        if self._uvicorn.should_exit:
            os._exit(EXIT_AT_ONCE)
        self._uvicorn.should_exit = True
