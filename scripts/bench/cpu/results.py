"""Compute rows and ratios from the samples of bench_cpu.py, in pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.cpu.metrics import CpuWorkload, Limits, Sample, shares
from bench.cpu.shapes import Costs, Format

BASELINE = "mie"
ONE_BY_ONE = ", one by one"


@dataclass(frozen=True, kw_only=True)
class ModelResults:
    """The results of one model."""

    name: str
    costs: Costs
    limits: Limits
    formats: Mapping[str, Format]
    """The number format of each engine."""
    loaded: Mapping[str, Mapping[str, Any]]
    """By engine: version, load_seconds, loaded_bytes, peak_bytes, agreement."""
    workloads: Mapping[str, CpuWorkload]
    samples: Sequence[Sample]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A median with the least and the largest value."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(median=statistics.median(values), least=min(values), most=max(values))

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.least)}–{number(self.most)})"


@dataclass(frozen=True, kw_only=True)
class Row:
    """An engine on a workload."""

    model: str
    workload: str
    engine: str
    tokens_per_second: Spread
    baseline_ratio: Spread | None
    """The rate of mie over this engine's, in rounds that have both."""
    time_to_first_token: float | None
    bandwidth_share: float | None
    sgemm_share: float | None
    overhead: float | None
    rounds: list[float] = field(default_factory=list)


def number(value: float) -> str:
    """Return a number with three or four digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rows_of(results: ModelResults) -> list[Row]:
    """Return the rows by workload, then by engine, in the order of their samples."""
    keys = dict.fromkeys((each.workload, each.engine) for each in results.samples)
    order = list(results.workloads)
    return [row_of(results, *key) for key in sorted(keys, key=lambda key: order.index(key[0]))]


def row_of(results: ModelResults, workload: str, engine: str) -> Row:
    """Return the row of one engine on one workload."""
    samples = samples_of(results, workload, engine)
    rates = [each.rate for each in samples]
    first = [each.time_to_first_token for each in samples if each.time_to_first_token is not None]
    overheads = [each.overhead for each in samples if each.overhead is not None]
    bandwidth, sgemm = shares(
        results.workloads[workload],
        statistics.median(rates),
        results.costs,
        results.formats[engine.removesuffix(ONE_BY_ONE)],
        results.limits,
    )
    return Row(
        model=results.name,
        workload=workload,
        engine=engine,
        tokens_per_second=Spread.of(rates),
        baseline_ratio=ratio(results, workload, BASELINE, engine),
        time_to_first_token=statistics.median(first) if first else None,
        bandwidth_share=bandwidth,
        sgemm_share=sgemm,
        overhead=statistics.median(overheads) if overheads else None,
        rounds=rates,
    )


def samples_of(results: ModelResults, workload: str, engine: str) -> list[Sample]:
    """Return an engine's samples of a workload."""
    return [each for each in results.samples if (each.workload, each.engine) == (workload, engine)]


def ratio(results: ModelResults, workload: str, engine: str, other: str) -> Spread | None:
    """Return how many times as fast one engine was as another, round by round.

    Returns None if they were never measured side by side.
    """
    rates = {each.moment: each.rate for each in samples_of(results, workload, engine)}
    ratios = [
        rates[each.moment] / each.rate
        for each in samples_of(results, workload, other)
        if each.moment in rates
    ]
    return Spread.of(ratios) if ratios else None
