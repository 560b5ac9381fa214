"""Define the workloads of bench_cpu.py and the rates computed from the answers.

decode        tokens per second of the steps in which every request is between its first and its
              last token. Steps that compute prompts do not count.

prefill       prompt tokens per second, up to the last request's first token.

end to end    new tokens per second, from the first request's arrival to the last token.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.cpu.shapes import Costs, Format

Times = Sequence[Sequence[float]]
"""The time of each token of each request, in seconds since the requests arrived."""

DECODE, PREFILL, END_TO_END = "decode", "prefill", "end to end"


@dataclass(frozen=True, kw_only=True)
class CpuWorkload:
    """Requests that arrive at once, with prompts of one length."""

    name: str
    measures: str
    num_requests: int
    prompt_length: int
    num_new_tokens: int
    only_mie: bool = False
    repeats_prompts: bool = False
    """Whether every round has the same prompts, which the prefix cache then holds."""

    @property
    def length(self) -> int:
        """The tokens of a request at its end."""
        return self.prompt_length + self.num_new_tokens

    @property
    def mean_context(self) -> float:
        """The tokens that a decode step finds in the cache for each request, on average."""
        return self.prompt_length + self.num_new_tokens / 2

    @property
    def description(self) -> str:
        """A description of the workload in words."""
        requests = "1 request" if self.num_requests == 1 else f"{self.num_requests} requests"
        return (
            f"{self.measures}, {requests} of {self.prompt_length} prompt tokens and "
            f"{self.num_new_tokens} new"
        )


def _decode(num_requests: int) -> CpuWorkload:
    return CpuWorkload(
        name=f"decode-{num_requests}",
        measures=DECODE,
        num_requests=num_requests,
        prompt_length=16,
        num_new_tokens=48,
    )


def _prefill(num_requests: int) -> CpuWorkload:
    return CpuWorkload(
        name=f"prefill-{num_requests}",
        measures=PREFILL,
        num_requests=num_requests,
        prompt_length=512,
        num_new_tokens=1,
    )


CONTEXT = CpuWorkload(
    name="context-16",
    measures=DECODE,
    num_requests=16,
    prompt_length=4096,
    num_new_tokens=16,
    only_mie=True,
    repeats_prompts=True,
)
WORKLOADS = {
    each.name: each
    for each in (
        *map(_decode, (1, 8, 16, 64)),
        *map(_prefill, (1, 4)),
        CpuWorkload(
            name="end-to-end-64",
            measures=END_TO_END,
            num_requests=64,
            prompt_length=16,
            num_new_tokens=150,
        ),
        CONTEXT,
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
    start, end = decode_window(times)
    return sum(start < when <= end for each in times for when in each) / (end - start)


def decode_window(times: Times) -> tuple[float, float]:
    """Return the times of the last request's first token and the first request's last token."""
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    if end <= start:
        raise ValueError(
            f"the first of {len(times)} requests ended before the last one had a token: no moment "
            "at which all decode (ask for more new tokens)"
        )
    return start, end


def time_to_first_token(times: Times) -> float:
    """Return the median time to first token of the requests, in seconds."""
    return statistics.median(each[0] for each in times)


def overhead(steps: Sequence[Sequence[float]], times: Times) -> float:
    """Return the share of the decode steps' time outside the forward pass and sampling.

    ``steps`` are (end, seconds of forward pass and sampling).
    """
    start, end = decode_window(times)
    inside = [seconds for when, seconds in steps if start < when <= end]
    return 1 - sum(inside) / (end - start)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement."""

    model: str
    engine: str
    workload: str
    moment: tuple[int, int]
    """Group and round. Samples with the same moment were taken side by side."""
    rate: float
    time_to_first_token: float | None
    """Seconds, or None where the requests did not arrive at once."""
    overhead: float | None


def sample(
    workload: CpuWorkload,
    answers: Sequence[Mapping[str, Any]],
    *,
    model: str,
    engine: str,
    moment: tuple[int, int],
    one_by_one: bool = False,
) -> Sample:
    """Return the median of one round's answers."""
    overheads = [
        overhead(each["steps"], each["times"])
        for each in answers
        if each["steps"] and workload.measures == DECODE
    ]
    first = [time_to_first_token(each["times"]) for each in answers]
    return Sample(
        model=model,
        engine=engine,
        workload=workload.name,
        moment=moment,
        rate=statistics.median(rate(workload, each["times"]) for each in answers),
        time_to_first_token=None if one_by_one else statistics.median(first),
        overhead=statistics.median(overheads) if overheads else None,
    )


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
    num_seqs, context = workload.num_requests, workload.mean_context
    seconds = num_seqs / tokens_per_second
    return (
        costs.decode_bytes(num_seqs, context, stored) / seconds / limits.bandwidth,
        costs.decode_flops(num_seqs, context) / seconds / limits.sgemm,
    )


def attention_share(
    long: tuple[CpuWorkload, float],
    short: tuple[CpuWorkload, float],
    costs: Costs,
    stored: Format,
    limits: Limits,
) -> float:
    """Return the share of the bandwidth that attention reaches.

    It is a step's additional bytes over its additional time, at a long context compared with a
    short one with as many requests. Each argument is a workload and its tokens per second.
    """
    (workload, rate_long), (other, rate_short) = long, short
    assert workload.num_requests == other.num_requests
    num_seqs = workload.num_requests
    num_bytes = costs.decode_bytes(num_seqs, workload.mean_context, stored) - costs.decode_bytes(
        num_seqs, other.mean_context, stored
    )
    return num_bytes / (num_seqs / rate_long - num_seqs / rate_short) / limits.bandwidth
