"""Measure prefix sharing, where a system prompt is computed once and stored once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
)
from mie.sim.clock import MILLISECOND
from mie.sim.costs import Costs
from mie.sim.devices import costs_on, find_device
from mie.sim.draws import Fixed, Uniform
from mie.sim.loads import chats, independent
from mie.sim.metrics import summarize
from mie.sim.shapes import find_shape
from mie.sim.workload import Text, Workload, WorkloadRequest

SYSTEM_LEN = 512
BUDGETS = (0, 4, 8, 16, 24, 32, 40, 48, 64)
DEVICE, MODEL = "a10g", "Llama-3.1-8B"


def run(scale: Scale) -> Result:
    """Run requests that come one after another, all at once, far apart, and as chats."""
    is_full = scale == "full"
    stream = _stream(64 if is_full else 8, every_ms=20, num_answer=160)
    lone = _stream(48 if is_full else 6, every_ms=900, num_answer=96)
    return {
        "settings": {"system_len": SYSTEM_LEN, "device": DEVICE, "model": MODEL},
        "stream": _with_and_without(published.COSTS, stream, max_num_seqs=24, num_blocks=2000),
        "burst": _with_and_without(
            published.COSTS, _burst(128 if is_full else 16), max_num_seqs=128, num_blocks=8192
        ),
        "budgets": [
            {
                "max_cached_blocks": budget,
                **_numbers(
                    published.COSTS,
                    lone,
                    max_num_seqs=4,
                    num_blocks=1200,
                    max_cached_blocks=budget,
                ),
            }
            for budget in BUDGETS
        ],
        "chats": _with_and_without(
            costs_on(find_device(DEVICE), find_shape(MODEL)),
            chats(num_chats=48 if is_full else 4, request_rate=0.5),
            num_blocks=2600,
        ),
    }


def _stream(num_requests: int, *, every_ms: int, num_answer: int) -> Workload:
    """Return [a]'s load: a system prompt and 8 unique tokens, at regular times."""
    requests = [
        WorkloadRequest(
            request_id=str(number),
            prompt=(Text(0, SYSTEM_LEN), Text(1 + number, 8)),
            max_tokens=num_answer,
            arrival_ns=number * every_ms * MILLISECOND,
        )
        for number in range(num_requests)
    ]
    return Workload(name="stream", requests=tuple(requests))


def _burst(num_requests: int) -> Workload:
    """Return a load like [c]'s: all at once, with 7 unique blocks ((4,987 - 128 · 32) / 128)."""
    return independent(
        num_requests=num_requests,
        prefix_len=SYSTEM_LEN,
        input_len=Uniform(16, 64),
        output_len=Fixed(64),
    )


def _with_and_without(costs: Costs, load: Workload, **settings: Any) -> dict[str, Any]:
    return {
        "num_requests": len(load.requests),
        "off": _numbers(costs, load, **settings, enable_prefix_caching=False),
        "on": _numbers(costs, load, **settings),
    }


def _numbers(costs: Costs, load: Workload, **settings: Any) -> dict[str, Any]:
    result = simulate(costs, load, **settings)
    numbers = summarize(result.records, result.duration_ns, metrics=("ttft",))
    return {
        "num_prefill_tokens": result.num_prefill_tokens,
        "hit_rate": result.num_cached_tokens / sum(each.num_prompt for each in result.records),
        "peak_blocks": result.peak_blocks,
        "median_ttft_ms": numbers["median_ttft_ms"],
        "p99_ttft_ms": numbers["p99_ttft_ms"],
        "output_throughput": numbers["output_throughput"],
    }


def _saved(pair: dict[str, Any], name: str) -> float:
    return float(1 - pair["on"][name] / pair["off"][name])


def headlines(result: Result) -> list[Headline]:
    """Return the findings on sharing."""
    lines = []
    for load, name, what, theirs in (
        (
            "stream",
            "num_prefill_tokens",
            "prompt tokens to compute",
            "33,280 → 1,024 (−96.9 %) [a]",
        ),
        ("burst", "peak_blocks", "peak blocks", "4,987 → 934 (−81.3 %) [c]"),
        ("stream", "median_ttft_ms", "median TTFT, ms", "3,781 → 1,887 (−50.1 %) [a]"),
        ("chats", "num_prefill_tokens", "prompt tokens to compute", "–"),
    ):
        pair = result[load]
        off, on = pair["off"][name], pair["on"][name]
        who = "turns of chats" if load == "chats" else "requests, one system prompt"
        lines.append(
            Headline(
                what=f"{what}, {pair['num_requests']} {who}",
                here=f"{off:,.0f} → {on:,.0f} (−{percent(_saved(pair, name), 1)})",
                published=theirs,
            )
        )
    return lines


def describe(result: Result) -> str:
    """Return the chapter's text."""
    stream, burst, chat = result["stream"], result["burst"], result["chats"]
    return f"""\
Requests that begin with the same text find its blocks in the prefix cache and compute only what
follows. *A system prompt of {SYSTEM_LEN} tokens*: {stream["num_requests"]} requests, one every
20 ms at 24 seats, compute {percent(_saved(stream, "num_prefill_tokens"), 1)} fewer prompt tokens;
the median TTFT, which is mostly a wait for a seat, falls by
{percent(_saved(stream, "median_ttft_ms"))}. (Both medians are below the published ones, because a
first token comes with its prompt's last step here and one step later there. So the ratio is a
little smaller.) {burst["num_requests"]} requests at once have {burst["on"]["peak_blocks"]:,} blocks
in their tables at the peak instead of {burst["off"]["peak_blocks"]:,}. *Chats*:
{chat["num_requests"]} turns, each of which quotes all earlier ones, on a simulated {DEVICE} with
{MODEL}. {percent(chat["on"]["hit_rate"])} of their prompt tokens are in the cache, and the median
TTFT is {chat["on"]["median_ttft_ms"]:,.0f} ms instead of {chat["off"]["median_ttft_ms"]:,.0f}.

*A budget* (`max_cached_blocks`) limits the unreferenced blocks in the cache, with requests that
come one by one. Leaves are evicted first, so a budget for half of the prompt saves half of it. An
engine that evicts the beginning first saves nothing until all of it fits [a].

{table(("blocks kept", "prompt tokens found"), _budgets(result))}

Not shown: a single shared prompt makes the savings large. With many prompts they depend on the
budget."""


def _budgets(result: Result) -> Iterator[Sequence[str]]:
    for row in result["budgets"]:
        yield f"{row['max_cached_blocks']}", percent(row["hit_rate"])


def panels(result: Result) -> list[Panel]:
    """Plot the computed tokens, and the hits by budget."""
    budgets = result["budgets"]
    loads = ("stream", "burst", "chats")
    return [
        Panel(
            title="Prompt tokens computed",
            x_label="",
            y_label="tokens (thousands)",
            series=[
                Series(
                    label=f"sharing {switch}",
                    x=["system prompt,\nstream", "system prompt,\nat once", "chats"],
                    y=[result[load][switch]["num_prefill_tokens"] / 1000 for load in loads],
                )
                for switch in ("off", "on")
            ],
        ),
        Panel(
            title="What a budget keeps",
            x_label="blocks that the cache may keep",
            y_label="prompt tokens found (%)",
            series=[
                Series(
                    label="leaves evicted first",
                    x=by(budgets, "max_cached_blocks"),
                    y=[100 * row["hit_rate"] for row in budgets],
                )
            ],
        ),
    ]
