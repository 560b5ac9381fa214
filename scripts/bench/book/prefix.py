"""Measure prefix sharing, where a system prompt is computed once and stored once."""

from typing import Any

from bench.book import published
from bench.book.chapter import DEVICE, MODEL, Result, Scale, device_costs, percent, rows, simulate
from mie.lab.draws import Fixed, Uniform
from mie.lab.loads import chats, independent
from mie.lab.metrics import summarize
from mie.lab.sim.costs import MILLISECOND, Costs
from mie.lab.workload import Text, Workload, WorkloadRequest

TITLE = "Prefix sharing"
SYSTEM_LEN = 512
BUDGETS = (0, 4, 8, 16, 24, 32, 40, 48, 64)


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
                    published.COSTS, lone, max_num_seqs=4, num_blocks=1200, max_cached_blocks=budget
                ),
            }
            for budget in BUDGETS
        ],
        "chats": _with_and_without(
            device_costs(), chats(num_chats=48 if is_full else 4, request_rate=0.5), num_blocks=2600
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


def facts(result: Result) -> dict[str, str]:
    """Return the texts of the page."""
    stream, burst, chat = result["stream"], result["burst"], result["chats"]
    return {
        "system_len": str(SYSTEM_LEN),
        "device": DEVICE,
        "model": MODEL,
        "num_stream": str(stream["num_requests"]),
        "num_burst": str(burst["num_requests"]),
        "num_turns": str(chat["num_requests"]),
        "computed": _change(stream, "num_prefill_tokens"),
        "blocks": _change(burst, "peak_blocks"),
        "ttft": _change(stream, "median_ttft_ms"),
        "chat_computed": _change(chat, "num_prefill_tokens"),
        "saved": percent(_saved(stream, "num_prefill_tokens"), 1),
        "ttft_saved": percent(_saved(stream, "median_ttft_ms")),
        "blocks_on": f"{burst['on']['peak_blocks']:,}",
        "blocks_off": f"{burst['off']['peak_blocks']:,}",
        "chat_hits": percent(chat["on"]["hit_rate"]),
        "chat_ttft_on": f"{chat['on']['median_ttft_ms']:,.0f}",
        "chat_ttft_off": f"{chat['off']['median_ttft_ms']:,.0f}",
        "budgets": rows(
            (str(row["max_cached_blocks"]), percent(row["hit_rate"])) for row in result["budgets"]
        ),
    }


def _saved(pair: dict[str, Any], name: str) -> float:
    return float(1 - pair["on"][name] / pair["off"][name])


def _change(pair: dict[str, Any], name: str) -> str:
    off, on = pair["off"][name], pair["on"][name]
    return f"{off:,.0f} → {on:,.0f} (−{percent(_saved(pair, name), 1)})"
