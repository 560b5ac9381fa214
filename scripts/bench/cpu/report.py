"""Write the results of bench_cpu.py as Markdown and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.cpu.goals import Reached, goals_reached, verdict
from bench.cpu.results import BASELINE, ModelResults, Row, number, rows_of


def percent(value: float | None) -> str:
    """Return a share as a percentage."""
    if value is None:
        return "–"
    return f"{100 * value:.{1 if value < 0.1 else 0}f} %"


def factor(value: float | None) -> str:
    """Return a ratio as a factor."""
    return "–" if value is None else f"{value:.2f} ×"


def markdown(
    state: Mapping[str, Any], all_results: Sequence[ModelResults], skipped: Sequence[str]
) -> str:
    """Return all results as Markdown."""
    lines = [f"* {key}: {value}" for key, value in state.items()]
    lines += [f"* skipped: {each}" for each in skipped]
    for results in all_results:
        lines += ["", f"### {results.name}", "", *_engine_table(results), "", *_row_tables(results)]
    goals = goals_reached(all_results, avx512=bool(state["avx512"]))
    lines += ["### Goals", "", *_goal_table(goals)] if goals else []
    return "\n".join(lines)


def _engine_table(results: ModelResults) -> list[str]:
    limits = results.limits
    lines = [
        f"Measured beside it: {limits.bandwidth / 1e9:.1f} GB/s read, "
        f"{limits.sgemm / 1e9:.0f} GFLOP/s in the best sgemm.",
        "",
        "| engine | loads in, s | weights, MiB | peak memory, MiB: loaded | at the end "
        "| same greedy tokens | version |",
        "|---|---|---|---|---|---|---|",
    ]
    for engine, facts in results.loaded.items():
        weights = results.costs.num_parameters * results.formats[engine].weight
        sizes = [weights, facts["loaded_bytes"], facts["peak_bytes"]]
        cells = (
            engine,
            f"{facts['load_seconds']:.1f}",
            *(f"{size / 2**20:.0f}" for size in sizes),
            facts["agreement"],
            facts["version"],
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _row_tables(results: ModelResults) -> list[str]:
    lines = []
    for workload in results.workloads.values():
        rows = [row for row in rows_of(results) if row.workload == workload.name]
        if rows:
            lines += [
                f"**{workload.name}**: {workload.description}",
                "",
                "| engine | tokens/s | mie ÷ it | TTFT, ms | of bandwidth | of sgemm | overhead |",
                "|---|---|---|---|---|---|---|",
                *map(_line, rows),
                "",
            ]
    return lines


def _line(row: Row) -> str:
    first = row.time_to_first_token
    ratio = "–" if row.baseline_ratio is None else f"{row.baseline_ratio} ×"
    cells = (
        row.engine,
        str(row.tokens_per_second),
        "1" if row.engine == BASELINE else ratio,
        "–" if first is None else number(1000 * first),
        percent(row.bandwidth_share),
        percent(row.sgemm_share),
        percent(row.overhead),
    )
    return f"| {' | '.join(cells)} |"


def _goal_table(goals: Sequence[Reached]) -> list[str]:
    engines = list(dict.fromkeys(name for each in goals for name in each.values))
    lines = [
        f"| model | goal | must | aim | {' | '.join(engines)} |",
        "|---|---|---|---|" + "---|" * len(engines),
    ]
    for each in goals:
        goal, shown = each.goal, percent if each.goal.is_share else factor
        cells = [goal.model, goal.text, shown(goal.must), shown(goal.aim)]
        for name in engines:
            value = each.values.get(name)
            cells.append("–" if value is None else f"{shown(value)}: {verdict(goal, value)}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def as_json(
    state: Mapping[str, Any], all_results: Sequence[ModelResults], skipped: Sequence[str]
) -> dict[str, Any]:
    """Return all results with every sample, as JSON data."""
    goals = [
        {
            "goal": each.goal.text,
            "model": each.goal.model,
            "must": each.goal.must,
            "aim": each.goal.aim,
            "reached": each.values,
        }
        for each in goals_reached(all_results, avx512=bool(state["avx512"]))
    ]
    models = [
        {
            "name": results.name,
            "limits": asdict(results.limits),
            "engines": results.loaded,
            "workloads": {name: asdict(each) for name, each in results.workloads.items()},
            "rows": [asdict(row) for row in rows_of(results)],
            "samples": [asdict(each) for each in results.samples],
        }
        for results in all_results
    ]
    return {"state": state, "skipped": list(skipped), "models": models, "goals": goals}
