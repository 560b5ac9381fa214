"""Replicas on Ray Serve, with a front for Ray's own proxies or in this process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing, contextmanager
from typing import Any, cast

import ray
from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.types import Message

from mie.errors import ConfigError, EngineDeadError
from mie.frontend.async_llm import AsyncLLM
from mie.ray.config import ROUTERS, ReplicaConfig
from mie.ray.front import Batches, Call, ReplicaAnswer, front_app, piped
from mie.serve.access_log import logging_as
from mie.serve.app import create_app, summary
from mie.serve.config import ServeConfig
from mie.serve.server import bound, check_sockets, serve_app

MAX_ONGOING = 10_000
"""Requests that Ray hands to a replica at once. The server's own limits are lower."""
HEALTH_SECONDS = 2.0
"""Time between two looks at a replica's engine."""
ANSWER_SECONDS = 10.0
"""Seconds that replicas have to answer a question to all of them."""


class RayReplicas:
    """The replicas of a deployment, behind its handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def stream(self, call: Call) -> Batches:
        """Return the answer of the replica that the handle's router chooses."""
        streaming = self._handle.options(method_name="stream", stream=True)
        return cast(Batches, streaming.remote(call))

    async def ask_all(self, call: Call) -> list[ReplicaAnswer]:
        """Return the answers of those replicas that answer in time."""
        asked = self._handle.broadcast("answer", call)
        results = await asked.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)
        return [result for result in results if isinstance(result, ReplicaAnswer)]


def build_openai_app(config: ReplicaConfig | Mapping[str, Any]) -> Application:
    """Return replicas of the server behind Ray's HTTP proxies, for `ray.serve.run`.

    A mapping is as `ReplicaConfig.of` takes it, such as the ``args`` of a Serve config file.

    Raises:
        ConfigError: a setting is unknown, or out of range.
    """
    if isinstance(config, Mapping):
        config = ReplicaConfig.of(config)
    front = serve.deployment(
        serve.ingress()(_Ingress),
        name="Front",
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=config.server.shutdown_timeout,
    )
    return front.bind(build_replicas(config), config.server)


def build_replicas(config: ReplicaConfig) -> Application:
    """Return the replicas alone, for a front that calls their handle."""
    number: dict[str, Any] = {"num_replicas": config.num_replicas}
    if config.autoscaling is not None:
        number = {"autoscaling_config": dict(config.autoscaling)}
    deployment = serve.deployment(
        Replica,
        name="Replica",
        ray_actor_options={"num_cpus": config.num_cpus, "num_gpus": config.num_gpus},
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=config.server.shutdown_timeout,
        request_router_config=RequestRouterConfig(
            request_router_class=ROUTERS.get(config.request_router, config.request_router),
            request_router_kwargs=dict(config.router_settings),
        ),
        **number,
    )
    # Replicas are restarted if their arguments change, so the number of replicas is not among them.
    return deployment.bind(config.engine_settings, config.server)


class _Ingress:
    """A front in a replica."""

    def __init__(self, handle: DeploymentHandle, config: ServeConfig) -> None:
        self._handle = handle
        self._config = config
        self._logging = logging_as(config.log_format)
        self._logging.__enter__()  # Ray ends the process

    def __serve_build_asgi_app__(self) -> Starlette:
        return front_app(RayReplicas(self._handle), self._config)


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
