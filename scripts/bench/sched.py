"""Measure the host's share of a step, without the model.

    python scripts/benchmark.py sched [--rounds 5] [--output PREFIX]

A constant token replaces the forward pass and the sampling. One thread measures two things:

    decode step   the whole `Engine.step` of 256 running sequences, at 128 and at 8,192 tokens of
                  context: scheduler, memory, packing, update, outputs, statistics and event log

    admission     from a request whose first 4,096 tokens are cached to the packed arrays of its
                  first step: alone, then with 10,000 other children of the last shared node

Prompts are random and share nothing. Their lengths differ by up to an eighth, or 256 tokens, so
that the sequences do not all need a block in the same step.

Each figure comes from a fresh process, because memory that an
earlier engine left behind would change it.
"""

import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from bench.harness import Spread, machine, parser_of, run_child, table, write_report
from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.engine.runner import ModelRunner
from mie.engine.watch.metrics import EngineMetrics
from mie.events import EventLog
from mie.load.engine import new_scheduler
from mie.sched.plan import StepPlan
from mie.sched.result import ChunkResult, StepResult

NUM_SEQS = 256
CONTEXTS = (128, 8192)
NUM_CACHED = 4096
NUM_CHILDREN = 10_000
BLOCK_SIZE = 16
TOKEN = 7
"""The token that every sequence samples in every step."""
EOS = 2
"""The token that ends a sequence. It is never sampled, but always looked for."""
VOCAB_SIZE = 32_000
NUM_STEPS_MAX = 1024
"""The number of steps that a running engine has space for."""
NUM_TIMED = 128
WARMUP = 8
"""Steps or admissions that are not timed."""
POOL_TOKENS = 262_144
"""Size in tokens of the cache that a request is admitted to."""


class Admission(NamedTuple):
    """One request, admitted again and again."""

    admit: Callable[[], object]
    """Queue the request, schedule it while nothing else runs, and pack the arrays of its step."""
    take_out: Callable[[], object]
    """End the request and free its blocks. The cache keeps its prompt."""


