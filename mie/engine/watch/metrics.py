"""Return the engine's counters, gauges and histograms under vLLM's names, as plain data.

Almost nothing is counted while the engine runs. A request that ends leaves a record, and the
numbers of a running request are read from the request itself. So an exception at any line counts
nothing twice, and every request ends with exactly one ``finished_reason``.

The engine's thread only takes a `Snapshot`. Another thread adds it up. A number that cannot be
counted is left out, so that no request can end the engine by its numbers.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from mie.base.stats.departure import REASONS as DEPARTURES
from mie.base.stats.metric import Counter, Gauge, Metric, Tally
from mie.base.stats.request import RequestMetrics
from mie.base.stats.step import StepStats
from mie.engine.engine import Engine
from mie.memory.layers.states import States
from mie.memory.manager import KVCacheManager
from mie.sched.sequence import Request
from mie.sched.speculation import Speculation

logger = logging.getLogger(__name__)

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
FINE_TIMES = (*(float(f"{digit}e{power}") for power in range(-6, 1) for digit in (1, 2, 5)), 10.0)
"""Limits of latencies from 1 µs to 10 s. vLLM's lowest is too long for small models."""
PHASES = ("schedule", "run", "update")

REASONS = ("stop", "length", "abort", "error")
NO_DISK = MappingProxyType(
    {"vllm:external_prefix_cache_queries": 0, "vllm:external_prefix_cache_hits": 0}
)
"""The counters of an engine without a prefix cache on a disk."""
MOST_RECORDS = 64
"""Maximum number of records of ended requests before they are added up. The sum delays a step."""


class _Record(NamedTuple):
    """The numbers of a request so far."""

    reason: str | None
    num_prompt: int
    num_generated: list[int]
    """One for each choice."""
    max_tokens: int | None
    times: RequestMetrics

    @property
    def longest(self) -> int:
        """The number of tokens of the longest choice."""
        return max(self.num_generated)


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


def _time_per_token(record: _Record) -> float | None:
    decode = record.times.decode_time
    return None if decode is None or record.longest < 2 else decode / (record.longest - 1)


def _inference_time(record: _Record) -> float | None:
    decode = record.times.decode_time
    return None if decode is None else (record.times.prefill_time or 0.0) + decode


_COUNTS: Mapping[str, Callable[[_Record], int]] = MappingProxyType(
    {
        "vllm:prompt_tokens": lambda record: record.num_prompt if record.longest else 0,
        "vllm:prompt_tokens_cached": lambda record: (
            record.times.num_cached_tokens if record.longest else 0
        ),
        "mie:prompt_tokens_from_disk": lambda record: (
            min(record.times.num_disk_tokens, record.times.num_cached_tokens)
            if record.longest
            else 0
        ),
        "vllm:generation_tokens": lambda record: sum(record.num_generated),
        "mie:tokens_recomputed": lambda record: record.times.num_recomputed_tokens,
        "mie:tokens_forced": lambda record: record.times.num_forced_tokens,
    }
)
"""The counters that are sums over requests. A prompt counts once it is computed."""

FIRST_TOKEN = "vllm:time_to_first_token_seconds"
"""The histogram that observes a request before it ends."""

_Limited: TypeAlias = tuple[tuple[float, ...] | None, Callable[[_Record], float | None]]

