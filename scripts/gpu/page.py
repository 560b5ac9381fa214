"""Write the results to two files: all of them as JSON, and a page for docs/gpu/."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bench.gpu.end_to_end import PROMPT_LENGTH, WEIGHT_SIZES
from bench.harness import table

from gpu.run import Run
from mie.lab.sim.costs import decode_work
from mie.lab.sim.devices import DEVICES, costs_on, find_shape, window_of


def write_results(run: Run, state: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> None:
    """Write both files with the results so far."""
    values = {"is_dry_run": run.is_dry_run, "state": state, "parts": parts}
    (run.directory / "gpu_check.json").write_text(json.dumps(values, indent=2) + "\n")
    names = ("bench.md", "arrivals.md")
    pages = [path.read_text() if (path := run.directory / name).exists() else "" for name in names]
    page = as_markdown(values, *pages)
    (run.directory / "gpu_check.md").write_text(page)


def as_markdown(values: Mapping[str, Any], bench: str, arrivals: str) -> str:
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
        lines += ["", "## Decode steps beside the simulator's", "", *beside_simulated(values)]
    if arrivals:
        lines += ["", "## Arrivals", "", arrivals.rstrip()]
    return "\n".join(lines) + "\n"


def beside_simulated(values: Mapping[str, Any]) -> list[str]:
    """Return the benchmark's decode steps beside the simulator's on the same device.

    The steps are in the middle of the answers. The ratio is how far the assumed rates are off.
    """
    if values["is_dry_run"]:
        return ["A dry run measures nothing."]
    state = values["state"]
    name, count = state.get("device", "No device"), state.get("num_multiprocessors")
    devices = [
        device
        for device in DEVICES.values()  # every Jetson is an "Orin"
        if (gpu := device.gpu) and gpu.name in name and gpu.num_multiprocessors == count
    ]
    found = [part["details"] for part in values["parts"] if part["name"] == "benchmark"]
    if not devices:
        sought = f"{name!r} of {count} multiprocessors"
        return [f"The simulator has no {sought}; it has {', '.join(DEVICES)}."]
    rows = []
    for row in found[0].get("end_to_end", []) if found else []:
        if row["engine"] in ("mie", *WEIGHT_SIZES):
            count, tokens = row["num_requests"], row["num_tokens"]
            context = count * PROMPT_LENGTH + tokens // 2
            layer, head = WEIGHT_SIZES.get(row["engine"], (2, 2))
            shape = find_shape(row["model"])
            work = decode_work(count, context, window_of(shape))
            costs = costs_on(devices[0], shape, layer_bits=8 * layer, head_bits=8 * head)
            simulated = costs.step_ns(work) / 1e6
            what = f"{row['engine']}, {row['model']}, {count} requests"
            ratio = row["step_ms"] / simulated
            rows.append((what, f"{row['step_ms']:.3f}", f"{simulated:.3f}", f"{ratio:.2f}"))
    return table(("step", "measured ms", "simulated ms", "measured / simulated"), rows)


def short_details(part: Mapping[str, Any]) -> str:
    """Return a part's counts in a few words. The benchmarks and the environment have sections."""
    if part["name"] in ("environment", "arrivals", "benchmark"):
        return ""
    items = part["details"].items()
    return ", ".join(f"{key} {value}" for key, value in items if key != "failures")
