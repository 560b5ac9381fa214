"""The engine's counters, gauges and histograms under vLLM's names, as plain data.

Almost nothing is counted while the engine runs. A request that ends leaves a record, and what a
running request has given is read from it. So an exception at any line counts nothing twice, and
every request ends in exactly one ``finished_reason``.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from typing import NamedTuple

from mie.config.engine import EngineConfig
from mie.engine.step import EngineStats
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import Request
from mie.stats.request import RequestMetrics

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

REASONS = ("stop", "length", "abort", "error")
MOST_RECORDS = 1024
"""Records of ended requests that are kept before they are added up."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A number with a name; the same name may occur with several sets of labels."""

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
    """Upper limit -> number of observations up to it; the last limit is "+Inf"."""


class Tally:
    """The observations of one histogram."""

    def __init__(self, limits: Sequence[float]) -> None:
        self._limits = limits
        self._counts = [0] * (len(limits) + 1)
        self._sum = 0.0

    def observe(self, value: float | None) -> None:
        """Count a value; ignore None, of what has not happened."""
        if value is not None:
            self._counts[bisect_left(self._limits, value)] += 1
            self._sum += value

    def read(self, name: str, labels: Mapping[str, str]) -> Histogram:
        """Return the observations as Prometheus gives them, each bucket with those below it."""
        counts = list(accumulate(self._counts))
        limits = [*map(str, self._limits), "+Inf"]
        buckets = dict(zip(limits, counts, strict=True))
        return Histogram(name=name, labels=labels, count=counts[-1], sum=self._sum, buckets=buckets)


class _Record(NamedTuple):
    """What a request has given so far."""

    reason: str | None
    num_prompt: int
    num_generated: list[int]
    """For each choice."""
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
    """Why a request has ended, whose choices may have ended for different reasons."""
    if not request.is_finished:
        return None
    found = {seq.finish_reason for seq in request.sequences}
    return next(reason for reason in reversed(REASONS) if reason in found)


class _Totals:
    """What all requests gave together."""

    def __init__(self, max_model_len: int) -> None:
        tokens = _one_two_five(max_model_len)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self.num_ended = dict.fromkeys(REASONS, 0)
        self.histograms = {
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
        }

    def with_records(self, records: Iterable[_Record]) -> _Totals:
        """Return these totals and those of ``records`` together."""
        totals = copy.deepcopy(self)
        for record in records:
            totals._add(record)
        return totals

    def _add(self, record: _Record) -> None:
        times = record.times
        if any(record.num_generated):  # the prompt is computed
            self.num_prompt_tokens += record.num_prompt
            self.num_cached_tokens += times.num_cached_tokens
        self.num_generated_tokens += sum(record.num_generated)
        self.histograms["time_to_first_token_seconds"].observe(times.time_to_first_token)
        if record.reason is not None:
            self.num_ended[record.reason] += 1
            for name, value in _observations(record).items():
                self.histograms[name].observe(value)


def _observations(record: _Record) -> dict[str, float | None]:
    """What is observed of a request once, when it ends."""
    times, longest = record.times, max(record.num_generated)
    prefill, decode = times.prefill_time, times.decode_time
    gap = decode / (longest - 1) if decode is not None and longest > 1 else None
    return {
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
    }


def _one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, … as far as ``largest``."""
    series = (float(digit * 10**power) for power in range(19) for digit in (1, 2, 5))
    return tuple(takewhile(lambda limit: limit <= largest, series))


class EngineMetrics:
    """What an engine has done. One thread at a time may call it."""

    def __init__(self, max_model_len: int) -> None:
        self._step_tokens = Tally(STEP_TOKENS)
        self._gaps = Tally(TOKEN_TIMES)
        # One tuple, so that adding the records up is a single change.
        self._ended: tuple[_Totals, dict[int, _Record]] = (_Totals(max_model_len), {})

    def add_step(self, num_tokens: int, gaps: Iterable[float]) -> None:
        """Count a step: the tokens it computed, and the seconds since each choice's last token."""
        self._step_tokens.observe(num_tokens)
        for gap in gaps:
            self._gaps.observe(gap)

    def end(self, request: Request) -> None:
        """Note that a request has ended. Noting it again changes nothing."""
        totals, records = self._ended
        if len(records) >= MOST_RECORDS:
            self._ended = (totals.with_records(records.values()), {})
        self._ended[1][request.number] = _record(request)

    def read(
        self,
        model_name: str,
        config: EngineConfig,
        scheduler: Scheduler,
        stats: EngineStats,
        running: Iterable[Request],
    ) -> list[Metric]:
        """Return everything; ``running`` are the requests that have not ended."""
        base, records = self._ended
        totals = base.with_records([*records.values(), *map(_record, running)])
        labels = {"model_name": model_name, "engine": "0"}
        manager, memory = scheduler.manager, stats.memory
        gauges: dict[str, float] = {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting),
            "kv_cache_usage_perc": manager.num_used / manager.num_blocks,
        }
        counters = {
            "prefix_cache_queries": memory.num_queried_tokens,
            "prefix_cache_hits": memory.num_hit_tokens + memory.num_partial_hit_tokens,
            "num_preemptions": stats.num_preemptions,
            "prompt_tokens": totals.num_prompt_tokens,
            "prompt_tokens_cached": totals.num_cached_tokens,
            "generation_tokens": totals.num_generated_tokens,
        }
        histograms = {
            **totals.histograms,
            "iteration_tokens_total": self._step_tokens,
            "inter_token_latency_seconds": self._gaps,
        }
        return [
            *(Gauge(name=f"vllm:{n}", labels=labels, value=v) for n, v in gauges.items()),
            *(Counter(name=f"vllm:{n}", labels=labels, value=v) for n, v in counters.items()),
            *(
                Counter(
                    name="vllm:request_success",
                    labels={**labels, "finished_reason": reason},
                    value=count,
                )
                for reason, count in totals.num_ended.items()
            ),
            *(tally.read(f"vllm:{name}", labels) for name, tally in histograms.items()),
            Gauge(
                name="vllm:cache_config_info",
                labels={
                    "engine": "0",
                    "block_size": str(config.block_size),
                    "cache_dtype": str(config.kv_cache_dtype),
                    "enable_prefix_caching": str(config.enable_prefix_caching),
                    "num_gpu_blocks": str(manager.num_blocks),
                },
                value=1.0,
            ),
        ]
