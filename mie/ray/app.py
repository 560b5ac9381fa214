"""The deployments of Ray Serve: replicas, and a front for Ray's own proxies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from mie.ray.config import ROUTERS, ReplicaConfig
from mie.ray.front.app import Batches, front_app
from mie.ray.front.call import Call, ReplicaAnswer
from mie.ray.replica import Replica
from mie.serve.access_log import logging_as
from mie.serve.config import ServeConfig

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
    # Replicas are restarted if their arguments change, so these do not say how many there are.
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
