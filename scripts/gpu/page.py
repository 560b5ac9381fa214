"""Write the results to two files: all of them as JSON, and a page for docs/gpu/."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gpu.predictions import beside
from gpu.run import Run


def write_results(run: Run, state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
    """Write both files with the results so far."""
    values = {"is_dry_run": run.is_dry_run, "state": state, "parts": parts}
    (run.directory / "gpu_check.json").write_text(json.dumps(values, indent=2) + "\n")
    bench = run.directory / "bench.md"
    page = as_markdown(values, bench.read_text() if bench.exists() else "")
    (run.directory / "gpu_check.md").write_text(page)


def as_markdown(values: Mapping[str, Any], bench: str) -> str:
    """Return the page for docs/gpu/."""
    state = values["state"]
    lines = [f"# {state.get('device', 'No device')}, {state['date']}", ""]
    if values["is_dry_run"]:
        lines += ["**A dry run on the emulator: nothing here was measured on hardware.**", ""]
    lines += [f"* {key}: {value}" for key, value in state.items()]
    lines += ["", "## Parts", "", "| part | | seconds | |", "|---|---|---|---|"]
    for part in values["parts"]:
        reason = part["reason"].replace("|", "\\|").replace("\n", " ")
        note = "; ".join(filter(None, [reason, short_details(part)]))
        lines.append(f"| {part['name']} | {part['status']} | {part['seconds']:.0f} | {note} |")
    for part in values["parts"]:
        failures = part["details"].get("failures", []) if part["status"] == "failed" else []
        if failures:
            lines += ["", f"## Failed: {part['name']}", "", *(f"* `{each}`" for each in failures)]
    if bench:
        lines += ["", "## Benchmark", "", bench.rstrip()]
        lines += ["", "## Measured beside predicted", "", *beside_predicted(values)]
    return "\n".join(lines) + "\n"


def beside_predicted(values: Mapping[str, Any]) -> list[str]:
    """Return the benchmark's times beside those that docs/gpu/predictions.md predicts."""
    if values["is_dry_run"]:
        return ["A dry run measures nothing."]
    found = [part["details"] for part in values["parts"] if part["name"] == "benchmark"]
    device = values["state"].get("device", "No device")
    return beside(found[0] if found else {}, device)


def short_details(part: Mapping[str, Any]) -> str:
    """Return a part's counts in a few words. The benchmark and the environment have sections."""
    if part["name"] in ("environment", "benchmark"):
        return ""
    items = part["details"].items()
    return ", ".join(f"{key} {value}" for key, value in items if key != "failures")
