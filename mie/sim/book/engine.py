"""Measure the real engine: what batching gains over one request at a time, and what paging gains.

The rest of the book is simulated. This chapter is measured on the machine where it runs.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mie.checkpoint.locate import locate_model
from mie.events import read_log
from mie.sim.book.chapter import (
    Headline,
    Panel,
    Result,
    Scale,
    Series,
    percent,
    simulate,
    table,
    times,
)
from mie.sim.book.child import Load, Task, ask
from mie.sim.book.random_model import write_random_model
from mie.sim.calibrate import Fit, fit_costs
from mie.sim.metrics import percentile
from mie.sim.recorded import recording_of

NUM_THREADS = 2
MODELS = ("bundled", "SmolLM2-135M")
LEVELS = (1, 4, 16, 32, 64)
INPUT_LEN, OUTPUT_LEN = 64, 64
CONTEXT = 512
NUM_SLOTS = 4096
"""Number of slots of the paged and of the contiguous cache."""


def run(scale: Scale) -> Result:
    """Run each model by the number of concurrent requests, then with either kind of cache."""
    is_full = scale == "full"
    output_len = OUTPUT_LEN if is_full else 8
    with TemporaryDirectory(prefix="mie-book-") as folder:
        models = [
            {"model": name, **_model(_directory(name, Path(folder)), Path(folder), is_full)}
            for name in (MODELS if is_full else MODELS[:1])
        ]
    return {
        "settings": {
            "num_threads": NUM_THREADS,
            "input_len": INPUT_LEN,
            "output_len": output_len,
            "dtype": "float32",
            "max_model_len": CONTEXT,
        },
        "machine": {
            "date": datetime.date.today().isoformat(),
            "processor": _processor(),
            "python": platform.python_version(),
        },
        "models": models,
    }


def _directory(name: str, folder: Path) -> Path:
    if name == "bundled":
        return locate_model(name)
    directory = folder / name
    directory.mkdir()
    write_random_model(name, directory)
    return directory


def _processor() -> str:
    """Return the processor's name, if Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _model(directory: Path, folder: Path, is_full: bool) -> dict[str, Any]:
    levels = LEVELS if is_full else LEVELS[:2]
    loads = [
        Load(
            num_requests=max(level, 2 if is_full else 1),
            max_concurrency=level,
            input_len=INPUT_LEN,
            output_len=OUTPUT_LEN if is_full else 8,
        )
        for level in levels
    ]
    settings = {"max_num_seqs": LEVELS[-1], "num_blocks": 1024, "max_model_len": 1024}
    task = Task(
        directory=str(directory),
        num_threads=NUM_THREADS,
        settings=settings,
        loads=loads,
        num_rounds=2 if is_full else 1,
    )
    measured = ask("mie.sim.book.child", task)
    fit = _calibrated(task, folder / "calibration.jsonl", 64 if is_full else 4)
    result = {
        "mie": measured,
        "predicted": [_predicted(fit, load, settings) for load in loads],
        "fit": {name: value for name, value in vars(fit).items() if name != "costs"},
        "costs": asdict(fit.costs),
        "transformers": ask("mie.sim.book.peer", Task(**{**vars(task), "num_rounds": 1})),
    }
    return {**result, "caches": _caches(task, is_full)}


def _calibrated(task: Task, trace: Path, most: int) -> Fit:
    """Return costs from a recorded run of another load."""
    record = {**vars(task), "loads": [], "trace": str(trace), "calibrate_with": most}
    ask("mie.sim.book.child", Task(**record))
    return fit_costs(recording_of(read_log(trace)).steps)


def _predicted(fit: Fit, load: Load, settings: dict[str, Any]) -> float:
    """Return the seconds that the load takes in the simulator."""
    seats = {**settings, "max_num_seqs": load.max_concurrency}
    return simulate(fit.costs, load.workload(), **seats).duration_ns / 1e9


def _caches(task: Task, is_full: bool) -> dict[str, Any]:
    """Run a paged and a contiguous cache. The latter has blocks as long as the context."""
    count = 64 if is_full else 12
    load = Load(num_requests=count, max_concurrency=count, input_len=32, output_len=32)
    results: dict[str, Any] = {"num_slots": NUM_SLOTS, **asdict(load)}
    for kind, block_size in (("contiguous", CONTEXT), ("paged", 16)):
        settings = {
            "max_num_seqs": LEVELS[-1],
            "max_model_len": CONTEXT,
            "block_size": block_size,
            "num_blocks": NUM_SLOTS // block_size,
            "enable_prefix_caching": False,
            "watermark": 0.0,  # one block of eight would be an eighth of the sequences
        }
        changed = Task(**{**vars(task), "settings": settings, "loads": [load]})
        [results[kind]] = ask("mie.sim.book.child", changed)["loads"]
    return results


def _rate(load: dict[str, Any]) -> float:
    """Return the tokens a second in the median round."""
    return float(load["num_requests"] * load["output_len"] / percentile(load["seconds"], 50))


def _rates(measured: dict[str, Any]) -> list[float]:
    return [_rate(load) for load in measured["loads"]]


