"""Compare policies when more requests arrive than can be served at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from mie.sim.book import TITLES, published
from mie.sim.book.chapter import Headline, Panel, Result, Scale, Series, simulate, table, times
from mie.sim.draws import Draws, LogNormal
from mie.sim.loads import independent
from mie.sim.metrics import RequestRecord, summarize
from mie.sim.workload import Workload

POLICIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "fcfs": {"scheduling_policy": "fcfs"},
        "priority": {"scheduling_policy": "priority"},
        "sjf": {"scheduling_policy": "sjf"},
        "sjf, ageing 4": {"scheduling_policy": "sjf", "sjf_ageing": 4},
    }
)
RATE = 14.0
"""Requests a second, more than are served while they arrive."""
NUM_SEATS = 32
URGENT = 0.1
"""Fraction of urgent requests. All policies report them, and one prefers them."""


def run(scale: Scale) -> Result:
    """Run the same requests under each policy."""
    count = 300 if scale == "full" else 30
    load = independent(
        num_requests=count,
        input_len=LogNormal(256, 0.8, 8, 1536),
        output_len=LogNormal(128, 0.8, 4, 768),
        request_rate=RATE,
        seed=3,
    )
    draws = Draws(4)
    urgent = {each.request_id for each in load.requests if draws.uniform() < URGENT}
    return {
        "settings": {"num_requests": count, "request_rate": RATE, "num_urgent": len(urgent)},
        "policies": [
            {"policy": name, **_numbers(load, urgent, settings)}
            for name, settings in POLICIES.items()
        ],
    }


def _numbers(load: Workload, urgent: set[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    if settings["scheduling_policy"] == "priority":
        ranked = [
            replace(each, priority=int(each.request_id not in urgent)) for each in load.requests
        ]
        load = replace(load, requests=tuple(ranked))
    result = simulate(
        published.COSTS,
        load,
        max_num_seqs=NUM_SEATS,
        num_blocks=1400,
        max_num_batched_tokens=2048,
        **settings,
    )
    chosen = [each for each in result.records if each.request_id in urgent]
    return {
        "all": _latencies(result.records, result.duration_ns),
        "urgent": _latencies(chosen, result.duration_ns),
    }


def _latencies(records: list[RequestRecord], duration_ns: int) -> dict[str, Any]:
    numbers = summarize(records, duration_ns, metrics=("ttft", "e2el"))
    return {name: value for name, value in numbers.items() if name.endswith("_ms")}


def _policies(result: Result) -> dict[str, dict[str, Any]]:
    return {row["policy"]: row for row in result["policies"]}


def headlines(result: Result) -> list[Headline]:
    """Return the findings on scheduling order."""
    rows = _policies(result)
    first, short, urgent = (rows[name] for name in ("fcfs", "sjf", "priority"))
    lines = []
    for what, before, after in (
        ("mean end-to-end latency, sjf for fcfs", first["all"], short["all"]),
        ("the same for urgent requests, priority for fcfs", first["urgent"], urgent["urgent"]),
    ):
        old, new = before["mean_e2el_ms"] / 1000, after["mean_e2el_ms"] / 1000
        lines.append(
            Headline(what=what, here=f"{old:.1f} → {new:.1f} s ({times(old, new, 1)} less)")
        )
    old, new = first["all"]["p99_e2el_ms"] / 1000, short["all"]["p99_e2el_ms"] / 1000
    lines.append(Headline(what="the price: p99 latency under sjf", here=f"{old:.1f} → {new:.1f} s"))
    return lines


def describe(result: Result) -> str:
    """Return the chapter's text."""
    settings = result["settings"]
    return f"""\
{settings["num_requests"]} requests of very different lengths arrive at
{settings["request_rate"]:g} a second, faster than {NUM_SEATS} seats serve them.
{settings["num_urgent"]} of them are urgent, which only *priority* respects. With *sjf* (shortest
job first) many short jobs overtake a long one, so the mean falls and the tail grows. Ageing lets
long jobs run eventually, and more ageing comes closer to *fcfs*.

{table(("from arrival to last token, s", "mean", "p99", "mean of urgent ones"), _rows(result))}

Not shown: `max_tokens` is the length of the answer here, so *sjf* knows what it
rarely knows in practice. Costs are the published model's, as in *{TITLES["batching"]}*."""


def _rows(result: Result) -> Iterator[Sequence[str]]:
    for row in result["policies"]:
        numbers = [row["all"]["mean_e2el_ms"], row["all"]["p99_e2el_ms"]]
        numbers.append(row["urgent"]["mean_e2el_ms"])
        yield row["policy"], *(f"{number / 1000:.1f}" for number in numbers)


def panels(result: Result) -> list[Panel]:
    """Plot mean and tail latency by policy."""
    rows = result["policies"]
    labels = [row["policy"].replace(", ", ",\n") for row in rows]
    return [
        Panel(
            title=title,
            x_label="",
            y_label="end-to-end latency (s)",
            series=[
                Series(
                    label=label,
                    x=labels,
                    y=[row[who][name] / 1000 for row in rows],
                )
                for label, name in (("mean", "mean_e2el_ms"), ("p99", "p99_e2el_ms"))
            ],
        )
        for title, who in (("All requests", "all"), ("Urgent requests", "urgent"))
    ]
