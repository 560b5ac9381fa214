"""Run the engine in a separate process, to measure its own peak memory.

python -m mie.sim.book.child          a `Task` as JSON on stdin, its answer as JSON on stdout
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mie.checkpoint.config import ModelConfig
from mie.config.engine import EngineConfig
from mie.errors import MieError
from mie.load.engine import load_engine
from mie.sim.clock import WallClock
from mie.sim.draws import Fixed
from mie.sim.driver import Bench, LoadResult, run_load
from mie.sim.loads import calibration, independent
from mie.sim.metrics import summarize
from mie.sim.workload import Workload

_TUNING = re.compile("OPENBLAS_|MKL_|OMP_|GOMP_|KMP_|GOTO_|BLIS_")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of one size, with a limit on how many run at once."""

    num_requests: int
    max_concurrency: int
    input_len: int
    output_len: int

    def workload(self) -> Workload:
        """Return prompts without a common prefix."""
        return independent(
            num_requests=self.num_requests,
            input_len=Fixed(self.input_len),
            output_len=Fixed(self.output_len),
        )


@dataclass(frozen=True, kw_only=True)
class Task:
    """The task of a child: loads to run with a model in turn, each a number of times.

    If there is a ``trace``, the calibration load runs first, and its event log goes there.
    """

    directory: str
    num_threads: int
    settings: dict[str, Any]
    loads: Sequence[Load]
    num_rounds: int = 1
    trace: str | None = None
    calibrate_with: int = 0
    """Maximum number of requests at once, or 0 for no calibration."""


def ask(module: str, task: Task) -> dict[str, Any]:
    """Return the answer of a child: ``loads``, with the seconds of each round, and ``peak_bytes``.

    Variables that tune linear algebra are removed, so that it computes as a user's would.

    Raises:
        MieError: the child failed.
    """
    kept = {name: value for name, value in os.environ.items() if not _TUNING.match(name)}
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(asdict(task)),
        capture_output=True,
        text=True,
        env={**kept, "OMP_NUM_THREADS": str(task.num_threads)},
    )
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise MieError(f"{module} ended with {done.returncode}: {said[-1] if said else 'silent'}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def read_task() -> Task:
    """Read the task from stdin."""
    values = json.load(sys.stdin)
    values["loads"] = [Load(**load) for load in values["loads"]]
    return Task(**values)


def answer(loads: list[dict[str, Any]], **about: Any) -> None:
    """Print the measurements."""
    print(json.dumps({"loads": loads, "peak_bytes": _peak_bytes(), **about}))


def _peak_bytes() -> int | None:
    """Return the peak memory of this process, if Linux tells it.

    `getrusage` would include the parent's memory before the process became another program.
    """
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)
    return None if found is None else int(found[1]) << 10


def main() -> None:
    """Run a task."""
    import numpy as np

    task = read_task()
    directory = Path(task.directory)
    config = EngineConfig(num_threads=task.num_threads, event_log_steps=0, **task.settings)
    with open(task.trace, "w", encoding="utf-8") if task.trace else nullcontext() as trace:
        engine = load_engine(directory, config, dtype="float32", trace=trace)
        vocab_size = ModelConfig.load(directory).vocab_size
        bench = Bench(engine=engine, clock=WallClock(), vocab_size=vocab_size)
        run_load(bench, independent(num_requests=1, output_len=Fixed(4)))  # warm-up
        if task.calibrate_with:
            run_load(bench, calibration(max_requests=task.calibrate_with))
        loads = [_measure(bench, load, task.num_rounds) for load in task.loads]
        engine.log.close()
    answer(loads, version=f"NumPy {np.__version__}")


def _measure(bench: Bench, load: Load, num_rounds: int) -> dict[str, Any]:
    rounds: list[LoadResult] = []
    for _ in range(num_rounds):
        bench.engine.reset_prefix_cache()
        rounds.append(run_load(bench, load.workload(), max_concurrency=load.max_concurrency))
    return {
        **asdict(load),
        "seconds": [result.duration_ns / 1e9 for result in rounds],
        "peak_running": max(result.peak_running for result in rounds),
        "num_preemptions": sum(result.num_preempted for result in rounds),
        "median_ttft_ms": summarize(rounds[-1].records, rounds[-1].duration_ns, metrics=("ttft",))[
            "median_ttft_ms"
        ],
    }


if __name__ == "__main__":
    main()
