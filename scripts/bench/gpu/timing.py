"""How versions are timed against each other, and what their samples say."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.gpu.device import Call, Samples, one_line
from mie.arithmetic import ceil_div

CALLS = 20
"""Calls of a sample, so that the launch of the graph weighs little."""

Version = Callable[[], Samples]
"""Takes one pass of samples."""


def rotating(calls: Sequence[Call]) -> list[Call]:
    """At least `CALLS` calls, each given one as often as the others."""
    return list(calls) * ceil_div(CALLS, len(calls))


def timed_in_turns(versions: Mapping[str, Version]) -> dict[str, dict[str, Any]]:
    """Each version's figures after passes in the order A-B-B-A; a failure is its reason."""
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
    """Median, least and most of all samples, and by how much the passes' medians differ."""
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
