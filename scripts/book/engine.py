"""Measure the real engine: the gain of batching over one request at a time, and of paging.

The rest of the book is simulated. This chapter is measured on the machine where it runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.cpu.shapes import write_model
from bench.harness import machine, run_child

from book.chapter import Panel, Result, Scale, percent, rows, simulate, times
from book.child import Load, Task
from mie.events import read_log
from mie.sim.calibrate import Fit, fit_costs
from mie.sim.metrics import percentile
from mie.sim.recorded import recording_of

TITLE = "The real engine"
NUM_THREADS = 2
MODELS = ("bundled", "SmolLM2-135M")
LEVELS = (1, 4, 16, 32, 64)
INPUT_LEN, OUTPUT_LEN = 64, 64
CONTEXT = 512
NUM_SLOTS = 4096
"""Number of slots of the paged and of the contiguous cache."""
SETTINGS = {"max_num_seqs": LEVELS[-1], "num_blocks": 1024, "max_model_len": 1024}


def run(scale: Scale) -> Result:
    """Run each model by the number of concurrent requests, then with either kind of cache."""
    is_full = scale == "full"
    about, models = machine(), []
    for name in MODELS if is_full else MODELS[:1]:
        with TemporaryDirectory(prefix="mie-book-") as folder:
            write_model(name, Path(folder, "model"))
            models.append({"model": name, **_model(Path(folder), is_full)})
    return {
        "settings": {
            "num_threads": NUM_THREADS,
            "input_len": INPUT_LEN,
            "output_len": OUTPUT_LEN if is_full else 8,
            "dtype": "float32",
            "max_model_len": CONTEXT,
        },
        "machine": {name: about[name] for name in ("date", "processor", "python")},
        "models": models,
    }


def _ask(engine: str, task: Task) -> dict[str, Any]:
    answer: dict[str, Any] = run_child(
        "book.child", asdict(task), arguments=[engine], OMP_NUM_THREADS=str(task.num_threads)
    )
    return answer


def _model(folder: Path, is_full: bool) -> dict[str, Any]:
    loads = [
        Load(
            num_requests=max(level, 2 if is_full else 1),
            max_concurrency=level,
            input_len=INPUT_LEN,
            output_len=OUTPUT_LEN if is_full else 8,
        )
        for level in (LEVELS if is_full else LEVELS[:2])
    ]
    task = Task(
        directory=str(folder / "model"),
        num_threads=NUM_THREADS,
        settings=SETTINGS,
        loads=loads,
        num_rounds=2 if is_full else 1,
    )
    measured = _ask("mie", task)
    trace = folder / "calibration.jsonl"
    record = replace(task, loads=[], trace=str(trace), calibrate_with=64 if is_full else 4)
    _ask("mie", record)
    fit = fit_costs(recording_of(read_log(trace)).steps)
    return {
        "mie": measured,
        "predicted": [_predicted(fit, load) for load in loads],
        "fit": {name: value for name, value in vars(fit).items() if name != "costs"},
        "costs": asdict(fit.costs),
        "transformers": _ask("transformers", replace(task, num_rounds=1)),
        "caches": _caches(task, 64 if is_full else 12),
    }


def _predicted(fit: Fit, load: Load) -> float:
    """Return the seconds that the load takes in the simulator."""
    settings = {**SETTINGS, "max_num_seqs": load.max_concurrency}
    return simulate(fit.costs, load.workload(), **settings).duration_ns / 1e9


def _caches(task: Task, count: int) -> dict[str, Any]:
    """Run a paged and a contiguous cache. The latter has blocks as long as the context."""
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
        [results[kind]] = _ask("mie", replace(task, settings=settings, loads=[load]))["loads"]
    return results


def _rates(measured: dict[str, Any]) -> list[float]:
    """Return the tokens a second of each load in its median round."""
    return [_rate(load) for load in measured["loads"]]


def _rate(load: dict[str, Any]) -> float:
    return float(load["num_requests"] * load["output_len"] / percentile(load["seconds"], 50))


def _predicted_rates(row: dict[str, Any]) -> list[float]:
    return [
        load["num_requests"] * load["output_len"] / seconds
        for load, seconds in zip(row["mie"]["loads"], row["predicted"], strict=True)
    ]


def facts(result: Result) -> dict[str, str]:
    """Return the texts of the page."""
    settings, place = result["settings"], result["machine"]
    return {
        "findings": rows(finding for row in result["models"] for finding in _findings(row)),
        "date": place["date"],
        "processor": place["processor"],
        "python": place["python"],
        "version": result["models"][0]["mie"]["version"],
        "num_threads": str(settings["num_threads"]),
        "input_len": str(settings["input_len"]),
        "output_len": str(settings["output_len"]),
        "models": "\n\n".join(map(_describe, result["models"])),
    }


def _findings(row: dict[str, Any]) -> Iterator[Sequence[str]]:
    name, caches, rates = row["model"], row["caches"], _rates(row["mie"])
    contiguous, paged = caches["contiguous"], caches["paged"]
    yield (
        f"{name}: tokens/s, {row['mie']['loads'][-1]['max_concurrency']} requests at once for one "
        "after another",
        f"{rates[0]:,.0f} → {rates[-1]:,.0f} ({times(rates[-1], rates[0], 1)})",
        "–",
    )
    yield (
        f"{name}: paged for contiguous, {caches['num_slots']:,} slots",
        f"{contiguous['peak_running']} → {paged['peak_running']} at once, "
        f"{times(_rate(paged), _rate(contiguous))} tokens/s",
        "–",
    )
    if "skipped" not in row["transformers"]:
        theirs = _rates(row["transformers"])
        here = f"{theirs[0]:,.0f} → {theirs[-1]:,.0f}"
        yield f"{name}: tokens/s of transformers, as above", here, "–"


def _describe(row: dict[str, Any]) -> str:
    mie, peer, caches = row["mie"], row["transformers"], row["caches"]
    contiguous, paged = caches["contiguous"], caches["paged"]
    other = f"skipped: {peer['skipped']}" if "skipped" in peer else _mebibytes(peer)
    version = f" ({peer['version']})" if "version" in peer else ""
    heads = (row["model"], "mie, tokens/s", "predicted", "error", "transformers")
    return f"""\
{rows([heads, ["---"] * len(heads), *_loads(row)])}

