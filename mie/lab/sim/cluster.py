"""Simulate replicas behind a router, under a load that grows with their number."""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from mie.config.engine import EngineConfig, check_integer
from mie.errors import ConfigError
from mie.frontend.routing import PrefixRouter, RandomRouter, Router, beginning_of
from mie.lab.loads import skewed_prefixes
from mie.lab.metrics import RequestRecord, mean_and_std, percentile
from mie.lab.sim.costs import MILLISECOND
from mie.lab.sim.devices import find_device, find_shape
from mie.lab.sim.driver import Bench, params_of
from mie.lab.sim.simulated import simulated_on
from mie.lab.workload import Text, Workload, WorkloadRequest
from mie.sched.sequence import Request


@dataclass(frozen=True, kw_only=True)
class ClusterResult:
    """The results of a run: a record for each request, in order of arrival."""

    records: list[RequestRecord]
    num_tokens: Mapping[str, int]
    """Number of tokens that each replica computed, of prompts and of answers."""

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens that were found in a prefix cache."""
        num_prompt = sum(record.num_prompt for record in self.records)
        return sum(record.num_cached for record in self.records) / num_prompt

    @property
    def imbalance(self) -> float:
        """The tokens that the busiest replica computed, divided by the mean."""
        return max(self.num_tokens.values()) * len(self.num_tokens) / sum(self.num_tokens.values())

    @property
    def ttft_ms(self) -> tuple[float, float]:
        """The mean and the 99th percentile of the time to the first token."""
        times = [record.ttft or 0 for record in self.records]
        return mean_and_std(times)[0] / MILLISECOND, percentile(times, 99) / MILLISECOND


def run_cluster(benches: Mapping[str, Bench], router: Router, workload: Workload) -> ClusterResult:
    """Route every request at its time, and step each engine whenever it has work.

    The router gets the requests of each replica that have not ended by then. Routing takes no
    simulated time.

    Raises:
        ConfigError: a request depends on another, or has several choices.
    """
    for request in workload.requests:
        if request.after is not None or request.n > 1:
            raise ConfigError(
                f"request {request.request_id!r} is after another or has n > 1; a simulated "
                "cluster takes independent requests (use a workload such as skewed-prefixes)"
            )
    cluster = _Cluster(benches, router)
    for request in sorted(workload.requests, key=lambda request: request.arrival_ns):
        cluster.advance(request.arrival_ns)
        cluster.send(request)
    cluster.advance(None)
    return ClusterResult(records=list(cluster.records.values()), num_tokens=cluster.num_tokens)


class _Cluster:
    """The engines, the ends of the steps that they compute, and the records."""

    def __init__(self, benches: Mapping[str, Bench], router: Router) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.num_tokens = dict.fromkeys(benches, 0)
        self._benches = benches
        self._router = router
        self._loads = dict.fromkeys(benches, 0)
        self._requests: dict[str, Request] = {}
        # Steps in progress, a heap by their end.
        self._ends: list[tuple[int, str, tuple[str, ...]]] = []
        self._stepping: set[str] = set()

    def advance(self, until: int | None) -> None:
        """End the steps that end by then, and begin the next steps."""
        while self._ends and (until is None or self._ends[0][0] <= until):
            now, name, request_ids = heapq.heappop(self._ends)
            self._stepping.remove(name)
            for request_id in request_ids:
                self._note(request_id, name, now)
            if self._benches[name].engine.has_work:
                self._step(name)

    def send(self, request: WorkloadRequest) -> None:
        """Route a request that arrives now."""
        vocab_size = next(iter(self._benches.values())).vocab_size
        prompt = request.token_ids(vocab_size, {})
        key = self._router.key(beginning_of({"prompt": prompt}), request.cache_salt or "")
        name = self._router.choose(key, self._loads)
        self.records[request.request_id] = RequestRecord(
            request_id=request.request_id,
            num_prompt=len(prompt),
            arrival_ns=request.arrival_ns,
            token_ns=[[]],
        )
        self._requests[request.request_id] = self._benches[name].engine.add_request(
            prompt, params_of(request), request.request_id, cache_salt=request.cache_salt
        )
        self._loads[name] += 1
        if name not in self._stepping:
            self._benches[name].clock.wait_until(request.arrival_ns)
            self._step(name)

    def _step(self, name: str) -> None:
        """Compute a step. The tokens are known when it ends."""
        bench = self._benches[name]
        request_ids = bench.engine.step().request_ids
        self._stepping.add(name)
        heapq.heappush(self._ends, (bench.clock.now_ns(), name, request_ids))

    def _note(self, request_id: str, name: str, now: int) -> None:
        """Record the new token of a request, and its end."""
        record, request = self.records[request_id], self._requests[request_id]
        record.token_ns[0].append(now)
        if request.is_finished:
            del self._requests[request_id]
            record.num_cached = request.metrics.num_cached_tokens
            self.num_tokens[name] += record.num_prompt - record.num_cached + record.num_output
            self._loads[name] -= 1


ROUTERS: Mapping[str, Callable[[], Router]] = MappingProxyType(
    {"prefix": PrefixRouter, "random": RandomRouter}
)
"""The routers of a simulated cluster. `mie.ray` uses both."""


@dataclass(frozen=True, kw_only=True)
class ClusterLoad:
    """The device and model of each replica, and its mean load."""

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
