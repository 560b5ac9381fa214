"""Measure how long running requests wait for a token while a long prompt is computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from mie.sim.book.chapter import Headline, Panel, Result, Scale, Series, by, simulate, table, times
from mie.sim.clock import MILLISECOND
from mie.sim.devices import costs_on, find_device
from mie.sim.draws import Fixed, Uniform
from mie.sim.loads import interference
from mie.sim.metrics import percentile, summarize
from mie.sim.shapes import find_shape

DEVICE, MODEL = "a10g", "Llama-3.1-8B"
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
        costs_on(find_device(DEVICE), find_shape(MODEL)),
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


def _row(result: Result, chunk: int) -> dict[str, Any]:
    """Return the row of the nearest chunk."""
    return min(result["chunks"], key=lambda row: abs(int(row["max_prefill_chunk"]) - chunk))


def headlines(result: Result) -> list[Headline]:
    """Return the findings on chunking."""
    row, whole = _row(result, 512), result["unchunked"]
    return [
        Headline(
            what=f"longest wait for a token while {LONG_LEN:,} tokens of a prompt come",
            here=f"{whole['worst_itl_ms']:,.0f} → {row['worst_itl_ms']:,.0f} ms "
            f"({times(whole['worst_itl_ms'], row['worst_itl_ms'], 1)} less)",
        ),
        Headline(
            what="the price: the long prompt's first token",
            here=f"{whole['long_ttft_ms']:,.0f} → {row['long_ttft_ms']:,.0f} ms",
        ),
    ]


def describe(result: Result) -> str:
    """Return the chapter's text."""
    settings, row, whole = result["settings"], _row(result, 512), result["unchunked"]
    return f"""\
{settings["num_running"]} answers are generated on a simulated {settings["device"]} with
{settings["model"]}, a token every {whole["median_itl_ms"]:,.0f} ms. Meanwhile
{settings["num_long"]} prompts of {settings["long_len"]:,} tokens arrive, one every
{settings["every_ms"] / 1000:g} s. If such a prompt is computed in one step, the others wait
{whole["worst_itl_ms"]:,.0f} ms for their next token. In chunks of {row["max_prefill_chunk"]}
(`max_prefill_chunk`) they wait {row["worst_itl_ms"]:,.0f} ms at most, and the TTFT of the long
prompt is {row["long_ttft_ms"]:,.0f} ms instead of {whole["long_ttft_ms"]:,.0f}. Each chunk reads
the weights and all earlier keys again, so very small chunks cost the long prompt more than they
give the others.

{table(("chunk", "longest wait for a token, ms", "long prompt's first token, ms"), _rows(result))}

Not shown: the device is a table of costs, and long prompts arrive one at a time."""


def _rows(result: Result) -> Iterator[Sequence[str]]:
    whole = result["unchunked"]
    for row in [*result["chunks"], whole]:
        name = "whole prompt" if row is whole else f"{row['max_prefill_chunk']:,}"
        yield name, f"{row['worst_itl_ms']:,.0f}", f"{row['long_ttft_ms']:,.0f}"


def panels(result: Result) -> list[Panel]:
    """Plot the latency of both sides by chunk."""
    rows, whole = result["chunks"], result["unchunked"]
    chunks = by(rows, "max_prefill_chunk")
    ends = [chunks[0], chunks[-1]]
    return [
        Panel(
            title=title,
            x_label="chunk (tokens)",
            y_label=label,
            log_x=True,
            log_y=name == "worst_itl_ms",
            series=[
                Series(label="chunked", x=chunks, y=by(rows, name)),
                Series(label="whole prompt", x=ends, y=[whole[name]] * 2, is_dashed=True),
            ],
        )
        for title, label, name in (
            ("Those who read", "longest wait for a token (ms)", "worst_itl_ms"),
            ("The long prompt", "time to first token (ms)", "long_ttft_ms"),
        )
    ]
