"""Run mie or transformers with some loads in a process of its own, to measure its peak memory.

    python -m book.child mie|transformers

It reads a `Task` as JSON from stdin, and writes its answer as JSON to stdout.

All concurrent requests of transformers form one batch of prompts of one length, which is the best
case for its `generate`.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.harness import peak_bytes

from mie.checkpoint.config import ModelConfig
from mie.config.engine import EngineConfig
from mie.load.engine import load_engine
from mie.sim.clock import WallClock
from mie.sim.draws import Fixed
from mie.sim.driver import Bench, run_load
from mie.sim.loads import calibration, independent
from mie.sim.metrics import summarize
from mie.sim.workload import Workload


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
    """Settings of mie."""
    loads: list[Load]
    num_rounds: int = 1
    trace: str | None = None
    calibrate_with: int = 0
    """Maximum number of requests at once, or 0 for no calibration."""


def run_mie(task: Task) -> dict[str, Any]:
    """Return the measurements of the engine."""
    import numpy as np

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
    return {"loads": loads, "version": f"NumPy {np.__version__}"}


def _measure(bench: Bench, load: Load, num_rounds: int) -> dict[str, Any]:
    rounds = []
    for _ in range(num_rounds):
        bench.engine.reset_prefix_cache()
        rounds.append(run_load(bench, load.workload(), max_concurrency=load.max_concurrency))
    last = summarize(rounds[-1].records, rounds[-1].duration_ns, metrics=("ttft",))
    return {
        **asdict(load),
        "seconds": [result.duration_ns / 1e9 for result in rounds],
        "peak_running": max(result.peak_running for result in rounds),
        "num_preemptions": sum(result.num_preempted for result in rounds),
        "median_ttft_ms": last["median_ttft_ms"],
    }


def run_transformers(task: Task) -> dict[str, Any]:
    """Return the measurements of transformers, or why it cannot run."""
    try:
        import torch
        import transformers
    except ImportError as error:
        return {"skipped": f"{error.name} is not installed (pip install torch transformers)"}
    torch.set_num_threads(task.num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(task.directory, dtype=torch.float32)
    model.eval()
    _generate(model, Load(num_requests=1, max_concurrency=1, input_len=16, output_len=4))  # warm-up
    loads = [
        {**asdict(load), "seconds": [_generate(model, load) for _ in range(task.num_rounds)]}
        for load in task.loads
    ]
    version = f"transformers {transformers.__version__}, torch {torch.__version__}"
    return {"loads": loads, "version": version}


def _generate(model: Any, load: Load) -> float:
    """Return the seconds for all requests."""
    import torch

    vocab_size = model.config.vocab_size
    prompts = torch.tensor(
        [request.token_ids(vocab_size, {}) for request in load.workload().requests]
    )
    start = time.perf_counter()
    for batch in prompts.split(load.max_concurrency):
        with torch.inference_mode():
            tokens = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                min_new_tokens=load.output_len,
                max_new_tokens=load.output_len,
                do_sample=False,
                pad_token_id=0,
            )
        assert tokens.shape[1] == load.input_len + load.output_len, "ended early"
    return time.perf_counter() - start


if __name__ == "__main__":
    values = json.load(sys.stdin)
    task = Task(**{**values, "loads": [Load(**load) for load in values["loads"]]})
    answer = {"mie": run_mie, "transformers": run_transformers}[sys.argv[1]](task)
    print(json.dumps(answer if "skipped" in answer else {**answer, "peak_bytes": peak_bytes()}))
