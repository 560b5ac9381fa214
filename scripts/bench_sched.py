"""Measure what a step costs the host, without the model.

    python scripts/bench_sched.py [nano-vllm=DIR mini-sglang=DIR mini-vllm=DIR] [--output PREFIX]

A constant token replaces the model and the sampling. One thread measures three things:

    decode step   the whole `Engine.step` of 256 running sequences, at 128 and at 8,192 tokens of
                  context: scheduler, memory, packing, update, outputs, statistics and event log

    admission     from a request whose first 4,096 tokens are cached to the packed arrays of its
                  first step: alone, then with 10,000 other children of the last shared node

    the log       the event log's share of a real step with the bundled model

It also measures public engines whose checkouts are given (see bench/sched_peers.py). Rounds
alternate between the engines.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench import sched_peers
from bench.sched_peers import Admission, cached_prompt, pool_blocks, prompts

from mie.audit.scheduler import scheduler_snapshot
from mie.config.engine import EngineConfig
from mie.engine.engine import Engine
from mie.engine.runner import ModelRunner
from mie.events import EventLog
from mie.events.log import SNAPSHOT_EVERY
from mie.load.engine import new_scheduler
from mie.params.sampling import SamplingParams
from mie.sched.plan import StepPlan
from mie.sched.result import ChunkResult, StepResult

NUM_SEQS = 256
CONTEXTS = (128, 8192)
NUM_CACHED = 4096
NUM_CHILDREN = 10_000
BLOCK_SIZE = 16


class ConstantRunner(ModelRunner):
    """The real runner with a model that always answers `sched_peers.TOKEN`."""

    def run(self, plan: StepPlan) -> StepResult:
        self.prepare(plan)
        self.pack(plan)
        decoded = [sched_peers.TOKEN] * len(plan.decodes)
        self.advance(plan, decoded)
        chunks = []
        for chunk in plan.chunks:
            drawn = [sched_peers.TOKEN] * len(chunk.choices)
            if drawn:
                self._last_tokens[chunk.row] = drawn[0]
            chunks.append(ChunkResult(token_ids=drawn, logprobs=[None] * len(drawn), scored=[]))
        return StepResult(token_ids=decoded, logprobs=[None] * len(decoded), chunks=chunks)


def no_decoder() -> Any:
    """Return a decoder without a model."""
    backend = SimpleNamespace(copy_blocks=lambda cache, src, dst: None, is_asynchronous=False)
    return SimpleNamespace(backend=backend)


def new_engine(num_blocks: int, num_seqs: int, log_steps: int = 2000) -> Engine:
    """Return an engine that has everything but a model."""
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=1 << 16,
        event_log_steps=log_steps,
    )
    log = EventLog(config.event_log_steps)
    max_model_len = num_blocks * BLOCK_SIZE
    runner = ConstantRunner(
        no_decoder(),
        kv_cache=None,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_blocks_per_seq=min(num_blocks, 1024),
    )
    return Engine(
        config,
        new_scheduler(config, num_blocks, max_model_len, log),
        runner,
        log,
        vocab_size=sched_peers.VOCABULARY.stop,
        eos_token_ids=[sched_peers.EOS],
    )


class Mie:
    """This engine, as a peer among the others."""

    name = "mie"

    def __init__(self, num_children: int = 0) -> None:
        self.version = sched_peers.commit_of(Path(__file__).resolve().parents[1])
        self.block_size = BLOCK_SIZE
        self._num_children = num_children
        if num_children:
            self.name = f"mie, {num_children:,} children"

    def start(self, num_seqs: int, context: int) -> Callable[[], object]:
        engine = new_engine(pool_blocks(num_seqs, context, BLOCK_SIZE), num_seqs)
        params = SamplingParams(max_tokens=2 * sched_peers.NUM_STEPS_MAX, temperature=0)
        for token_ids in prompts(num_seqs, context):
            engine.add_request(token_ids, params)
        while engine.scheduler.waiting or any(
            seq.is_prefilling for seq in engine.scheduler.running
        ):
            engine.step()
        assert len(engine.scheduler.running) == num_seqs
        return engine.step

    def start_admission(self, num_cached: int) -> Admission:
        engine = new_engine(sched_peers.POOL_TOKENS // BLOCK_SIZE, 4)
        token_ids = cached_prompt(num_cached)
        one = SamplingParams(max_tokens=1, temperature=0)
        for child in range(self._num_children):
            last = [3 + child % 100, 3 + child // 100, *token_ids[: BLOCK_SIZE - 2]]
            engine.add_request([*token_ids[: num_cached - BLOCK_SIZE], *last, 3], one)
            engine.step()
        engine.add_request(token_ids, one)
        engine.step()
        many = SamplingParams(max_tokens=sched_peers.NUM_STEPS_MAX, temperature=0)
        added: list[str] = []

        def admit() -> None:
            added.append(engine.add_request(token_ids, many))
            plan = engine.scheduler.schedule()
            engine._runner.prepare(plan)
            engine._runner.pack(plan)
            assert plan.num_tokens == 1

        def take_out() -> None:
            engine.scheduler.manager.end_step()
            engine.abort(added.pop())
            engine.log.end_step({"step": engine.scheduler._step})

        return Admission(admit, take_out)


def phases(num_seqs: int, context: int, num_steps: int = 200) -> dict[str, float]:
    """Return the median milliseconds of each part of `Engine.step`.

    ``outputs and log`` is the rest.
    """
    step = Mie().start(num_seqs, context)
    stats, wholes = [], []
    for _ in range(num_steps):
        start = time.perf_counter()
        output: Any = step()
        wholes.append(time.perf_counter() - start)
        stats.append(output.stats)
    parts = {
        "schedule and memory": [each.schedule_seconds for each in stats],
        "pack": [each.run_seconds for each in stats],
        "update": [each.update_seconds for each in stats],
        "outputs, statistics, log": [
            whole - each.seconds for whole, each in zip(wholes, stats, strict=True)
        ],
    }
    return {name: 1e3 * statistics.median(times) for name, times in parts.items()}


def log_share(num_requests: int, num_steps: int = 300) -> tuple[float, float, float]:
    """Return the milliseconds of a real step, the microseconds of its log, and the log's share.

    The step runs the bundled model. The difference of two runs cannot show a hundredth of so short
    a step. So the records of a real run are emitted once more into a fresh log, with its snapshots,
    and that is timed.
    """
    from mie import LLM

    engine = LLM("bundled", max_num_seqs=num_requests, event_log_steps=1 << 20).engine
    params = SamplingParams(max_tokens=num_steps, temperature=0, ignore_eos=True)
    for number in range(num_requests):
        engine.add_request([1 + number % 200, 5, 6, 7, 8, 9, 10, 11], params)
    engine.step()
    start = time.perf_counter()
    while engine.has_work:
        engine.step()
    step_seconds = (time.perf_counter() - start) / (engine.stats.num_steps - 1)
    steps = engine.log.segments()[0].steps[1:]
    seconds = []
    for _ in range(5):
        log = EventLog(EngineConfig.event_log_steps)
        log.start(dict)
        emit = log.emit
        start = time.perf_counter()
        for records in steps:
            for record in records[:-1]:
                emit((*record,))
            log.end_step(records[-1][1])
        seconds.append((time.perf_counter() - start) / len(steps))
    start = time.perf_counter()
    scheduler_snapshot(engine.scheduler)
    snapshot_seconds = (time.perf_counter() - start) / SNAPSHOT_EVERY
    log_seconds = statistics.median(seconds) + snapshot_seconds
    return 1e3 * step_seconds, 1e6 * log_seconds, log_seconds / step_seconds


# The report.


def machine_state() -> dict[str, Any]:
    """Return the facts about the machine that the figures hold for."""
    cpu_info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    cpu = re.search(r"model name\s*:\s*(.*)", cpu_info)
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": sched_peers.commit_of(Path(__file__).resolve().parents[1])[:9],
        "cpu": cpu[1] if cpu else platform.processor(),
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "removed_variables": sorted(name for name in os.environ if is_tuning(name)),
    }


def is_tuning(name: str) -> bool:
    """Return whether a variable tunes the BLAS. A user's machine has none of them."""
    return name.startswith("OPENBLAS_")


