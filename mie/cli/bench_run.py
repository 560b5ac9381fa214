"""Start the runs of the benchmarks, and describe them in the results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from mie.sim.driver import Bench, LoadResult
    from mie.sim.remote import ServedResult
    from mie.sim.workload import Workload

    AnyResult: TypeAlias = LoadResult | ServedResult


def run_engine_load(
    bench: Bench, workload: Workload, max_concurrency: int | None = None
) -> LoadResult:
    """Run the load with an empty prefix cache."""
    from mie.sim.driver import run_load

    bench.engine.reset_prefix_cache()
    return run_load(bench, workload, max_concurrency=max_concurrency)


def about(place: Mapping[str, Any], workload: Workload, result: AnyResult) -> dict[str, Any]:
    """Return the place, the load, and the counts of a run besides its times."""
    return {
        "backend": "mie",
        **place,
        "workload": workload.name,
        "workload_sha256": workload.digest,
        "num_steps": result.num_steps,
        "num_preemptions": result.num_preempted,
        "num_cached_tokens": result.num_cached_tokens,
        "peak_blocks": result.peak_blocks,
    }


def errors(result: AnyResult) -> dict[str, str]:
    """Return the reasons of refusals, by request."""
    return {record.request_id: record.error for record in result.records if record.error}


def exit_code(result: AnyResult) -> int:
    """Return 1 if a request failed, else 0."""
    return 1 if any(record.error for record in result.records) else 0
