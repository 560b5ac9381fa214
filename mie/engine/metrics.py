"""Return the engine's counters, gauges and histograms under vLLM's names, as plain data.

Almost nothing is counted while the engine runs. A request that ends leaves a record, and the
numbers of a running request are read from the request itself. So an exception at any line counts
nothing twice, and every request ends with exactly one ``finished_reason``.

The engine's thread only takes a `Snapshot`, which another thread adds up.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import NamedTuple

from mie.config.engine import EngineConfig
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import Request
from mie.stats.request import RequestMetrics
from mie.stats.step import EngineStats, StepStats

# fmt: off
LATENCIES = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)
FIRST_TOKEN_TIMES = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
TOKEN_TIMES = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)
# fmt: on
STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
FINE_TIMES = (
    *(float(f"{digit}e{power}") for power in range(-6, 1) for digit in (1, 2, 5)),
    10.0,
)
"""Limits of latencies from 1 µs to 10 s. vLLM's lowest is too long for small models."""
PHASES = ("schedule", "run", "update")

REASONS = ("stop", "length", "abort", "error")
MOST_RECORDS = 64
"""Maximum number of records of ended requests before they are added up, which delays a step."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number with a name. Several metrics may share a name and differ in labels."""

    name: str
    labels: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass(frozen=True, kw_only=True)
class Vector(Metric):
    """Counts in an order."""

    values: list[int]


