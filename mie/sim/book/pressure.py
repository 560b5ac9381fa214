"""Measure memory pressure: the cost of a small pool, and the gain of guards against thrashing."""

from __future__ import annotations

import math
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
    times,
)
from mie.sim.devices import costs_on, find_device
from mie.sim.driver import LoadResult
from mie.sim.shapes import find_shape
from mie.sim.workload import Workload

SHARES = (
    *(2.0, 1.5, 1.2, 1.0, 0.85, 0.7, 0.6, 0.5, 0.4),
    *(0.3, 0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06, 0.04),
)
"""[c]'s shares of the blocks that the load would use at its peak."""
SWAP_SHARES = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1)
WATERMARKS = (0.0, 0.01, 0.02, 0.04, 0.08, 0.12, 0.2)
TIGHT = 0.5
"""The share at which watermarks and guards are tried."""
NUM_SEATS = 32
BLOCK_SIZE = 16
DEVICE, MODEL = "a10g", "Llama-3.1-8B"


def run(scale: Scale) -> Result:
    """Run a load in ever smaller pools, and with the settings that matter there."""
    is_full = scale == "full"
    load = published.mixed(256 if is_full else 24, seed=0)
    peak = _serve(load, NUM_SEATS * 1024 // BLOCK_SIZE).peak_blocks
    tight = int(TIGHT * peak)
    loads = [published.mixed(len(load.requests), seed) for seed in range(5 if is_full else 1)]
    return {
        "settings": {
            "num_requests": len(load.requests),
            "max_num_seqs": NUM_SEATS,
            "peak_blocks": peak,
            "device": DEVICE,
            "model": MODEL,
        },
        "pools": [
            {"share": share, **_outcome(load, int(share * peak))}
            for share in (SHARES if is_full else SHARES[::5])
        ],
        "watermarks": [
            {"watermark": watermark, **_total(loads, tight, watermark=watermark)}
            for watermark in (WATERMARKS if is_full else WATERMARKS[::3])
        ],
        "guards": [
            {
                "watermark": watermark,
                "admit_after_preemption": admit,
                **_total(loads, tight, watermark=watermark, admit_after_preemption=admit),
            }
            for watermark in (0.0, 0.01, 0.04)
            for admit in (True, False)
        ],
        "modes": [
            {
                "share": share,
                **{mode: _costs_of(load, int(share * peak), mode) for mode in _MODES},
            }
            for share in (SWAP_SHARES if is_full else SWAP_SHARES[::3])
        ],
    }


def _serve(load: Workload, num_blocks: int, **settings: Any) -> LoadResult:
    """Run a load with budget for all prompts in a step, so that a round is that of [c]."""
    return simulate(
        published.COSTS,
        load,
        num_blocks=num_blocks,
        max_num_seqs=NUM_SEATS,
        max_num_batched_tokens=NUM_SEATS * 1024,
        **settings,
    )


def _outcome(load: Workload, num_blocks: int) -> dict[str, Any]:
    result = _serve(load, num_blocks)
    room = num_blocks * BLOCK_SIZE + 1  # the last token's keys and values are never stored
    wanted = [
        (record, each.max_tokens)
        for record, each in zip(result.records, load.requests, strict=True)
    ]
    servable = [
        record.num_output == max_tokens
        for record, max_tokens in wanted
        if record.num_prompt + max_tokens <= room
    ]
    return {
        "num_blocks": num_blocks,
        "rounds": len(result.steps),
        "num_preemptions": result.num_preempted,
        "num_servable": len(servable),
        "num_completed": sum(servable),
        "num_cut": sum(0 < record.num_output < most for record, most in wanted),
        "num_refused": sum(record.error is not None for record, _ in wanted),
    }


def _total(loads: list[Workload], num_blocks: int, **settings: Any) -> dict[str, Any]:
    """Sum up the results of all loads."""
    results = [_serve(load, num_blocks, **settings) for load in loads]
    return {
        "num_loads": len(loads),
        "num_preemptions": sum(result.num_preempted for result in results),
        "rounds": sum(len(result.steps) for result in results),
        "num_prefill_tokens": sum(result.num_prefill_tokens for result in results),
        "duration_ns": sum(result.duration_ns for result in results),
    }


_MODES = ("recompute", "recompute without a prefix cache", "swap")


def _costs_of(load: Workload, num_blocks: int, mode: str) -> dict[str, Any]:
    """Run the same load on a device, where recomputing and swapping have costs."""
    result = simulate(
        costs_on(find_device(DEVICE), find_shape(MODEL)),
        load,
        num_blocks=num_blocks,
        max_num_seqs=NUM_SEATS,
        preemption_mode="swap" if mode == "swap" else "recompute",
        enable_prefix_caching=mode != "recompute without a prefix cache",
        num_host_blocks=2048 if mode == "swap" else 0,
    )
    return {
        "duration_ns": result.duration_ns,
        "num_preemptions": result.num_preempted,
        "num_prefill_tokens": result.num_prefill_tokens,
        "num_moved_blocks": sum(step.num_exported + step.num_imported for step in result.steps),
    }


def _smallest_without_loss(result: Result) -> float:
    """Return the smallest pool, as a share, in which every request finished normally."""
    num_requests = result["settings"]["num_requests"]
    shares = (row["share"] for row in result["pools"] if row["num_completed"] == num_requests)
    return min(shares, default=math.inf)


def _guards(result: Result, watermark: float, admit: bool) -> dict[str, Any]:
    [row] = [
        row
        for row in result["guards"]
        if row["watermark"] == watermark and row["admit_after_preemption"] == admit
    ]
    return dict(row)


def _at(rows: list[dict[str, Any]], share: float) -> dict[str, Any]:
    """Return the row of the nearest share."""
    return min(rows, key=lambda row: abs(float(row["share"]) - share))


def headlines(result: Result) -> list[Headline]:
    """Return the findings on preemption."""
    pools = result["pools"]
    served = sum(row["num_completed"] for row in pools), sum(row["num_servable"] for row in pools)
    half, ample = _at(pools, 0.5), pools[0]
    bare, guarded = _guards(result, 0.0, True), _guards(result, 0.04, False)
    tight = _at(result["modes"], 0.3)
    return [
        Headline(
            what=f"all {result['settings']['num_requests']} requests complete down to",
            here=f"{_smallest_without_loss(result):.2f} × of the peak need",
            published="0.08 × [c]",
        ),
        Headline(
            what=f"servable requests completed, all pools ({pools[0]['share']} … "
            f"{pools[-1]['share']} ×)",
            here=f"{served[0]:,} of {served[1]:,}",
            published="4,560; the other 48 outgrow theirs [c]",
        ),
        Headline(
            what="rounds in half of the peak need",
            here=f"{times(half['rounds'], ample['rounds'])}",
            published="1.34 × [c]",
        ),
        Headline(
            what="preemptions without and with guards",
            here=f"{bare['num_preemptions']:,} → {guarded['num_preemptions']:,} (watermark 0.04)",
        ),
        Headline(
            what=f"swap instead of recompute, pool of {tight['share']} ×",
            here=f"{times(tight['recompute']['duration_ns'], tight['swap']['duration_ns'])} faster",
        ),
    ]


def describe(result: Result) -> str:
    """Return the chapter's text."""
    settings, ample = result["settings"], result["pools"][0]
    half, tight, least = (_at(result["pools"], share) for share in (0.5, 0.1, 0.0))
    num_loads = result["watermarks"][0]["num_loads"]
    return f"""\
{settings["num_requests"]} requests, of which {percent(published.MIXED_LONG)} are long, at
{settings["max_num_seqs"]} seats need {settings["peak_blocks"]:,} blocks at the peak. In a smaller
pool, a decode without a free block preempts the last request to arrive, which is recomputed later.
Half of the peak costs {half["num_preemptions"]:,} preemptions and
{times(half["rounds"], ample["rounds"])} the rounds, a tenth {tight["num_preemptions"]:,} and
{times(tight["rounds"], ample["rounds"], 1)}, mostly because fewer run at once. Every request that
fits the pool completes in every pool. In the smallest, of {least["num_blocks"]} blocks,
{least["num_cut"]} outgrow it and end with "length", and {least["num_refused"]} are refused.

*Guards*, in half of the peak, {num_loads} loads: blocks that an admission leaves free (the
watermark) save preemptions, until they are left unused. Not admitting in a step that preempted
{_verdict(result)}.

{table(("watermark", "preemptions", "rounds", "tokens computed again", "s"), _marks(result))}

*Recompute or swap*, seconds on a simulated {settings["device"]} with {settings["model"]}. The
prefix cache keeps some of a victim's blocks. Swapping keeps all of them, at the cost of transfers
to the host and of its memory.

{table(("pool / peak", *_MODES), _mode_rows(result))}

Not shown: all requests arrive at the start, so preempted requests delay no first token."""


def _verdict(result: Result) -> str:
    marks = {row["watermark"] for row in result["guards"]}
    pairs = [[_guards(result, mark, admit) for admit in (True, False)] for mark in sorted(marks)]
    gains = [admits["num_preemptions"] - waits["num_preemptions"] for admits, waits in pairs]
    if not any(gains):
        return "changes nothing here, with any watermark"
    return f"saves {min(gains)} … {max(gains)} more"


def _marks(result: Result) -> Iterator[Sequence[str]]:
    needed = min(row["num_prefill_tokens"] for row in result["watermarks"])
    for row in result["watermarks"]:
        counts = (row["num_preemptions"], row["rounds"], row["num_prefill_tokens"] - needed)
        cells = [f"{count:,}" for count in counts]
        yield f"{row['watermark']:g}", *cells, f"{row['duration_ns'] / 1e9:,.1f}"


def _mode_rows(result: Result) -> Iterator[Sequence[str]]:
    for row in result["modes"]:
        seconds = [f"{row[mode]['duration_ns'] / 1e9:,.1f}" for mode in _MODES]
        yield f"{row['share']:g}", *seconds


def panels(result: Result) -> list[Panel]:
    """Plot rounds and preemptions by pool."""
    pools, marks = result["pools"], result["watermarks"]
    return [
        Panel(
            title="Ever smaller pools",
            x_label="pool / peak need",
            y_label="rounds, preemptions",
            log_x=True,
            log_y=True,
            series=[
                Series(label="rounds", x=by(pools, "share"), y=by(pools, "rounds")),
                Series(
                    label="preemptions",
                    x=by(pools, "share"),
                    y=[row["num_preemptions"] or None for row in pools],
                ),
            ],
        ),
        Panel(
            title="Watermark, in half of the peak",
            x_label="share of the blocks left free (%)",
            y_label="preemptions",
            series=[
                Series(
                    label="preemptions",
                    x=[100 * row["watermark"] for row in marks],
                    y=by(marks, "num_preemptions"),
                )
            ],
        ),
    ]
