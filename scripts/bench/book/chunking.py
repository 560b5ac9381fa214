"""Measure how long running requests wait for a token while a long prompt is computed."""

from itertools import pairwise
from typing import Any

from bench.book.chapter import DEVICE, MODEL, Result, Scale, device_costs, rows, simulate, times
from mie.lab.draws import Fixed, Uniform
from mie.lab.loads import interference
from mie.lab.metrics import percentile, summarize
from mie.lab.sim.costs import MILLISECOND

TITLE = "Chunked prefill"
CHUNKS = (64, 128, 256, 512, 1024, 2048, 4096)
LONG_LEN = 4096
BUDGET = 8192


def run(scale: Scale) -> Result:
    """Run the same load with growing chunks, and without chunking."""
    load = {
        "num_running": 16,
        "input_len": Uniform(32, 128),
        "output_len": Fixed(400 if scale == "full" else 120),
        "num_long": 4 if scale == "full" else 1,
        "long_len": LONG_LEN,
        "first_ms": 2000,
        "every_ms": 3000,
    }
    chunks = CHUNKS if scale == "full" else CHUNKS[::3]
    return {
        "settings": {
            "device": DEVICE,
            "model": MODEL,
            **{name: value for name, value in load.items() if isinstance(value, int)},
        },
        "chunks": [
            {"max_prefill_chunk": chunk, **_numbers(load, max_prefill_chunk=chunk)}
            for chunk in chunks
        ],
        "unchunked": _numbers(load, enable_chunked_prefill=False),
    }


def _numbers(load: dict[str, Any], **settings: Any) -> dict[str, Any]:
    result = simulate(
        device_costs(),
        interference(**load),
        num_blocks=2600,
        max_model_len=BUDGET,
        max_num_batched_tokens=BUDGET,
        **settings,
    )
    readers = [each for each in result.records if not each.request_id.startswith("long")]
    first = load["first_ms"] * MILLISECOND  # until then they wait for each other's prompts
    tokens = [pair for each in readers for pair in pairwise(each.token_ns[0])]
    gaps = [later - earlier for earlier, later in tokens if later > first]
    long_ones = [each.ttft or 0 for each in result.records if each not in readers]
    throughput = summarize(result.records, result.duration_ns, metrics=())["output_throughput"]
    return {
        "worst_itl_ms": max(gaps) / MILLISECOND,
        "median_itl_ms": percentile(gaps, 50) / MILLISECOND,
        "long_ttft_ms": percentile(long_ones, 50) / MILLISECOND,
        "output_throughput": throughput,
    }


def facts(result: Result) -> dict[str, str]:
    """Return the texts of the page."""
    settings, whole = result["settings"], result["unchunked"]
    row = min(result["chunks"], key=lambda row: abs(int(row["max_prefill_chunk"]) - 512))
    named = [(f"{each['max_prefill_chunk']:,}", each) for each in result["chunks"]]
    wait, chunked_wait = whole["worst_itl_ms"], row["worst_itl_ms"]
    return {
        "num_running": str(settings["num_running"]),
        "num_long": str(settings["num_long"]),
        "long_len": f"{settings['long_len']:,}",
        "every": f"{settings['every_ms'] / 1000:g}",
        "device": settings["device"],
        "model": settings["model"],
        "itl": f"{whole['median_itl_ms']:,.0f}",
        "chunk": str(row["max_prefill_chunk"]),
        "wait": f"{wait:,.0f}",
        "chunked_wait": f"{chunked_wait:,.0f}",
        "gain": times(wait, chunked_wait, 1),
        "ttft": f"{whole['long_ttft_ms']:,.0f}",
        "chunked_ttft": f"{row['long_ttft_ms']:,.0f}",
        "chunks": rows(
            (name, f"{each['worst_itl_ms']:,.0f}", f"{each['long_ttft_ms']:,.0f}")
            for name, each in [*named, ("whole prompt", whole)]
        ),
    }
