"""Compare policies when more requests arrive than can be served at once."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from bench.book import published
from bench.book.chapter import Result, Scale, rows, simulate, times
from mie.lab.draws import Draws, LogNormal
from mie.lab.loads import independent
from mie.lab.metrics import RequestRecord, summarize
from mie.lab.workload import Workload

TITLE = "Scheduling policies"
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


def facts(result: Result) -> dict[str, str]:
    """Return the texts of the page."""
    settings = result["settings"]
    table = {row["policy"]: row for row in result["policies"]}

    def change(policy: str, who: str, name: str) -> tuple[float, float]:
        return table["fcfs"][who][name] / 1000, table[policy][who][name] / 1000

    mean, urgent = (
        change("sjf", "all", "mean_e2el_ms"),
        change("priority", "urgent", "mean_e2el_ms"),
    )
    tail = change("sjf", "all", "p99_e2el_ms")
    numbers = (("all", "mean_e2el_ms"), ("all", "p99_e2el_ms"), ("urgent", "mean_e2el_ms"))
    return {
        "mean": f"{mean[0]:.1f} → {mean[1]:.1f} s ({times(*mean, 1)} less)",
        "urgent": f"{urgent[0]:.1f} → {urgent[1]:.1f} s ({times(*urgent, 1)} less)",
        "tail": f"{tail[0]:.1f} → {tail[1]:.1f} s",
        "num_requests": str(settings["num_requests"]),
        "num_urgent": str(settings["num_urgent"]),
        "request_rate": f"{settings['request_rate']:g}",
        "num_seats": str(NUM_SEATS),
        "policies": rows(
            (name, *(f"{row[who][number] / 1000:.1f}" for who, number in numbers))
            for name, row in table.items()
        ),
    }
