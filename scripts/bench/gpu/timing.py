"""Time versions against each other, and summarise their samples."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.gpu.device import Call, Samples, one_line
from mie.base.arithmetic import ceil_div

CALLS = 20
"""Calls of a sample, enough that the launch of the graph hardly counts."""

Version = Callable[[], Samples]
"""Takes one pass of samples."""


def rotating(calls: Sequence[Call]) -> list[Call]:
    """Return at least `CALLS` calls, with each given one equally often."""
    return list(calls) * ceil_div(CALLS, len(calls))


def timed_in_turns(versions: Mapping[str, Version]) -> dict[str, dict[str, Any]]:
    """Return each version's figures after passes in the order A-B-B-A, or why it failed."""
    passes: dict[str, list[Samples]] = {name: [] for name in versions}
    failed: dict[str, dict[str, Any]] = {}
    for name in [*versions, *reversed(list(versions))]:
        if name in failed:
            continue
        try:
            passes[name].append(versions[name]())
        except Exception as error:
            failed[name] = {"reason": one_line(error)}
    return {name: failed.get(name) or figures(passes[name]) for name in versions}


def figures(passes: Sequence[Samples]) -> dict[str, Any]:
    """Return median, least and most of all samples, and how far the passes' medians differ."""
    values = [value for each in passes for value in each.values]
    medians = [statistics.median(each.values) for each in passes]
    return {
        "median_us": statistics.median(values),
        "min_us": min(values),
        "max_us": max(values),
        "num_samples": len(values),
        "noise": max(medians) / min(medians) - 1,
        "method": passes[0].method,
    }
