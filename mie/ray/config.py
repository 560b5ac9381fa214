"""`ReplicaConfig`: the number of replicas, the settings of each, and their router."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from mie.config.engine import check_integer, check_real, keyword_checked
from mie.config.engine_args import EngineArgs
from mie.config.settings import ON_CPU_THREADS
from mie.serve.config import ServeConfig
from mie.serve.keys import Keys

ROUTERS: Mapping[str, str] = MappingProxyType(
    {
        "prefix": "mie.ray.router.PrefixRequestRouter",
        "random": "mie.ray.router.RandomRequestRouter",
        "ray-pow2": "ray.serve._private.request_router.PowerOfTwoChoicesRequestRouter",
        "ray-prefix": "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router"
        ".PrefixCacheAffinityRouter",
    }
)
"""The routers by name. Any other name is the import path of a `ray.serve` request router."""

MAX_CHUNKS_PER_SECOND = 500.0
"""The default of ``max_chunks_per_second`` in a replica. Ray takes about 1 ms for each chunk."""


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """The replicas of a model behind one address."""

    engine: Mapping[str, Any] = field(default_factory=lambda: {"model": "bundled"})
    """The arguments of each replica's `AsyncLLM`."""
    server: ServeConfig = field(
        default_factory=lambda: ServeConfig(max_chunks_per_second=MAX_CHUNKS_PER_SECOND)
    )
    """The options of each replica's server."""
    num_replicas: int = 1
    num_cpus: float = 1
    """CPUs of a replica. On a CPU it computes with as many threads."""
    num_gpus: float = 0
    request_router: str = "prefix"
    router_settings: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the router, such as ``{"prefix_bytes": 4096}``."""
    autoscaling: Mapping[str, Any] | None = None
    """Ray Serve's ``autoscaling_config``. It takes the place of ``num_replicas``."""

    def __post_init__(self) -> None:
        check_integer("num_replicas", self.num_replicas, 1)
        check_real("num_cpus", self.num_cpus, 0)
        check_real("num_gpus", self.num_gpus, 0)
        EngineArgs(**self.engine_settings)  # refuses bad values before anything is started

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ReplicaConfig:
        """Return a config from plain data: these fields, and `ServeConfig`'s in "server".

        There, ``keys`` and ``admin_keys`` are lists of keys, or files as `Keys.of` reads them.

        Raises:
            ConfigError: a setting is unknown, or out of range.
        """
        server = {"max_chunks_per_second": MAX_CHUNKS_PER_SECOND, **values.get("server", {})}
        for name in {"keys", "admin_keys"} & server.keys():
            given = server[name]
            server[name] = Keys.of([], given) if isinstance(given, str) else Keys.of(given)
        return cls(**{**values, "server": ServeConfig(**server)})

    @property
    def engine_settings(self) -> dict[str, Any]:
        """The arguments of an engine on the CPUs that Ray gives it."""
        if self.engine.get("backend", "auto") not in ON_CPU_THREADS:
            return dict(self.engine)
        return {"num_threads": max(1, int(self.num_cpus)), **self.engine}