_OF_A_REQUEST: Mapping[str, _Limited] = MappingProxyType(
    {
        "mie:request_latency_seconds": (FINE_TIMES, lambda record: record.times.total_time),
        FIRST_TOKEN: (FIRST_TOKEN_TIMES, lambda record: record.times.time_to_first_token),
        "vllm:request_time_per_output_token_seconds": (TOKEN_TIMES, _time_per_token),
        "vllm:e2e_request_latency_seconds": (LATENCIES, lambda record: record.times.total_time),
        "vllm:request_queue_time_seconds": (LATENCIES, lambda record: record.times.queue_time),
        "vllm:request_inference_time_seconds": (LATENCIES, _inference_time),
        "vllm:request_prefill_time_seconds": (LATENCIES, lambda record: record.times.prefill_time),
        "vllm:request_decode_time_seconds": (LATENCIES, lambda record: record.times.decode_time),
        "vllm:request_prompt_tokens": (None, lambda record: record.num_prompt),
        "vllm:request_generation_tokens": (None, lambda record: sum(record.num_generated)),
        "vllm:request_max_num_generation_tokens": (None, lambda record: record.longest),
        "vllm:request_params_n": (CHOICES, lambda record: len(record.num_generated)),
        "vllm:request_params_max_tokens": (None, lambda record: record.max_tokens),
        "vllm:request_num_preemptions": (PREEMPTIONS, lambda record: record.times.num_preemptions),
        "vllm:request_prefill_kv_computed_tokens": (
            None,
            lambda record: (
                record.num_prompt - record.times.num_cached_tokens if record.longest else None
            ),
        ),
    }
)
"""The limits of each histogram of requests, and the value of a request that has ended.

Limits of None are numbers of tokens up to the context.
"""