Peak memory: mie {_mebibytes(mie)}; transformers {other}{version}. The costs miss a step of their
own run by {percent(row["fit"]["median_error"], 1)} in the median. *Contiguous and paged* in the
same memory, {caches["num_slots"]:,} slots, context {CONTEXT}: of {caches["num_requests"]} requests
of {caches["input_len"]} + {caches["output_len"]} tokens, {contiguous["peak_running"]} and
{paged["peak_running"]} run at once, at {_rate(contiguous):,.1f} and {_rate(paged):,.1f}
tokens/s."""


def _loads(row: dict[str, Any]) -> Iterator[Sequence[str]]:
    loads, peer = row["mie"]["loads"], row["transformers"]
    theirs = ["–"] * len(loads) if "skipped" in peer else [f"{rate:,.1f}" for rate in _rates(peer)]
    for load, guess, other in zip(loads, _predicted_rates(row), theirs, strict=True):
        num_tokens, rate = load["num_requests"] * load["output_len"], _rate(load)
        least, most = num_tokens / max(load["seconds"]), num_tokens / min(load["seconds"])
        spread = f"{rate:,.1f} ({least:,.1f}–{most:,.1f})"
        error = f"{guess / rate - 1:+.0%}"
        yield f"{load['max_concurrency']}", spread, f"{guess:,.1f}", error, other


def _mebibytes(measured: dict[str, Any]) -> str:
    peak = measured["peak_bytes"]
    return "unknown" if peak is None else f"{peak / 2**20:,.0f} MiB"


def panels(result: Result) -> list[Panel]:
    """Plot throughput by concurrent requests, with a panel for each model."""
    found = []
    for row in result["models"]:
        x = [load["max_concurrency"] for load in row["mie"]["loads"]]
        lines = {"mie": (x, _rates(row["mie"])), "predicted": (x, _predicted_rates(row))}
        if "skipped" not in row["transformers"]:
            lines["transformers"] = (x, _rates(row["transformers"]))
        found.append(
            Panel(
                row["model"],
                "requests at once",
                "output (tokens/s)",
                lines,
                log_x=True,
                log_y=True,
                dashed="predicted",
            )
        )
    return found
