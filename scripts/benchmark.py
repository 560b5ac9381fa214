"""Run one of the benchmarks, without environment variables that tune a library.

    python scripts/benchmark.py NAME [OPTION ...]        --help after the name lists its options

arrivals     requests that arrive one after another, and the steps that serve them
book         the gain of each mechanism, simulated
cpu          generation on a CPU, beside other engines
disk         the prefix cache on a disk
plots        the plots of the book
gpu          attention and generation on a GPU
host         a step of many decodes with text and outputs, without the model
launches     the Python of a step on a GPU whose launches cost nothing
ranks        one model in several processes beside threads
rows         what a step of a few rows costs on a CPU, beside a step of one
sched        the host's share of a step
serve        `mie serve` beside `LLM.generate` and other servers
speculate    drafts beside none, on questions of Spec-Bench
start        the time until the first token of a fresh process
structured   structured outputs
"""

from __future__ import annotations

import importlib
import sys

from bench.harness import untune

MODULES = {"book": "book.report", "gpu": "gpu.main", "plots": "book.plots"}
"""Benchmarks with a module of another name in `bench`."""
NAMES = (
    *("arrivals", "book", "cpu", "disk", "gpu", "host", "launches", "plots", "ranks", "rows"),
    *("sched", "serve", "speculate", "start", "structured"),
)

if __name__ == "__main__":
    untune()
    if not sys.argv[1:]:
        print((__doc__ or "").rstrip())
        sys.exit()
    if sys.argv[1] not in NAMES:
        sys.exit((__doc__ or "").rstrip())
    module = importlib.import_module(f"bench.{MODULES.get(sys.argv[1], sys.argv[1])}")
    sys.exit(module.main(sys.argv[2:]))
