"""Simulate clusters of several sizes under a load that grows with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mie.config.engine import EngineConfig, check_integer
from mie.routing import PrefixRouter, RandomRouter, Router
from mie.sim.cluster import run_cluster
from mie.sim.devices import find_device
from mie.sim.loads import skewed_prefixes
from mie.sim.shapes import find_shape
from mie.sim.simulated import simulated_on
from mie.sim.workload import Text, Workload

ROUTERS: Mapping[str, Callable[[], Router]] = MappingProxyType(
    {"prefix": PrefixRouter, "random": RandomRouter}
)
"""What a cluster can be simulated with. Both are those of `mie.ray`."""


@dataclass(frozen=True, kw_only=True)
class ClusterLoad:
    """What each replica is, and what it gets in the mean."""

    device: str = "a10g"
    model_shape: str = "Llama-3.1-8B"
    requests_per_replica: int = 40
    rate_per_replica: float = 4.0
    num_prefixes: int = 1000
    exponent: float = 1.0
    prefix_len: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("requests_per_replica", self.requests_per_replica, 1)

    def workload(self, num_replicas: int) -> Workload:
        """Return the load of a cluster of that size.

        Raises:
            ConfigError: a number is out of range.
        """
        check_integer("num_replicas", num_replicas, 1)
        return skewed_prefixes(
            num_requests=self.requests_per_replica * num_replicas,
            num_prefixes=self.num_prefixes,
            exponent=self.exponent,
            prefix_len=self.prefix_len,
            request_rate=self.rate_per_replica * num_replicas,
            seed=self.seed,
        )


def simulate_cluster(load: ClusterLoad, num_replicas: int, router: str) -> dict[str, Any]:
    """Return the figures of one cluster, for JSON and for `table_row`.

    Raises:
        ConfigError: a name is unknown, or a number is out of range.
    """
    workload = load.workload(num_replicas)
    device, shape = find_device(load.device), find_shape(load.model_shape)
    config = EngineConfig(event_log_steps=0)
    benches = {f"{i}": simulated_on(device, shape, config) for i in range(num_replicas)}
    result = run_cluster(benches, ROUTERS[router](), workload)
    mean_ttft, p99_ttft = result.ttft_ms
    return {
        "num_replicas": num_replicas,
        "router": router,
        "possible_hit_rate": round(_possible_hit_rate(workload), 4),
        "hit_rate": round(result.hit_rate, 4),
        "imbalance": round(result.imbalance, 3),
        "mean_ttft_ms": round(mean_ttft, 1),
        "p99_ttft_ms": round(p99_ttft, 1),
    }


def _possible_hit_rate(workload: Workload) -> float:
    """Return the hit rate of a single cache without limits: every prefix is computed once."""
    seen: set[int] = set()
    num_tokens = num_hits = 0
    for request in workload.requests:
        prefix, own = request.prompt
        assert isinstance(prefix, Text)
        assert isinstance(own, Text)
        num_tokens += prefix.length + own.length
        num_hits += prefix.length if prefix.text in seen else 0
        seen.add(prefix.text)
    return num_hits / num_tokens
