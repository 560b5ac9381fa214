"""Compare static and continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mie.sim.book import published
from mie.sim.book.chapter import (
    Headline,
    Panel,
    Result,
    Scale,
    Series,
    by,
    percent,
    simulate,
    table,
    times,
)
from mie.sim.metrics import percentile, summarize

KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "continuous": {"batching": "continuous"},
        "static": {"batching": "static"},
        "static, reserving": {"batching": "static", "watermark": 1 / 3},
    }
)
"""The kinds of batching.

[a]'s static batch reserves each answer to its full length. The static batch here takes blocks for
its prompts, and preempts if they run out. Answers need a third on average, which can be left free.
"""
EQUAL = 0.05
"""Throughputs that differ by less count as equal. Tails at different throughputs do not compare."""
SATURATED = 30
"""Requests a second from which both are saturated."""


def run(scale: Scale) -> Result:
    """Measure the rounds to drain a load, throughput as load rises, and TTFT at light load."""
    is_full = scale == "full"
    return {
        "settings": {"equal_throughput": EQUAL, "saturated_from": SATURATED},
        "drain": _drain(256, 32, range(8)) if is_full else _drain(48, 8, range(2)),
        "ceiling": [
            _under_load(rate, 300 if is_full else 40, 600)
            for rate in ((5, 10, 15, 20, 25, 30, 40, 60, 80) if is_full else (5, 30))
        ],
        "first_token": [
            _under_load(rate, 200 if is_full else 40, 700)
            for rate in ((2, 3, 4, 5, 6, 7) if is_full else (2,))
        ],
    }


def _drain(num_requests: int, max_num_seqs: int, seeds: range) -> dict[str, Any]:
    """Count the steps until a load is done, with enough memory and budget for all."""
    rows = []
    for seed in seeds:
        row: dict[str, Any] = {"seed": seed}
        for kind in ("continuous", "static"):
            result = simulate(
                published.COSTS,
                published.mixed(num_requests, seed),
                batching=kind,
                max_num_seqs=max_num_seqs,
                num_blocks=max_num_seqs * 64,
                max_num_batched_tokens=max_num_seqs * 1024,
                enable_prefix_caching=False,
            )
            row[kind] = len(result.steps)
        rows.append(row)
    return {"num_requests": num_requests, "max_num_seqs": max_num_seqs, "rounds": rows}


def _under_load(request_rate: int, num_requests: int, num_blocks: int) -> dict[str, Any]:
    row: dict[str, Any] = {"request_rate": request_rate, "num_requests": num_requests}
    for kind, settings in KINDS.items():
        result = simulate(
            published.COSTS,
            published.poisson(num_requests, request_rate),
            **settings,
            max_num_seqs=128,
            num_blocks=num_blocks,
            max_num_batched_tokens=2048,
        )
        numbers = summarize(result.records, result.duration_ns, metrics=("ttft",))
        row[kind] = {
            "output_throughput": numbers["output_throughput"],
            "median_ttft_ms": numbers["median_ttft_ms"],
            "p99_ttft_ms": numbers["p99_ttft_ms"],
            "num_preemptions": result.num_preempted,
        }
    return row


def _ceilings(result: Result) -> dict[str, float]:
    """Return the mean throughput of each kind beyond saturation."""
    rows = [row for row in result["ceiling"] if row["request_rate"] >= SATURATED]
    return {kind: sum(row[kind]["output_throughput"] for row in rows) / len(rows) for kind in KINDS}


def _tails(result: Result) -> list[tuple[int, float, float]]:
    """Return (rate, p99 TTFT of static / continuous, static's lost throughput) for each rate."""
    tails = []
    for row in result["first_token"]:
        continuous, static = row["continuous"], row["static"]
        ratio = static["p99_ttft_ms"] / continuous["p99_ttft_ms"]
        gap = 1 - static["output_throughput"] / continuous["output_throughput"]
        tails.append((row["request_rate"], ratio, gap))
    return tails


def _equal_tails(result: Result) -> list[tuple[int, float, float]]:
    """Return the rates at which both have equal throughput."""
    return [tail for tail in _tails(result) if abs(tail[2]) <= EQUAL]


def _rounds_ratios(result: Result) -> list[float]:
    return sorted(row["static"] / row["continuous"] for row in result["drain"]["rounds"])


def headlines(result: Result) -> list[Headline]:
    """Return the findings on continuous batching."""
    ceilings, drain, ratios = _ceilings(result), result["drain"], _rounds_ratios(result)
    return [
        Headline(
            what=f"rounds of {drain['num_requests']} requests at {drain['max_num_seqs']} seats",
            here=f"{percentile(ratios, 50):.2f} × fewer ({ratios[0]:.2f} … {ratios[-1]:.2f})",
            published="3,343 → 1,296 (2.58 ×) [c]",
        ),
        Headline(
            what="throughput at saturation, static with room reserved for answers",
            here=_change(ceilings["static, reserving"], ceilings["continuous"]),
            published="746 → 1,139 tok/s (1.53 ×) [a]",
        ),
        Headline(
            what="the same, static that preempts instead",
            here=_change(ceilings["static"], ceilings["continuous"]),
        ),
        _tail_headline(_equal_tails(result)),
    ]


def _tail_headline(tails: Sequence[tuple[int, float, float]]) -> Headline:
    rates, ratios = [tail[0] for tail in tails], [tail[1] for tail in tails]
    span = f"{rates[0]} … {rates[-1]} requests/s" if rates else "at no rate"
    return Headline(
        what=f"p99 TTFT at equal throughput ({span})",
        here=f"{min(ratios):.0f} … {max(ratios):.0f} × less" if ratios else "–",
        published="31 … 37 × [a]",
    )


def _change(before: float, after: float) -> str:
    return f"{before:,.0f} → {after:,.0f} tok/s ({times(after, before)})"


def describe(result: Result) -> str:
    """Return the chapter's text."""
    drain, ceilings, ratios = result["drain"], _ceilings(result), _rounds_ratios(result)
    preempted = [row["static"]["num_preemptions"] for row in result["ceiling"]]
    return f"""\
A static batch ends with its longest answer, and until then the seats of finished answers stay
empty. With continuous batching the next request takes a seat in the step after it becomes free.
*Rounds*: {len(drain["rounds"])} loads of {drain["num_requests"]} requests, of which
{percent(published.MIXED_LONG)} are long, drain at {drain["max_num_seqs"]} seats in
{percentile(ratios, 50):.2f} times fewer steps in the median. *Throughput*: from {SATURATED}
requests/s on, both are saturated. Continuous batching reaches {ceilings["continuous"]:,.0f}
tokens/s, and static batching {ceilings["static"]:,.0f}. The published static batch reserves every
answer in full. If ours leaves a third of the blocks for answers, which is their average share, it
reaches {ceilings["static, reserving"]:,.0f}. Otherwise it admits more and preempts {min(preempted)}
… {max(preempted)} times, which pays.

*p99 TTFT* under light load. This compares latencies only while both have the same throughput, here
within {percent(EQUAL)}. Beyond that, static batching is overloaded, and its tail grows with the
length of the load. The published 54 × at 6 requests/s is such a case.

{table(("requests/s", "static waits longer by", "it serves less by", "same"), _tail_rows(result))}

Not shown: costs are the published ones (a step 6.5 ms, a prompt token 0.1 ms, a decode 0.35 ms),
not those of a device. The loss of static batching depends on how much the lengths differ."""


def _tail_rows(result: Result) -> Iterator[Sequence[str]]:
    for rate, ratio, gap in _tails(result):
        is_same = "yes" if abs(gap) <= EQUAL else "no"
        yield f"{rate}", f"{ratio:.0f} ×", percent(gap, 1), is_same


def panels(result: Result) -> list[Panel]:
    """Plot throughput and TTFT by load."""
    ceiling, first = result["ceiling"], result["first_token"]
    return [
        Panel(
            title="Throughput as the load rises",
            x_label="offered load (requests/s)",
            y_label="output (tokens/s)",
            series=[
                Series(
                    label=kind,
                    x=by(ceiling, "request_rate"),
                    y=[row[kind]["output_throughput"] for row in ceiling],
                    is_dashed=kind == "static, reserving",
                )
                for kind in KINDS
            ],
        ),
        Panel(
            title="p99 TTFT as the load rises",
            x_label="offered load (requests/s)",
            y_label="p99 TTFT (ms)",
            log_y=True,
            series=[
                Series(
                    label=kind,
                    x=by(first, "request_rate"),
                    y=[row[kind]["p99_ttft_ms"] for row in first],
                )
                for kind in ("continuous", "static")
            ],
        ),
    ]