def _predicted_rates(row: dict[str, Any]) -> list[float]:
    return [
        load["num_requests"] * load["output_len"] / seconds
        for load, seconds in zip(row["mie"]["loads"], row["predicted"], strict=True)
    ]


def headlines(result: Result) -> list[Headline]:
    """Return the findings on batching and paging."""
    lines = []
    for row in result["models"]:
        rates, most = _rates(row["mie"]), row["mie"]["loads"][-1]["max_concurrency"]
        lines.append(
            Headline(
                what=f"{row['model']}: tokens/s, {most} requests at once for one after another",
                here=f"{rates[0]:,.0f} → {rates[-1]:,.0f} ({times(rates[-1], rates[0], 1)})",
            )
        )
        caches = row["caches"]
        contiguous, paged = caches["contiguous"], caches["paged"]
        lines.append(
            Headline(
                what=f"{row['model']}: paged for contiguous, {caches['num_slots']:,} slots",
                here=f"{contiguous['peak_running']} → {paged['peak_running']} at once, "
                f"{times(_rate(paged), _rate(contiguous))} tokens/s",
            )
        )
        if "skipped" not in row["transformers"]:
            theirs = _rates(row["transformers"])
            lines.append(
                Headline(
                    what=f"{row['model']}: tokens/s of transformers, as above",
                    here=f"{theirs[0]:,.0f} → {theirs[-1]:,.0f}",
                )
            )
    return lines


def describe(result: Result) -> str:
    """Return the chapter's text."""
    settings, machine = result["settings"], result["machine"]
    parts = [
        f"""\
Measured, not simulated: {machine["date"]}, {machine["processor"]}, {settings["num_threads"]}
threads, Python {machine["python"]}, {result["models"][0]["mie"]["version"]}, float32. Prompts have
{settings["input_len"]} tokens and answers {settings["output_len"]}, greedy. The table shows the
number of concurrent requests, where "1" is one after another. Each engine runs in a separate
process. Tokens/s are medians (least–most) of the rounds. *Predicted* is the simulator, with costs
calibrated on another load."""
    ]
    parts += [_describe_model(row) for row in result["models"]]
    parts.append("""\
Not shown: weights of SmolLM2-135M's shape are random, which does not change the speed. transformers
generates concurrent requests as one batch of equal lengths, which is its best case. Requests that
come and go would wait for each other there.""")
    return "\n\n".join(parts)


def _describe_model(row: dict[str, Any]) -> str:
    mie, peer, caches = row["mie"], row["transformers"], row["caches"]
    contiguous, paged = caches["contiguous"], caches["paged"]
    other = f"skipped: {peer['skipped']}" if "skipped" in peer else _mebibytes(peer)
    version = f" ({peer['version']})" if "version" in peer else ""
    return f"""\
{table((row["model"], "mie, tokens/s", "predicted", "error", "transformers"), _rows(row))}

Peak memory: mie {_mebibytes(mie)}; transformers {other}{version}. The costs miss a step of their
own run by {percent(row["fit"]["median_error"], 1)} in the median. *Contiguous and paged* in the
same memory, {caches["num_slots"]:,} slots, context {CONTEXT}: of {caches["num_requests"]} requests
of {caches["input_len"]} + {caches["output_len"]} tokens, {contiguous["peak_running"]} and
{paged["peak_running"]} run at once, at {_rate(contiguous):,.1f} and {_rate(paged):,.1f}
tokens/s."""


def _rows(row: dict[str, Any]) -> Iterator[Sequence[str]]:
    loads, peer = row["mie"]["loads"], row["transformers"]
    theirs = ["–"] * len(loads) if "skipped" in peer else [f"{rate:,.1f}" for rate in _rates(peer)]
    for load, guess, other in zip(loads, _predicted_rates(row), theirs, strict=True):
        num_tokens, rate = load["num_requests"] * load["output_len"], _rate(load)
        least, most = num_tokens / max(load["seconds"]), num_tokens / min(load["seconds"])
        cells = (
            f"{rate:,.1f} ({least:,.1f}–{most:,.1f})",
            f"{guess:,.1f}",
            f"{guess / rate - 1:+.0%}",
        )
        yield f"{load['max_concurrency']}", *cells, other


def _mebibytes(measured: dict[str, Any]) -> str:
    peak = measured["peak_bytes"]
    return "unknown" if peak is None else f"{peak / 2**20:,.0f} MiB"


def panels(result: Result) -> list[Panel]:
    """Plot throughput by concurrent requests, with a panel for each model."""
    return [
        Panel(
            title=row["model"],
            x_label="requests at once",
            y_label="output (tokens/s)",
            log_x=True,
            log_y=True,
            series=list(_curves(row)),
        )
        for row in result["models"]
    ]


def _curves(row: dict[str, Any]) -> Iterator[Series]:
    x = [load["max_concurrency"] for load in row["mie"]["loads"]]
    yield Series(label="mie", x=x, y=_rates(row["mie"]))
    yield Series(label="predicted", x=x, y=_predicted_rates(row), is_dashed=True)
    if "skipped" not in row["transformers"]:
        yield Series(label="transformers", x=x, y=_rates(row["transformers"]))
