"""Define counters, gauges and histograms with names and labels, as Prometheus has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate


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

    def observe(self, value: float | None, count: int = 1) -> None:
        """Count a value ``count`` times. None, for an event that has not happened, is ignored."""
        if value is not None:
            number = float(value)  # raises before anything is counted
            self._counts[bisect_left(self._limits, number)] += count
            self._sum += number * count

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
