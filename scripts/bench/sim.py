"""Compare the simulator with the engine: seven loads, measured and predicted.

    python scripts/benchmark.py sim [--rounds 3]    # takes some minutes of a quiet machine.
    python scripts/benchmark.py sim --page          # write the page's table from the last results

For each model, costs come from a recorded calibration load. Then every load runs on the engine with
`--trace`, and `mie sim predict` simulates it with these costs. The results go to
`docs/simulator.json`, and the table to `docs/simulator.md`. A test compares the two.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.harness import ROOT, machine, user_environment
from bench.models import write_model

RESULTS, PAGE = ROOT / "docs" / "simulator.json", ROOT / "docs" / "simulator.md"
TABLE = re.compile(r"(<!-- measured loads -->\n).*?(<!-- end of measured loads -->)", re.DOTALL)
NUM_BLOCKS = 2048
LOADS: dict[str, dict[str, str]] = {
    "bundled": {
        "48 requests at 24 a second, prompts 25–230, answers 12–115": "serve --num-prompts 48"
        " --request-rate 24 --input-len 128 --output-len 64 --random-range-ratio 0.8",
        "64 at once, 64 + 64 tokens": "throughput --num-prompts 64 --input-len 64 --output-len 64",
        "16 at once, 400 + 32": "throughput --num-prompts 16 --input-len 400 --output-len 32",
        "one after another, 32 + 200": "serve --num-prompts 4 --max-concurrency 1 --input-len 32"
        " --output-len 200",
    },
    "SmolLM2-135M": {
        "30 requests at 3 a second, prompts 28–163, answers 12–68": "serve --num-prompts 30"
        " --request-rate 3 --input-len 96 --output-len 40 --random-range-ratio 0.7",
        "32 at once, 48 + 32": "throughput --num-prompts 32 --input-len 48 --output-len 32",
        "8 at once, 400 + 24": "throughput --num-prompts 8 --input-len 400 --output-len 24",
    },
}


def mie(*arguments: object) -> str:
    """Run a command of `mie`, and return its output."""
    command = [sys.executable, "-m", "mie", *map(str, arguments)]
    done = subprocess.run(command, env=user_environment(), stdout=subprocess.PIPE, check=True)
    return done.stdout.decode()


def measure(model: str, folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each load: the measured and the predicted tokens per second of each round."""
    write_model(model, folder / "model")
    place = ["--model", folder / "model", "--num-blocks", NUM_BLOCKS]
    load, trace, costs = folder / "load.json", folder / "run.jsonl", folder / "costs.json"
    mie("sim", "workload", "calibration", "-o", load)
    mie("bench", "throughput", *place, "--workload", load, "--trace", trace)
    mie("sim", "calibrate", trace, "-o", costs)
    for title, line in LOADS[model].items():
        pairs = []
        for _ in range(rounds):
            mie("bench", *line.split(), *place, "--trace", trace)
            both = json.loads(mie("sim", "predict", trace, "--costs", costs, "--json"))
            pairs.append([both[side]["output_throughput"] for side in ("measured", "predicted")])
        yield {"model": model, "load": title, "rounds": pairs}
        print(f"{model}: {title}: {pairs}", file=sys.stderr)


def table(results: dict[str, Any]) -> str:
    """Return the page's table."""
    lines = ["| model | load | measured, tokens/s | predicted | error |", "|---|---|---|---|---|"]
    for row in results["rows"]:
        measured = [pair[0] for pair in row["rounds"]]
        here, predicted = (statistics.median(column) for column in zip(*row["rounds"], strict=True))
        spread = f"{here:,.0f} ({min(measured):,.0f}–{max(measured):,.0f})"
        error = f"{predicted / here - 1:+.1%}".replace("-", "−").replace("%", " %")
        lines.append(f"| {row['model']} | {row['load']} | {spread} | {predicted:,.0f} | {error} |")
    about = f"Measured on {results['date']}, {results['processor']}, {results['cpus']} CPUs, Python"
    return "\n".join([f"{about} {results['python']}.", "", *lines, ""])


def rewritten(page: str, results: dict[str, Any]) -> str:
    """Return the page with the table of the results."""
    return TABLE.sub(lambda match: f"{match[1]}\n{table(results)}\n{match[2]}", page)


def main(argv: Sequence[str]) -> None:
    """Measure, and write the results and the page."""
    parser = argparse.ArgumentParser("benchmark.py sim", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="runs of each load (3)")
    parser.add_argument("--page", action="store_true", help="only write the page's table again")
    args = parser.parse_args(argv)
    if not args.page:
        about = machine()
        rows: list[Any] = []
        for model in LOADS:
            with tempfile.TemporaryDirectory(prefix="mie-bench-sim-") as folder:
                rows += measure(model, Path(folder), args.rounds)
        results = {**about, "rows": rows}
        text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
        RESULTS.write_text(text, encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
