"""``mie serve --replicas``: a front in this process, and its replicas on Ray."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from mie.errors import ConfigError, EngineDeadError
from mie.ray.app import RayReplicas, build_replicas
from mie.ray.config import ReplicaConfig
from mie.ray.front import front_app
from mie.serve.access_log import logging_as
from mie.serve.server import bound, check_sockets, serve_app

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
        title = f"replicas of {config.engine.get('model', 'bundled')} on Ray"
        app = front_app(RayReplicas(handle), config.server)
        asyncio.run(serve_app(app, config.server, listener, title))
    return 0


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
