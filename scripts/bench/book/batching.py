"""Compare static and continuous batching."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from bench.book import published
from bench.book.chapter import Result, Scale, column, percent, rows, simulate, times
from mie.lab.metrics import percentile, summarize

TITLE = "Continuous batching"
KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "continuous": {"batching": "continuous"},
        "static": {"batching": "static"},
        "static, reserving": {"batching": "static", "watermark": 1 / 3},
    }
)
"""The kinds of batching.

[a]'s static batch reserves each answer to its full length. The static batch here takes blocks for
its prompts, and preempts if they run out. Answers need a third on average, and that share can be
left free.
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
        "drain": drain(256, 32, range(8)) if is_full else drain(48, 8, range(2)),
        "ceiling": [
            _under_load(rate, 300 if is_full else 40, 600)
            for rate in ((5, 10, 15, 20, 25, 30, 40, 60, 80) if is_full else (5, 30))
        ],
        "first_token": [
            _under_load(rate, 200 if is_full else 40, 700)
            for rate in ((2, 3, 4, 5, 6, 7) if is_full else (2,))
        ],
    }


def drain(num_requests: int, max_num_seqs: int, seeds: range) -> dict[str, Any]:
    """Count the steps until a load is done, with enough memory and budget for all."""
    rounds = []
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
        rounds.append(row)
    return {"num_requests": num_requests, "max_num_seqs": max_num_seqs, "rounds": rounds}


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


def facts(result: Result) -> dict[str, str]:
    """Return the texts of the page."""
    load = result["drain"]
    ratios = sorted(row["static"] / row["continuous"] for row in load["rounds"])
    saturated = [row for row in result["ceiling"] if row["request_rate"] >= SATURATED]
    ceilings = {
        kind: sum(column(saturated, kind, "output_throughput")) / len(saturated) for kind in KINDS
    }
    continuous, static, reserving = ceilings.values()
    preempted = column(result["ceiling"], "static", "num_preemptions")
    tails = [_tail(row) for row in result["first_token"]]
    equal = [tail for tail in tails if abs(tail[2]) <= EQUAL]
    return {
        "num_requests": str(load["num_requests"]),
        "num_seats": str(load["max_num_seqs"]),
        "num_loads": str(len(load["rounds"])),
        "rounds": f"{percentile(ratios, 50):.2f}",
        "rounds_span": f"{ratios[0]:.2f} … {ratios[-1]:.2f}",
        "reserving_change": _change(reserving, continuous),
        "static_change": _change(static, continuous),
        "continuous": f"{continuous:,.0f}",
        "static": f"{static:,.0f}",
        "reserving": f"{reserving:,.0f}",
        "long": percent(published.MIXED_LONG),
        "saturated": str(SATURATED),
        "preempted": f"{min(preempted)} … {max(preempted)}",
        "equal": percent(EQUAL),
        "equal_rates": f"{equal[0][0]} … {equal[-1][0]} requests/s" if equal else "at no rate",
        "equal_tails": f"{min(t[1] for t in equal):.0f} … {max(t[1] for t in equal):.0f} × less"
        if equal
        else "–",
        "tails": rows(
            (f"{rate}", f"{ratio:.0f} ×", percent(gap, 1), "yes" if abs(gap) <= EQUAL else "no")
            for rate, ratio, gap in tails
        ),
    }


def _tail(row: dict[str, Any]) -> tuple[int, float, float]:
    """Return the rate, the p99 TTFT of static / continuous, and static's lost throughput."""
    continuous, static = row["continuous"], row["static"]
    ratio = static["p99_ttft_ms"] / continuous["p99_ttft_ms"]
    return (
        row["request_rate"],
        ratio,
        1 - static["output_throughput"] / continuous["output_throughput"],
    )


def _change(before: float, after: float) -> str:
    return f"{before:,.0f} → {after:,.0f} tok/s ({times(after, before)})"