def in_fresh_process(arguments: Sequence[str]) -> Any:
    """Run this script with ``arguments`` as a child and return the JSON that it prints.

    The process is fresh because memory that an earlier engine left behind would change the figure.
    """
    environment = {k: v for k, v in os.environ.items() if not is_tuning(k)}
    command = [sys.executable, __file__, "--child", *arguments]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def run_child(arguments: Sequence[str]) -> Any:
    """Run the measurement that the arguments name and return its milliseconds."""
    what, name, path, size = arguments
    if what == "phases":
        return phases(NUM_SEQS, int(size))
    if what == "log":
        return log_share(int(size))
    peer: sched_peers.Peer
    if name == "mie":
        peer = Mie(NUM_CHILDREN if what == "admission with children" else 0)
    else:
        peers, skipped = sched_peers.load_peers({name: Path(path)})
        if skipped:
            raise SystemExit(f"{name} cannot be loaded: {skipped[name]}")
        [peer] = peers
    if what == "step":
        return 1e3 * sched_peers.time_steps(peer.start(NUM_SEQS, int(size)), 128)
    admission = peer.start_admission(int(size))
    return admission and 1e3 * sched_peers.time_admissions(admission, 128)


def measure(peers: dict[str, str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return milliseconds by measurement and by engine, one figure for each round."""
    rows = [("step", str(context)) for context in CONTEXTS] + [("admission", str(NUM_CACHED))]
    results: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for what, size in rows:
            for name, path in {"mie": ".", **peers}.items():
                value = in_fresh_process([what, name, path, size])
                if value is not None:
                    row = results.setdefault(TITLES[what].format(int(size)), {})
                    row.setdefault(name, []).append(value)
    what = "admission with children"
    values = [in_fresh_process([what, "mie", ".", str(NUM_CACHED)]) for _ in range(min(rounds, 3))]
    results[TITLES[what].format(NUM_CACHED)] = {"mie": values}
    return results


TITLES = {
    "step": f"decode step of {NUM_SEQS} sequences at {{:,}} tokens",
    "admission": "admission with {:,} cached tokens",
    "admission with children": f"the same, {NUM_CHILDREN:,} children under one node",
}


def as_markdown(report: dict[str, Any]) -> str:
    """Return the report as tables. Milliseconds are medians over rounds (least–most)."""
    names = ["mie", *report["versions"]]
    lines = [f"* {key}: {value}" for key, value in report["state"].items()]
    lines += [f"* {name}: {version}" for name, version in report["versions"].items()]
    lines += ["", f"| ms | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for title, row in report["milliseconds"].items():
        cells = [
            f"{statistics.median(row[name]):.3f} ({min(row[name]):.3f}–{max(row[name]):.3f})"
            if name in row
            else "–"
            for name in names
        ]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += ["", f"| of mie's step, µs | {' | '.join(report['phases'])} |"]
    lines.append(f"|---|{'---|' * len(report['phases'])}")
    for part in next(iter(report["phases"].values())):
        cells = [f"{1e3 * each[part]:.0f}" for each in report["phases"].values()]
        lines.append(f"| {part} | {' | '.join(cells)} |")
    lines += ["", "| requests | step, ms | event log, µs | share |", "|---|---|---|---|"]
    for count, (step_ms, log_us, share) in report["log"].items():
        lines.append(f"| {count} | {step_ms:.2f} | {log_us:.1f} | {share:.2%} |")
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", nargs="*", metavar="NAME=DIR", help="checkouts of other engines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", metavar="PREFIX", help="write PREFIX.json and PREFIX.md")
    return parser.parse_args()


def main() -> None:
    """Measure, print, and write the results."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(run_child(sys.argv[2:])))
        return
    args = parse_arguments()
    peers = dict(each.split("=", 1) for each in args.peers)
    report = {
        "state": machine_state(),
        "versions": {name: sched_peers.commit_of(Path(path))[:9] for name, path in peers.items()},
        "milliseconds": measure(peers, args.rounds),
        "phases": {
            f"at {context:,}": in_fresh_process(["phases", "mie", ".", str(context)])
            for context in CONTEXTS
        },
        "log": {n: in_fresh_process(["log", "mie", ".", str(n)]) for n in (1, 8, 64)},
    }
    text = as_markdown(report)
    print(text)
    if args.output:
        Path(f"{args.output}.json").write_text(json.dumps(report, indent=2) + "\n")
        Path(f"{args.output}.md").write_text(text + "\n")


if __name__ == "__main__":
    main()
