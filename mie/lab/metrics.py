"""Compute the latencies and throughput of a run from the times of its tokens.

docs/glossary.md has the definitions, one each. Times are whole nanoseconds, and nothing here rounds
before the last division.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from mie.config.engine import check_real, keyword_checked
from mie.errors import ConfigError
from mie.lab.sim.costs import MILLISECOND, SECOND

METRICS = ("ttft", "tpot", "itl", "e2el", "queue")
"""The names in vLLM's benchmarks, and the time in the queue."""

Number = int | float


@dataclass(kw_only=True, eq=False)
class RequestRecord:
    """The events of a request, in nanoseconds since the load began."""

    request_id: str
    num_prompt: int
    arrival_ns: int
    first_step_ns: int | None = None
    """When the first step that computed for it began."""
    token_ns: list[list[int]] = field(default_factory=list)
    """When each token was ready, for each choice."""
    num_cached: int = 0
    """The number of prompt tokens that were found in the prefix cache."""
    num_preemptions: int = 0
    error: str | None = None
    """Why it was refused, or None."""

    @property
    def num_output(self) -> int:
        """The number of generated tokens of all choices."""
        return sum(map(len, self.token_ns))

    @property
    def end_ns(self) -> int | None:
        """When the last token of any choice was ready."""
        return max((times[-1] for times in self.token_ns if times), default=None)

    @property
    def ttft(self) -> int | None:
        """Time from arrival to the first token of any choice."""
        first = min((times[0] for times in self.token_ns if times), default=None)
        return None if first is None else first - self.arrival_ns

    @property
    def e2el(self) -> int | None:
        """Time from arrival to the last token of any choice."""
        return None if self.end_ns is None else self.end_ns - self.arrival_ns

    @property
    def queue(self) -> int | None:
        """Time from arrival to the first step that computed for it."""
        return None if self.first_step_ns is None else self.first_step_ns - self.arrival_ns

    @property
    def itl(self) -> list[int]:
        """Times between consecutive tokens of each choice."""
        return [later - earlier for times in self.token_ns for earlier, later in pairwise(times)]

    @property
    def tpot(self) -> list[float]:
        """The mean time of each token after the first, for each choice of two tokens or more."""
        return [
            (times[-1] - times[0]) / (len(times) - 1) for times in self.token_ns if len(times) > 1
        ]


def percentile(values: Sequence[Number], percent: float) -> float:
    """Return the percentile of ``values``. There must be at least one.

    Neighbours are interpolated linearly, as NumPy does by default.
    """
    ordered = sorted(values)
    position = percent / 100 * (len(ordered) - 1)
    index = min(int(position), len(ordered) - 1)
    above = ordered[min(index + 1, len(ordered) - 1)]
    return ordered[index] + (above - ordered[index]) * (position - index)


def mean_and_std(values: Sequence[Number]) -> tuple[float, float]:
    """Return the mean and the population's standard deviation.

    Sums are rounded once, so their order does not matter.
    """
    mean = math.fsum(values) / len(values)
    gaps = [value - mean for value in values]
    return mean, math.sqrt(math.fsum(gap * gap for gap in gaps) / len(values))


@keyword_checked
@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The limits of a good request in milliseconds. None means no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    def __post_init__(self) -> None:
        for name, limit in vars(self).items():
            if limit is not None:
                check_real(f"goodput {name}", limit, 0)

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> Goodput:
        """Parse limits such as "ttft:500".

        Raises:
            ConfigError: a name or a number is wrong.
        """
        limits = {}
        for pair in pairs:
            name, _, text = pair.partition(":")
            try:
                limits[name] = float(text)
            except ValueError as error:
                raise ConfigError(
                    f"goodput {pair!r} is not understood; write NAME:MILLISECONDS, such as ttft:500"
                ) from error
        return cls(**limits)

    def is_met(self, record: RequestRecord) -> bool:
        """Return whether every limit holds. A choice of one token meets any TPOT."""
        for limit, values in (
            (self.ttft, [record.ttft]),
            (self.e2el, [record.e2el]),
            (self.tpot, record.tpot),
        ):
            for value in values:
                if limit is not None and (value is None or value > limit * MILLISECOND):
                    return False
        return not record.error


def latencies(records: Sequence[RequestRecord], metric: str) -> list[Number]:
    """Return all values of one of `METRICS`, in nanoseconds."""
    values: list[Number] = []
    for record in records:
        value = getattr(record, metric)
        values += value if isinstance(value, list) else [value] if value is not None else []
    return values


def summarize(
    records: Sequence[RequestRecord],
    duration_ns: int,
    *,
    metrics: Sequence[str] = METRICS,
    percentiles: Sequence[float] = (99,),
    goodput: Goodput | None = None,
) -> dict[str, Number | None]:
    """Summarise a run with the names of vLLM's serving benchmark, and None for missing values.

    Raises:
        ConfigError: a metric is unknown, or a percentile is out of range.
    """
    for name in metrics:
        if name not in METRICS:
            raise ConfigError(f"metric {name!r} is unknown; known are: {', '.join(METRICS)}")
    for percent in percentiles:
        check_real("percentile", percent, 0, 100)
    done = [record for record in records if record.error is None]
    num_input = sum(record.num_prompt for record in done)
    num_output = sum(record.num_output for record in done)
    seconds = Fraction(max(1, duration_ns), SECOND)
    result: dict[str, Number | None] = {
        "duration": duration_ns / SECOND,
        "completed": len(done),
        "failed": len(records) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": float(len(done) / seconds),
        "request_goodput": None,
        "output_throughput": float(num_output / seconds),
        "total_token_throughput": float((num_input + num_output) / seconds),
    }
    if goodput is not None:
        result["request_goodput"] = float(sum(map(goodput.is_met, records)) / seconds)
    for name in metrics:
        result.update(_distribution(name, latencies(done, name), percentiles))
    return result


def _distribution(
    name: str, values: Sequence[Number], percentiles: Sequence[float]
) -> Mapping[str, float | None]:
    tails = {f"p{percent:g}": percent for percent in percentiles}
    fields = [f"{what}_{name}_ms" for what in ("mean", "median", "std", *tails)]
    if not values:
        return dict.fromkeys(fields)
    ordered = sorted(values)
    mean, std = mean_and_std(ordered)
    middle, *rest = (percentile(ordered, percent) for percent in (50, *tails.values()))
    numbers = (mean, middle, std, *rest)
    return {field: value / MILLISECOND for field, value in zip(fields, numbers, strict=True)}
