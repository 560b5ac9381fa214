"""Define the workloads of bench_cpu.py, and compute its tables from the samples.

decode        tokens per second of the steps in which every request is between its first and its
              last token. Steps that compute prompts do not count.

prefill       prompt tokens per second, up to the last request's first token.

end to end    new tokens per second, from the first request's arrival to the last token.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.cpu.shapes import Costs, Format
from bench.harness import Spread, number, table

Times = Sequence[Sequence[float]]
"""The time of each token of each request, in seconds since the requests arrived."""

BASELINE = "mie"
ONE_BY_ONE = ", one by one"
DECODE, PREFILL, END_TO_END = "decode", "prefill", "end to end"


@dataclass(frozen=True)
class CpuWorkload:
    """Requests that arrive at once, with prompts of one length."""

    measures: str
    num_requests: int
    prompt_length: int
    num_new_tokens: int

    @property
    def name(self) -> str:
        """The name on the command line."""
        return f"{self.measures.replace(' ', '-')}-{self.num_requests}"

    @property
    def length(self) -> int:
        """The tokens of a request at its end."""
        return self.prompt_length + self.num_new_tokens

    @property
    def description(self) -> str:
        """A description of the workload in words."""
        return (
            f"{self.measures}, {self.num_requests} requests of {self.prompt_length} prompt tokens "
            f"and {self.num_new_tokens} new"
        )


WORKLOADS = {
    each.name: each
    for each in (
        *(CpuWorkload(DECODE, count, 16, 48) for count in (1, 8, 16, 64)),
        *(CpuWorkload(PREFILL, count, 512, 1) for count in (1, 4)),
        CpuWorkload(END_TO_END, 64, 16, 150),
    )
}


def quick(workload: CpuWorkload) -> CpuWorkload:
    """Return a small workload in place of this one, to try the script."""
    return replace(
        workload,
        prompt_length=min(workload.prompt_length, 64),
        num_new_tokens=min(workload.num_new_tokens, 12),
    )


def rate(workload: CpuWorkload, times: Times) -> float:
    """Return tokens per second, as the workload defines them.

    Raises:
        ValueError: all requests were never decoding at the same time.
    """
    if workload.measures == PREFILL:
        return len(times) * workload.prompt_length / max(each[0] for each in times)
    if workload.measures == END_TO_END:
        return sum(map(len, times)) / max(each[-1] for each in times)
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    if end <= start:
        raise ValueError(
            f"the first of {len(times)} requests ended before the last one had a token: no moment "
            "at which all decode (ask for more new tokens)"
        )
    return sum(start < when <= end for each in times for when in each) / (end - start)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement, the median of one round's answers."""

    engine: str
    workload: str
    moment: tuple[int, int]
    """Group and round. Samples with the same moment were taken side by side."""
    rate: float
    time_to_first_token: float
    """The median of the requests, in seconds."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The machine's best rates (limits.py), in bytes and floating-point operations per second."""

    bandwidth: float
    sgemm: float


def shares(
    workload: CpuWorkload, tokens_per_second: float, costs: Costs, stored: Format, limits: Limits
) -> tuple[float | None, float | None]:
    """Return the least shares of the bandwidth and the sgemm rate that the workload needs.

    A share is None where it is not one number.
    """
    if workload.measures == PREFILL:
        seconds = workload.prompt_length / tokens_per_second
        return None, costs.prefill_flops(workload.prompt_length) / seconds / limits.sgemm
    if workload.measures == END_TO_END:
        return None, None
    num_seqs, seconds = workload.num_requests, workload.num_requests / tokens_per_second
    context = workload.prompt_length + workload.num_new_tokens / 2  # the mean of the steps
    return (
        costs.decode_bytes(num_seqs, context, stored) / seconds / limits.bandwidth,
        costs.decode_flops(num_seqs, context) / seconds / limits.sgemm,
    )


@dataclass(kw_only=True)
class ModelResults:
    """The results of one model."""

    name: str
    costs: Costs
    limits: Limits = field(default_factory=lambda: Limits(bandwidth=0, sgemm=0))
    formats: Mapping[str, Format] = field(default_factory=dict)
    """The number format of each engine."""
    loaded: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By engine: version, load_seconds, loaded_bytes, peak_bytes, agreement."""
    workloads: Mapping[str, CpuWorkload] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)

    def of(self, workload: str, engine: str) -> list[Sample]:
        """Return an engine's samples of a workload."""
        return [each for each in self.samples if (each.workload, each.engine) == (workload, engine)]

    def ratio(self, workload: str, engine: str) -> Spread | None:
        """Return how many times as fast as this engine mie was, round by round.

        Returns None if they were never measured side by side.
        """
        rates = {each.moment: each.rate for each in self.of(workload, BASELINE)}
        ratios = [
            rates[each.moment] / each.rate
            for each in self.of(workload, engine)
            if each.moment in rates
        ]
        return Spread.of(ratios) if ratios else None


def markdown(results: ModelResults) -> Iterator[str]:
    """Yield the tables of a model: its engines, then each workload."""
    limits = results.limits
    yield from (f"### {results.name}", "")
    yield (
        f"Measured beside it: {limits.bandwidth / 1e9:.1f} GB/s read, {limits.sgemm / 1e9:.0f} "
        "GFLOP/s in the best sgemm."
    )
    yield ""
    heads = ("engine", "loads in, s", "peak memory, MiB: loaded", "at the end")
    yield from table(
        (*heads, "same greedy tokens", "version"),
        (
            (
                engine,
                f"{facts['load_seconds']:.1f}",
                *(f"{facts[name] / 2**20:.0f}" for name in ("loaded_bytes", "peak_bytes")),
                facts["agreement"],
                facts["version"],
            )
            for engine, facts in results.loaded.items()
        ),
    )
    for name, workload in results.workloads.items():
        engines = dict.fromkeys(each.engine for each in results.samples if each.workload == name)
        if engines:
            yield from ("", f"**{name}**: {workload.description}", "")
            heads = ("engine", "tokens/s", "mie ÷ it", "TTFT, ms")
            rows = (_row(results, workload, engine) for engine in engines)
            yield from table((*heads, "of bandwidth", "of sgemm"), rows)
    yield ""


def _row(results: ModelResults, workload: CpuWorkload, engine: str) -> Sequence[str]:
    samples = results.of(workload.name, engine)
    rates = Spread.of(each.rate for each in samples)
    ratio = results.ratio(workload.name, engine)
    first = statistics.median(each.time_to_first_token for each in samples)
    stored = results.formats[engine.removesuffix(ONE_BY_ONE)]
    used = shares(workload, rates.median, results.costs, stored, results.limits)
    return (
        engine,
        str(rates),
        "1" if engine == BASELINE else "–" if ratio is None else f"{ratio} ×",
        "–" if engine.endswith(ONE_BY_ONE) else number(1000 * first),
        *("–" if share is None else f"{100 * share:.0f} %" for share in used),
    )
