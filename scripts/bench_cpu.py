"""Measure generation on a CPU, with mie and other engines in the same run.

    pip install "mie[bench]"
    python scripts/bench_cpu.py [--models NAME ...] [--engines NAME ...] [--workloads NAME ...]
                                [--mie-variant NAME:KEY=VALUE,...] [--output PREFIX]

The models have published shapes and random weights; the bundled model is measured too. Sampling is
greedy, and the end-of-sequence token is disabled. mie runs through its LLM API and its scheduler.
The peers are transformers (`generate`), llama.cpp (the batch API of llama-cpp-python) and
CTranslate2 (`generate_batch`). transformers serves several requests as one static batch, and end to
end also one after another, at a rate measured on a few. A peer that is not installed, or that does
not support a shape, is skipped by name with the reason.

Each engine has its own process on the same CPUs. It is stopped (SIGSTOP) while another is measured,
so that its threads do not spin. Engines that do not fit into memory together are measured in
groups, each of which has mie's first row. In a round, every engine of the group runs one workload,
in alternating order. A round below one second is repeated until a second has passed, and counts
with its median. Tables show medians over rounds (least–most). Ratios are taken within a round.
bench/cpu/metrics.py defines the rates.

Each row also shows its share of the best that this machine does with as many threads, measured
before and after each group (bench/cpu/limits.py). Decoding compares the bytes that a step must read
with the bandwidth. Prefill compares its products with the best sgemm. bench/cpu/shapes.py has the
formulas. Variables that tune OpenBLAS, OpenMP or MKL are removed.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.cpu.metrics import BASELINE, WORKLOADS, ModelResults, markdown, quick
from bench.cpu.model_bench import FORMATS, ModelBench, entries_of
from bench.cpu.shapes import BUNDLED, MODELS, SHAPES
from bench.harness import machine, write_report

FAMILIES = tuple(dict.fromkeys(name.split("-")[0] for name in FORMATS))


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line. ``entries`` and ``workloads`` hold those that it names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=[*SHAPES, BUNDLED], metavar="NAME")
    add("--engines", nargs="+", choices=[*FORMATS, *FAMILIES], default=FAMILIES, metavar="NAME")
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    add("--rounds", type=int, default=3)
    add("--threads", type=int, default=2, help="CPUs that each engine may use")
    for name, metavar, text in (
        ("--mie", "KEY=VALUE", "set an argument of LLM in all of mie's rows"),
        ("--mie-variant", "NAME:KEY=VALUE,...", "add a row of mie with these arguments"),
        ("--python", "FAMILY=PATH", "run an engine with this interpreter"),
    ):
        add(name, action="append", default=[], metavar=metavar, help=text)
    add("--baseline-requests", type=int, default=2, help="of transformers one by one")
    add("--quick", action="store_true", help="try the script: small workloads, one round")
    add("--output", metavar="PREFIX", help="write PREFIX.json and PREFIX.md")
    args = parser.parse_args(words)
    try:
        args.entries = entries_of(args.engines, args.mie, args.mie_variant)
    except ValueError as error:
        parser.error(str(error))
    args.python = dict(word.partition("=")[::2] for word in args.python)
    for family in args.python.keys() - set(FAMILIES):
        parser.error(f"--python names {family!r}; choose from {', '.join(FAMILIES)}")
    if args.rounds < 1 or args.baseline_requests < 1:
        parser.error("--rounds and --baseline-requests must be at least 1")
    num_cpus = len(os.sched_getaffinity(0))
    if not 1 <= args.threads <= num_cpus:
        parser.error(f"--threads is {args.threads}; this process may run on {num_cpus} CPUs")
    args.workloads = [WORKLOADS[name] for name in dict.fromkeys(args.workloads)]
    args.models = args.models or (("toy", BUNDLED) if args.quick else MODELS)
    if args.quick:
        args.workloads, args.rounds = [quick(each) for each in args.workloads], 1
    return args


def report(
    state: Mapping[str, Any], results: Sequence[ModelResults], skipped: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return all results as JSON data and as lines of Markdown."""
    lines = [f"* {key}: {value}" for key, value in state.items()]
    lines += [f"* skipped: {each}" for each in skipped]
    lines += ["", *(line for each in results for line in markdown(each))]
    models = [asdict(each) for each in results]
    return {"state": state, "skipped": list(skipped), "models": models}, lines


def main() -> int:
    """Measure, and print and write the results after each model.

    Returns 1 if a row of mie is missing, else 0.
    """
    args = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and so through every `finally`
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])  # children inherit it
    mine = {each.name: each.settings for each in args.entries if each.family == BASELINE}
    state = {
        **machine(),
        "threads": args.threads,
        "mie's rows": mine,
        "weights": "bfloat16 files",
        "rounds": f"{args.rounds}, of small workloads: a trial" if args.quick else args.rounds,
        "requests of transformers one by one": args.baseline_requests,
    }
    results: list[ModelResults] = []
    skipped: list[str] = []
    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="mie-bench-") as directory:
            bench = ModelBench(name, Path(directory), args)
            found = bench.run()
        results += [found] if found else []
        skipped += bench.skipped
        write_report(args.output, *report(state, results, skipped))
    return int(
        any(mine.keys() - each.loaded for each in results) or len(results) < len(args.models)
    )


if __name__ == "__main__":
    sys.exit(main())