def prompts(num_seqs: int, context: int) -> list[list[int]]:
    """Return random prompts of a little less than ``context`` tokens.

    They are 1, 2, 3 … tokens shorter, up to an eighth or 256, and then begin again at 1.
    """
    generator = np.random.default_rng(0)
    stagger = min(max(context // 8, 1), 256)
    lengths = [context - 1 - i % stagger for i in range(num_seqs)]
    return [generator.integers(3, VOCAB_SIZE, length).tolist() for length in lengths]


def cached_prompt(num_cached: int) -> list[int]:
    """Return the prompt that is admitted. Only its last token must be computed."""
    return prompts(1, num_cached + 2)[0]


def pool_blocks(num_seqs: int, context: int, block_size: int) -> int:
    """Return the number of blocks with which `NUM_STEPS_MAX` steps run without preemption."""
    return num_seqs * (-(-(context + NUM_STEPS_MAX) // block_size) + 1)


class ConstantRunner(ModelRunner):
    """The real runner with a model that always answers `TOKEN`."""

    def run(self, plan: StepPlan) -> StepResult:
        """Pack the step's arrays and answer."""
        self.prepare(plan)
        self.pack(plan)
        decoded = [TOKEN] * len(plan.decodes)
        chunks = []
        for chunk in plan.chunks:
            drawn = [TOKEN] * len(chunk.choices)
            if drawn:
                self._last_tokens[chunk.row] = drawn[0]
            chunks.append(ChunkResult(token_ids=drawn, logprobs=[None] * len(drawn), scored=[]))
        self.advance(plan, decoded, chunks)
        return StepResult(token_ids=decoded, logprobs=[None] * len(decoded), chunks=chunks)


def new_engine(num_blocks: int, num_seqs: int) -> Engine:
    """Return a fresh engine."""
    config = EngineConfig(
        block_size=BLOCK_SIZE, max_num_seqs=num_seqs, max_num_batched_tokens=1 << 16
    )
    log = EventLog(config.event_log_steps)
    backend = SimpleNamespace(
        move_blocks=lambda *caches_and_ids: None, is_asynchronous=False, has_decode_kernels=False
    )
    decoder: Any = SimpleNamespace(backend=backend, forward=dict, adapters=None)  # never called
    runner = ConstantRunner(
        decoder,
        kv_cache=None,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_blocks_per_seq=min(num_blocks, 1024),
    )
    scheduler = new_scheduler(config, num_blocks, num_blocks * BLOCK_SIZE, log)
    metrics = EngineMetrics(scheduler.max_model_len)
    return Engine(
        config, scheduler, runner, log, metrics, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS]
    )


def decoding(num_seqs: int, context: int) -> Callable[[], object]:
    """Return one decode step of a fresh engine that runs these sequences."""
    engine = new_engine(pool_blocks(num_seqs, context, BLOCK_SIZE), num_seqs)
    params = SamplingParams(max_tokens=2 * NUM_STEPS_MAX, temperature=0)
    for token_ids in prompts(num_seqs, context):
        engine.add_request(token_ids, params)
    while engine.scheduler.waiting or any(seq.is_prefilling for seq in engine.scheduler.running):
        engine.step()
    assert len(engine.scheduler.running) == num_seqs
    return engine.step


def start_admission(num_cached: int, num_children: int = 0) -> Admission:
    """Return the admission of a prompt with all but one token cached, to a fresh engine."""
    engine = new_engine(POOL_TOKENS // BLOCK_SIZE, 4)
    token_ids = cached_prompt(num_cached)
    one = SamplingParams(max_tokens=1, temperature=0)
    for child in range(num_children):
        last = [3 + child % 100, 3 + child // 100, *token_ids[: BLOCK_SIZE - 2]]
        engine.add_request([*token_ids[: num_cached - BLOCK_SIZE], *last, 3], one)
        engine.step()
    engine.add_request(token_ids, one)
    engine.step()
    many = SamplingParams(max_tokens=NUM_STEPS_MAX, temperature=0)
    added: list[str] = []

    def admit() -> None:
        added.append(engine.add_request(token_ids, many).request_id)
        plan = engine.scheduler.schedule()
        runner: Any = engine.runner
        runner.prepare(plan)
        runner.pack(plan)
        assert plan.num_tokens == 1

    def take_out() -> None:
        engine.scheduler.manager.end_step()
        engine.abort(added.pop())
        engine.log.end_step({"step": engine.scheduler._step})

    return Admission(admit, take_out)


def time_steps(step: Callable[[], object]) -> float:
    """Return the mean milliseconds of a step, with the blocks that sequences need on the way."""
    for _ in range(WARMUP):
        step()
    gc.collect()
    start = time.perf_counter()
    for _ in range(NUM_TIMED):
        step()
    return 1e3 * (time.perf_counter() - start) / NUM_TIMED


def time_admissions(admission: Admission) -> float:
    """Return the mean milliseconds of one ``admit``. Taking the request out is not timed."""
    seconds = 0.0
    for number in range(WARMUP + NUM_TIMED):
        if number == WARMUP:
            gc.collect()
        start = time.perf_counter()
        admission.admit()
        seconds += time.perf_counter() - start if number >= WARMUP else 0
        admission.take_out()
    return 1e3 * seconds / NUM_TIMED


def phases(num_seqs: int, context: int, num_steps: int = 200) -> dict[str, float]:
    """Return the median milliseconds of each part of `Engine.step`."""
    step = decoding(num_seqs, context)
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


MEASURES: dict[str, Callable[[int], Any]] = {
    "step": lambda context: time_steps(decoding(NUM_SEQS, context)),
    "admission": lambda cached: time_admissions(start_admission(cached)),
    "crowded admission": lambda cached: time_admissions(start_admission(cached, NUM_CHILDREN)),
    "phases": lambda context: phases(NUM_SEQS, context),
}


def main(argv: Sequence[str]) -> None:
    """Measure, print, and write the results. Milliseconds are medians of the rounds."""
    parser = parser_of("sched", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", metavar="PREFIX", help="write PREFIX.json and PREFIX.md")
    args = parser.parse_args(argv)
    state = machine()
    figures = {f"decode step, {c:,} tokens of context": ("step", c) for c in CONTEXTS}
    figures[f"admission, {NUM_CACHED:,} cached tokens"] = ("admission", NUM_CACHED)
    children = f"the same, {NUM_CHILDREN:,} children under one node"
    figures[children] = ("crowded admission", NUM_CACHED)
    values: dict[str, Any] = {title: [] for title in figures}
    for _ in range(args.rounds):
        for title, request in figures.items():
            values[title].append(run_child("bench.sched", request))
    parts = {
        f"at {context:,}": run_child("bench.sched", ["phases", context]) for context in CONTEXTS
    }
    spreads = {title: Spread.of(found) for title, found in values.items()}
    rows = ((t, f"{s.median:.3f} ({s.least:.3f}–{s.most:.3f})") for t, s in spreads.items())
    micros = (
        (part, *(f"{1e3 * each[part]:.0f}" for each in parts.values()))
        for part in next(iter(parts.values()))
    )
    lines = [f"* {key}: {value}" for key, value in state.items()]
    lines += ["", *table(("ms", "mie"), rows), "", *table(("of a step, µs", *parts), micros)]
    write_report(args.output, {"state": state, "milliseconds": values, "phases": parts}, lines)


if __name__ == "__main__":
    what, size = json.load(sys.stdin)
    print(json.dumps(MEASURES[what](size)))
