"""Measure memory pressure: the cost of a small pool, and the gain of guards against thrashing."""

import math
from typing import Any

from bench.book import published
from bench.book.chapter import (
    DEVICE,
    MODEL,
    Result,
    Scale,
    column,
    device_costs,
    percent,
    rows,
    simulate,
    times,
)
from mie.lab.sim.driver import LoadResult
from mie.lab.workload import Workload

TITLE = "Preemption under memory pressure"
SHARES = (
    *(2.0, 1.5, 1.2, 1.0, 0.85, 0.7, 0.6, 0.5, 0.4),
    *(0.3, 0.25, 0.2, 0.15, 0.12, 0.1, 0.08, 0.06, 0.04),
)
"""[c]'s shares of the blocks that the load would use at its peak."""
SWAP_SHARES = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1)
WATERMARKS = (0.0, 0.01, 0.02, 0.04, 0.08, 0.12, 0.2)
TIGHT = 0.5
"""The share at which watermarks and guards are tried."""
MODES = ("recompute", "recompute without a prefix cache", "swap")
NUM_SEATS = 32
BLOCK_SIZE = 16


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
            {"share": share, **{mode: _costs_of(load, int(share * peak), mode) for mode in MODES}}
            for share in (SWAP_SHARES if is_full else SWAP_SHARES[::3])
        ],
    }


def _serve(load: Workload, num_blocks: int, **settings: Any) -> LoadResult:
    """Run a load with budget for all prompts in a step, so that a round equals a round of [c]."""
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


def _costs_of(load: Workload, num_blocks: int, mode: str) -> dict[str, Any]:
    """Run the same load on a device, where recomputing and swapping have costs."""
    result = simulate(
        device_costs(),
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


def facts(result: Result) -> dict[str, str]:
    """Return the texts of the page."""
    settings, pools, modes = result["settings"], result["pools"], result["modes"]
    count, ample = settings["num_requests"], pools[0]
    half, tenth, least = (_at(pools, share) for share in (0.5, 0.1, 0.0))
    enough = [row["share"] for row in pools if row["num_completed"] == count]
    completed, servable = (sum(column(pools, f"num_{name}")) for name in ("completed", "servable"))
    bare, guarded = _guard(result, 0.0, True), _guard(result, 0.04, False)
    tight = _at(modes, 0.3)
    marks = result["watermarks"]
    needed = min(column(marks, "num_prefill_tokens"))
    return {
        "num_requests": str(count),
        "long": percent(published.MIXED_LONG),
        "num_seats": str(settings["max_num_seqs"]),
        "device": settings["device"],
        "model": settings["model"],
        "peak": f"{settings['peak_blocks']:,}",
        "smallest": f"{min(enough, default=math.inf):.2f}",
        "pools": f"{ample['share']} … {pools[-1]['share']} ×",
        "completed": f"{completed:,} of {servable:,}",
        "half_rounds": times(half["rounds"], ample["rounds"]),
        "half_preemptions": f"{half['num_preemptions']:,}",
        "tenth_rounds": times(tenth["rounds"], ample["rounds"], 1),
        "tenth_preemptions": f"{tenth['num_preemptions']:,}",
        "guards": f"{bare:,} → {guarded:,}",
        "tight": str(tight["share"]),
        "swap": times(tight["recompute"]["duration_ns"], tight["swap"]["duration_ns"]),
        "least_blocks": str(least["num_blocks"]),
        "num_cut": str(least["num_cut"]),
        "num_refused": str(least["num_refused"]),
        "num_loads": str(marks[0]["num_loads"]),
        "verdict": _verdict(result),
        "watermarks": rows(
            (
                f"{row['watermark']:g}",
                f"{row['num_preemptions']:,}",
                f"{row['rounds']:,}",
                f"{row['num_prefill_tokens'] - needed:,}",
                f"{row['duration_ns'] / 1e9:,.1f}",
            )
            for row in marks
        ),
        "modes": rows(
            (f"{row['share']:g}", *(f"{row[mode]['duration_ns'] / 1e9:,.1f}" for mode in MODES))
            for row in modes
        ),
    }


def _at(table: list[dict[str, Any]], share: float) -> dict[str, Any]:
    """Return the row of the nearest share."""
    return min(table, key=lambda row: abs(float(row["share"]) - share))


def _guard(result: Result, watermark: float, admit: bool) -> int:
    """Return the number of preemptions with these guards."""
    [count] = [
        row["num_preemptions"]
        for row in result["guards"]
        if row["watermark"] == watermark and row["admit_after_preemption"] == admit
    ]
    return int(count)


def _verdict(result: Result) -> str:
    marks = sorted({row["watermark"] for row in result["guards"]})
    gains = [_guard(result, mark, True) - _guard(result, mark, False) for mark in marks]
    if not any(gains):
        return "changes nothing here, with any watermark"
    return f"saves {min(gains)} … {max(gains)} more"