@dataclass(frozen=True, kw_only=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclass(frozen=True, kw_only=True)
class Histogram(Metric):
    """Observations by size."""

    count: int
    sum: float
    buckets: Mapping[str, int]
    """Maps an upper limit to the number of observations up to it. The last limit is "+Inf"."""


class Tally:
    """The observations of one histogram."""

    def __init__(self, limits: Sequence[float]) -> None:
        self._limits = limits
        self._counts = [0] * (len(limits) + 1)
        self._sum = 0.0

    def observe(self, value: float | None) -> None:
        """Count a value. None, for an event that has not happened, is ignored."""
        if value is not None:
            self._counts[bisect_left(self._limits, value)] += 1
            self._sum += value

    def copy(self) -> Tally:
        """Return the observations so far."""
        tally = Tally(self._limits)
        tally._counts, tally._sum = self._counts.copy(), self._sum
        return tally

    def read(self, name: str, labels: Mapping[str, str]) -> Histogram:
        """Return the observations as in Prometheus: each bucket includes those below it."""
        counts = list(accumulate(self._counts))
        limits = [*map(str, self._limits), "+Inf"]
        buckets = dict(zip(limits, counts, strict=True))
        return Histogram(name=name, labels=labels, count=counts[-1], sum=self._sum, buckets=buckets)


class _Record(NamedTuple):
    """The numbers of a request so far."""

    reason: str | None
    num_prompt: int
    num_generated: list[int]
    """One for each choice."""
    max_tokens: int | None
    times: RequestMetrics


def _record(request: Request) -> _Record:
    return _Record(
        _reason(request),
        request.num_prompt,
        [seq.num_generated for seq in request.sequences],
        request.params.max_tokens,
        request.metrics,
    )


def _reason(request: Request) -> str | None:
    """Return one reason for a request's end. Its choices may have ended for different reasons."""
    if not request.is_finished:
        return None
    found = {seq.finish_reason for seq in request.sequences}
    return next(reason for reason in reversed(REASONS) if reason in found)


class _Totals:
    """The sums over all requests."""

    def __init__(self, max_model_len: int) -> None:
        tokens = _one_two_five(max_model_len)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_recomputed_tokens = 0
        self.num_forced_tokens = 0
        self.num_ended = dict.fromkeys(REASONS, 0)
        self.histograms = {
            "request_latency_seconds": Tally(FINE_TIMES),
            "time_to_first_token_seconds": Tally(FIRST_TOKEN_TIMES),
            "request_time_per_output_token_seconds": Tally(TOKEN_TIMES),
            "e2e_request_latency_seconds": Tally(LATENCIES),
            "request_queue_time_seconds": Tally(LATENCIES),
            "request_inference_time_seconds": Tally(LATENCIES),
            "request_prefill_time_seconds": Tally(LATENCIES),
            "request_decode_time_seconds": Tally(LATENCIES),
            "request_prompt_tokens": Tally(tokens),
            "request_generation_tokens": Tally(tokens),
            "request_max_num_generation_tokens": Tally(tokens),
            "request_params_n": Tally(CHOICES),
            "request_params_max_tokens": Tally(tokens),
            "request_num_preemptions": Tally(PREEMPTIONS),
            "request_prefill_kv_computed_tokens": Tally(tokens),
        }

    def with_records(self, records: Iterable[_Record]) -> _Totals:
        """Return the sum of these totals and ``records``."""
        totals = copy.copy(self)
        totals.num_ended = self.num_ended.copy()
        totals.histograms = {name: tally.copy() for name, tally in self.histograms.items()}
        for record in records:
            totals._add(record)
        return totals

    def _add(self, record: _Record) -> None:
        times = record.times
        if any(record.num_generated):  # the prompt is computed
            self.num_prompt_tokens += record.num_prompt
            self.num_cached_tokens += times.num_cached_tokens
        self.num_generated_tokens += sum(record.num_generated)
        self.num_recomputed_tokens += times.num_recomputed_tokens
        self.num_forced_tokens += times.num_forced_tokens
        self.histograms["time_to_first_token_seconds"].observe(times.time_to_first_token)
        if record.reason is not None:
            self.num_ended[record.reason] += 1
            for name, value in _observations(record).items():
                self.histograms[name].observe(value)


def _observations(record: _Record) -> dict[str, float | None]:
    """Return the observations of a request that has ended."""
    times, longest = record.times, max(record.num_generated)
    prefill, decode = times.prefill_time, times.decode_time
    gap = decode / (longest - 1) if decode is not None and longest > 1 else None
    return {
        "request_latency_seconds": times.total_time,
        "request_time_per_output_token_seconds": gap,
        "e2e_request_latency_seconds": times.total_time,
        "request_queue_time_seconds": times.queue_time,
        "request_inference_time_seconds": None if decode is None else (prefill or 0.0) + decode,
        "request_prefill_time_seconds": prefill,
        "request_decode_time_seconds": decode,
        "request_prompt_tokens": record.num_prompt,
        "request_generation_tokens": sum(record.num_generated),
        "request_max_num_generation_tokens": longest,
        "request_params_n": len(record.num_generated),
        "request_params_max_tokens": record.max_tokens,
        "request_num_preemptions": times.num_preemptions,
        "request_prefill_kv_computed_tokens": (
            record.num_prompt - times.num_cached_tokens if longest else None
        ),
    }


def _one_two_five(largest: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50, … up to ``largest``."""
    series = (float(digit * 10**power) for power in range(19) for digit in (1, 2, 5))
    return tuple(takewhile(lambda limit: limit <= largest, series))


class EngineMetrics:
    """The metrics of an engine. Only one thread at a time may call it."""

    def __init__(self, max_model_len: int) -> None:
        self.sizes: Mapping[str, int] = {}
        """Gauges that do not change: name -> bytes."""
        self._steps = {
            "iteration_tokens_total": Tally(STEP_TOKENS),
            "inter_token_latency_seconds": Tally(TOKEN_TIMES),
        }
        self._phases = {phase: Tally(FINE_TIMES) for phase in PHASES}
        self._rows = {kind: Tally(STEP_TOKENS) for kind in ("prefill", "decode")}
        # One tuple, so that adding the records up is a single change.
        self._ended: tuple[_Totals, dict[int, _Record]] = (_Totals(max_model_len), {})

    def add_step(self, stats: StepStats, gaps: Iterable[float]) -> None:
        """Count a step: what it computed, where its time went, and the seconds between tokens.

        ``gaps`` are those since the previous token of each choice that got one.
        """
        num_tokens = stats.num_prefill_tokens + stats.num_decode_tokens
        self._steps["iteration_tokens_total"].observe(num_tokens)
        observe = self._steps["inter_token_latency_seconds"].observe
        for gap in gaps:
            observe(gap)
        self._phases["schedule"].observe(stats.schedule_seconds)
        self._phases["run"].observe(stats.run_seconds)
        self._phases["update"].observe(stats.update_seconds)
        self._rows["prefill"].observe(stats.num_prefill_tokens)
        self._rows["decode"].observe(stats.num_decode_tokens)

    def end(self, request: Request) -> None:
        """Record that a request has ended. Recording it again changes nothing."""
        totals, records = self._ended
        if len(records) >= MOST_RECORDS:
            self._ended = (totals.with_records(records.values()), {})
        self._ended[1][request.number] = _record(request)

    def snapshot(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        stats: EngineStats,
        unfinished: Iterable[Request],
    ) -> Snapshot:
        """Return what was counted so far, to be read in any thread."""
        base, records = self._ended
        manager, memory = scheduler.manager, stats.memory
        num_cached, num_used = manager.num_cached, manager.num_used
        return Snapshot(
            base=base,
            # A request without a token has given nothing yet.
            records=[*records.values(), *(_record(r) for r in unfinished if r.leader is None)],
            gauges={
                "vllm:num_requests_running": len(scheduler.running),
                "vllm:num_requests_waiting": len(scheduler.waiting),
                "vllm:kv_cache_usage_perc": num_used / manager.num_blocks,
                **self.sizes,
            },
            counters={
                "vllm:prefix_cache_queries": memory.num_queried_tokens,
                "vllm:prefix_cache_hits": memory.num_hit_tokens + memory.num_partial_hit_tokens,
                "vllm:num_preemptions": stats.num_preemptions,
                "mie:cow_copies": memory.num_copies,
                "mie:blocks_evicted": memory.num_evictions,
                "mie:blocks_swapped_out": memory.num_exported,
                "mie:blocks_swapped_in": memory.num_imported,
            },
            blocks={
                "free": manager.num_blocks - num_used - num_cached,
                "cached": num_cached,
                "used": num_used,
                "shared": manager.num_saved,
            },
            steps={name: tally.copy() for name, tally in self._steps.items()},
            phases={phase: tally.copy() for phase, tally in self._phases.items()},
            rows={kind: tally.copy() for kind, tally in self._rows.items()},
            cache={
                "block_size": str(config.block_size),
                "cache_dtype": str(config.kv_cache_dtype),
                "enable_prefix_caching": str(config.enable_prefix_caching),
                "num_gpu_blocks": str(manager.num_blocks),
            },
        )


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What an engine had done at one moment. It does not change."""

    base: _Totals
    records: list[_Record]
    gauges: Mapping[str, float]
    counters: Mapping[str, int]
    blocks: Mapping[str, int]
    steps: Mapping[str, Tally]
    phases: Mapping[str, Tally]
    rows: Mapping[str, Tally]
    cache: Mapping[str, str]

    def read(self, model_name: str) -> list[Metric]:
        """Return everything under vLLM's names, and what only mie counts under ``mie:``."""
        totals = self.base.with_records(self.records)
        labels = {"model_name": model_name, "engine": "0"}
        num_prompt, num_cached = totals.num_prompt_tokens, totals.num_cached_tokens
        counters = {
            **self.counters,
            "vllm:prompt_tokens": num_prompt,
            "vllm:prompt_tokens_cached": num_cached,
            "vllm:generation_tokens": totals.num_generated_tokens,
            "mie:tokens_recomputed": totals.num_recomputed_tokens,
            "mie:tokens_forced": totals.num_forced_tokens,
        }
        num_waiting = self.gauges["vllm:num_requests_waiting"]
        waiting = {"capacity": num_waiting, "deferred": 0}
        sources = {"local_compute": num_prompt - num_cached, "local_cache_hit": num_cached}
        by_source = {**sources, "external_kv_transfer": 0}

        def gauges(name: str, label: str, values: Mapping[str, float]) -> list[Gauge]:
            return [
                Gauge(name=name, labels={**labels, label: key}, value=value)
                for key, value in values.items()
            ]

        def counts(name: str, label: str, values: Mapping[str, int]) -> list[Counter]:
            return [
                Counter(name=name, labels={**labels, label: key}, value=value)
                for key, value in values.items()
            ]

        def histograms(name: str, label: str, tallies: Mapping[str, Tally]) -> list[Histogram]:
            return [tally.read(name, {**labels, label: key}) for key, tally in tallies.items()]

        return [
            *(Gauge(name=name, labels=labels, value=v) for name, v in self.gauges.items()),
            *gauges("vllm:num_requests_waiting_by_reason", "reason", waiting),
            *gauges("mie:kv_blocks", "state", self.blocks),
            *(Counter(name=name, labels=labels, value=v) for name, v in counters.items()),
            *counts("vllm:prompt_tokens_by_source", "source", by_source),
            *counts("vllm:request_success", "finished_reason", totals.num_ended),
            *(
                tally.read(_full_name(name), labels)
                for name, tally in {**totals.histograms, **self.steps}.items()
            ),
            *histograms("mie:step_seconds", "phase", self.phases),
            *histograms("mie:batch_rows", "kind", self.rows),
            Gauge(name="vllm:cache_config_info", labels={**labels, **self.cache}, value=1.0),
        ]


def _full_name(name: str) -> str:
    return f"mie:{name}" if name == "request_latency_seconds" else f"vllm:{name}"
