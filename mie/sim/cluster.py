"""Send a workload to many simulated engines behind a router, and record what they did."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from mie.engine.step import SequenceOutput
from mie.errors import ConfigError
from mie.routing import Router, beginning_of
from mie.sim.clock import MILLISECOND
from mie.sim.driver import Bench, params_of
from mie.sim.metrics import RequestRecord, mean_and_std, percentile
from mie.sim.workload import Workload, WorkloadRequest


@dataclass(frozen=True, kw_only=True)
class ClusterResult:
    """The results of a run: a record for each request, in order of arrival."""

    records: list[RequestRecord]
    num_tokens: Mapping[str, int]
    """Tokens that each replica computed, those of prompts and those of answers."""

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

    The router knows the requests of each replica that have not ended by then. Routing takes no
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
    return ClusterResult(
        records=list(cluster.records.values()),
        num_tokens=cluster.num_tokens,
    )


class _Cluster:
    """The engines, the ends of the steps that they compute, and the records."""

    def __init__(self, benches: Mapping[str, Bench], router: Router) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.num_tokens = dict.fromkeys(benches, 0)
        self._benches = benches
        self._router = router
        self._loads = dict.fromkeys(benches, 0)
        self._ends: list[tuple[int, str, tuple[SequenceOutput, ...]]] = []  # a heap by time
        self._stepping: set[str] = set()

    def advance(self, until: int | None) -> None:
        """Let the steps end that end by then, and begin the next ones."""
        while self._ends and (until is None or self._ends[0][0] <= until):
            now, name, outputs = heapq.heappop(self._ends)
            self._stepping.remove(name)
            for output in outputs:
                self._note(output, name, now)
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
        self._benches[name].engine.add_request(
            prompt, params_of(request), request.request_id, cache_salt=request.cache_salt
        )
        self._loads[name] += 1
        if name not in self._stepping:
            self._benches[name].clock.wait_until(request.arrival_ns)
            self._step(name)

    def _step(self, name: str) -> None:
        """Compute a step, whose outputs are known when it ends."""
        bench = self._benches[name]
        outputs = bench.engine.step().outputs
        self._stepping.add(name)
        heapq.heappush(self._ends, (bench.clock.now_ns(), name, outputs))

    def _note(self, output: SequenceOutput, name: str, now: int) -> None:
        record = self.records[output.request_id]
        record.token_ns[0].append(now)
        if output.finish_reason is not None:
            record.num_cached = output.metrics.num_cached_tokens
            self.num_tokens[name] += record.num_prompt - record.num_cached + record.num_output
            self._loads[name] -= 1