class _Losses:
    """The metrics that lack a number because of an error. The log names each of them once."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def count(self, name: str, add: Callable[[], object]) -> None:
        """Call a function that adds a number to a metric, and survive its errors."""
        try:
            add()
        except Exception as error:
            if name not in self._names:
                self._names.add(name)
                logger.error("%s lacks a number from now on: %r", name, error, exc_info=error)


class _Totals:
    """The sums over all requests."""

    def __init__(self, max_model_len: int, losses: _Losses) -> None:
        series = (float(digit * 10**power) for power in range(19) for digit in (1, 2, 5))
        tokens = tuple(takewhile(lambda limit: limit <= max_model_len, series))
        self._losses = losses
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.num_ended = dict.fromkeys(REASONS, 0)
        self.num_departed = dict.fromkeys(DEPARTURES, 0)
        self.histograms = {
            name: Tally(limits or tokens) for name, (limits, _) in _OF_A_REQUEST.items()
        }

    def with_records(self, records: Iterable[_Record]) -> _Totals:
        """Return the sum of these totals and ``records``."""
        totals = copy.copy(self)
        totals.counts, totals.num_ended = self.counts.copy(), self.num_ended.copy()
        totals.num_departed = self.num_departed.copy()
        totals.histograms = {name: tally.copy() for name, tally in self.histograms.items()}
        for record in records:
            totals._add(record)
        return totals

    def _add(self, record: _Record) -> None:
        for name in _COUNTS:
            self._losses.count(name, partial(self._count, name, record))
        if record.reason is not None:
            self.num_ended[record.reason] += 1
            if record.times.departure is not None:
                self.num_departed[record.times.departure.reason] += 1
        for name in _OF_A_REQUEST:
            if record.reason is not None or name == FIRST_TOKEN:
                self._losses.count(name, partial(self._observe, name, record))

    def _count(self, name: str, record: _Record) -> None:
        self.counts[name] += _COUNTS[name](record)

    def _observe(self, name: str, record: _Record) -> None:
        self.histograms[name].observe(_OF_A_REQUEST[name][1](record))


Labels = Mapping[str, str]


class EngineMetrics:
    """The metrics of an engine. Only one thread at a time may call it."""

    def __init__(
        self,
        max_model_len: int,
        sizes: Mapping[str, int] | None = None,
        disk_counters: Callable[[], Mapping[str, int]] = lambda: NO_DISK,
    ) -> None:
        """``disk_counters`` returns the counters of a prefix cache on a disk."""
        self.sizes = sizes or {}
        """Gauges that do not change: name -> bytes."""
        self._disk_counters = disk_counters
        self._losses = _Losses()
        self._step_tokens, self._token_gaps = Tally(STEP_TOKENS), Tally(TOKEN_TIMES)
        self._phases = {phase: Tally(FINE_TIMES) for phase in PHASES}
        self._rows = {kind: Tally(STEP_TOKENS) for kind in ("prefill", "decode")}
        # One tuple, so that adding the records up is a single change.
        self._ended: tuple[_Totals, dict[int, _Record]] = (_Totals(max_model_len, self._losses), {})

    def add_step(self, stats: StepStats, gaps: Iterable[float]) -> None:
        """Count a step: its tokens, the time of each phase, and the seconds between tokens.

        ``gaps`` are those since the previous token of each choice that got one.
        """
        # Choices that also got their previous tokens in one step have equal gaps.
        for gap, count in Counts(gaps).items():
            name = "vllm:inter_token_latency_seconds"
            self._losses.count(name, partial(self._token_gaps.observe, gap, count))
        num_tokens = stats.num_prefill_tokens + stats.num_decode_tokens
        for name, tally, number in (
            ("vllm:iteration_tokens_total", self._step_tokens, num_tokens),
            ("mie:step_seconds", self._phases["schedule"], stats.schedule_seconds),
            ("mie:step_seconds", self._phases["run"], stats.run_seconds),
            ("mie:step_seconds", self._phases["update"], stats.update_seconds),
            ("mie:batch_rows", self._rows["prefill"], stats.num_prefill_tokens),
            ("mie:batch_rows", self._rows["decode"], stats.num_decode_tokens),
        ):
            self._losses.count(name, partial(tally.observe, number))

    def end(self, request: Request) -> None:
        """Record that a request has ended. Recording it again changes nothing."""
        totals, records = self._ended
        if len(records) >= MOST_RECORDS:
            self._ended = (totals.with_records(records.values()), {})
        self._losses.count("a metric of each request", partial(self._record, request))

    def _record(self, request: Request) -> None:
        self._ended[1][request.number] = _record(request)

    def snapshot(self, engine: Engine) -> Snapshot:
        """Return all that was counted so far, to be read in any thread."""
        base, records = self._ended
        scheduler, stats, config = engine.scheduler, engine.stats, engine.config
        manager, memory = scheduler.manager, stats.memory
        num_cached, num_used = manager.num_cached, manager.num_used
        num_waiting = len(scheduler.waiting)
        blocks = {
            "free": manager.num_blocks - num_used - num_cached,
            "cached": num_cached,
            "used": num_used,
            "shared": manager.num_saved,
        }
        tallies: list[tuple[str, Labels, Tally]] = [
            ("vllm:iteration_tokens_total", {}, self._step_tokens),
            ("vllm:inter_token_latency_seconds", {}, self._token_gaps),
            *(("mie:step_seconds", {"phase": key}, each) for key, each in self._phases.items()),
            *(("mie:batch_rows", {"kind": key}, each) for key, each in self._rows.items()),
        ]
        return Snapshot(
            base=base,
            # A request without a token has given nothing yet.
            records=[
                *records.values(),
                *(_record(r) for r in engine.requests if r.prefill_choice is None),
            ],
            gauges=[
                ("vllm:num_requests_running", {}, len(scheduler.running)),
                ("vllm:num_requests_waiting", {}, num_waiting),
                ("vllm:kv_cache_usage_perc", {}, num_used / manager.num_blocks),
                *((name, {}, size) for name, size in self.sizes.items()),
                ("vllm:num_requests_waiting_by_reason", {"reason": "capacity"}, num_waiting),
                ("vllm:num_requests_waiting_by_reason", {"reason": "deferred"}, 0),
                *(("mie:kv_blocks", {"state": state}, count) for state, count in blocks.items()),
                *_slot_gauges(manager),
            ],
            counters={
                "vllm:prefix_cache_queries": memory.num_queried_tokens,
                "vllm:prefix_cache_hits": memory.num_hit_tokens + memory.num_partial_hit_tokens,
                "vllm:num_preemptions": stats.num_preemptions,
                **self._disk_counters(),
                "mie:cow_copies": memory.num_copies,
                "mie:blocks_evicted": memory.num_evictions,
                "mie:blocks_swapped_out": memory.num_exported,
                "mie:blocks_swapped_in": memory.num_imported,
                "mie:snapshots_taken": memory.num_snapshots,
                "mie:snapshots_evicted": memory.num_snapshot_evictions,
            },
            drafts=_draft_counts(scheduler.speculation),
            tallies=[(name, labels, tally.copy()) for name, labels, tally in tallies],
            cache={
                "block_size": str(config.block_size),
                "cache_dtype": str(config.kv_cache_dtype),
                "enable_prefix_caching": str(config.enable_prefix_caching),
                "num_gpu_blocks": str(manager.num_blocks),
            },
        )


def _draft_counts(speculation: Speculation | None) -> list[tuple[str, Labels, int]]:
    """Return the numbers of drafts, if the engine makes any."""
    if speculation is None:
        return []
    stats, name = speculation.stats, "vllm:spec_decode_num_accepted_tokens_per_pos"
    return [
        ("vllm:spec_decode_num_drafts", {}, stats.num_drafts),
        ("vllm:spec_decode_num_draft_tokens", {}, stats.num_draft_tokens),
        ("vllm:spec_decode_num_accepted_tokens", {}, stats.num_accepted_tokens),
        *(
            (name, {"position": str(position)}, number)
            for position, number in enumerate(stats.num_accepted_by_position)
        ),
    ]


def _slot_gauges(manager: KVCacheManager) -> list[tuple[str, Labels, float]]:
    """Return the number of slots of recurrent states by their use."""
    states = manager.part(States)
    counts = {} if states is None else states.slots_by_use
    return [("mie:state_slots", {"state": use}, count) for use, count in counts.items()]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The numbers of an engine at one moment. They do not change."""

    base: _Totals
    records: Sequence[_Record]
    gauges: Sequence[tuple[str, Labels, float]]
    counters: Mapping[str, int]
    drafts: Sequence[tuple[str, Labels, int]]
    tallies: Sequence[tuple[str, Labels, Tally]]
    cache: Labels

    def read(self, model_name: str) -> list[Metric]:
        """Return everything under vLLM's names, and the numbers of mie alone under ``mie:``."""
        totals = self.base.with_records(self.records)
        shared = {"model_name": model_name, "engine": "0"}
        num_cached = totals.counts["vllm:prompt_tokens_cached"]
        num_from_disk = totals.counts["mie:prompt_tokens_from_disk"]
        sources = {
            "local_compute": totals.counts["vllm:prompt_tokens"] - num_cached,
            "local_cache_hit": num_cached - num_from_disk,
            "external_kv_transfer": num_from_disk,
        }
        counters: list[tuple[str, Labels, int]] = [
            *((name, {}, value) for name, value in {**self.counters, **totals.counts}.items()),
            *(("vllm:prompt_tokens_by_source", {"source": k}, v) for k, v in sources.items()),
            *self.drafts,
            *(
                ("vllm:request_success", {"finished_reason": k}, v)
                for k, v in totals.num_ended.items()
            ),
            *(("mie:prefix_departures", {"reason": k}, v) for k, v in totals.num_departed.items()),
        ]
        return [
            *(Gauge(name=n, labels={**shared, **own}, value=v) for n, own, v in self.gauges),
            *(Counter(name=n, labels={**shared, **own}, value=v) for n, own, v in counters),
            *(tally.read(name, shared) for name, tally in totals.histograms.items()),
            *(tally.read(name, {**shared, **own}) for name, own, tally in self.tallies),
            Gauge(name="vllm:cache_config_info", labels={**shared, **self.cache}, value=1.0),
        ]


def metrics_of(engine: Engine) -> EngineMetrics:
    """Return the metrics that an engine was created with."""
    assert isinstance(engine.metrics, EngineMetrics), "an engine without metrics has no numbers"
    return engine.metrics


def snapshot_of(engine: Engine) -> Snapshot:
    """Return the numbers of an engine, in the engine's thread. Another thread may read them."""
    engine.recover()
    return metrics_of(engine).snapshot(engine)
