"""Measure the host's share of a step, without the model.

    python scripts/bench_sched.py [--nano-vllm DIR] [--rounds 5] [--output PREFIX]

A constant token replaces the forward pass and the sampling. One thread measures two things:

    decode step   the whole `Engine.step` of 256 running sequences, at 128 and at 8,192 tokens of
                  context: scheduler, memory, packing, update, outputs, statistics and event log

    admission     from a request whose first 4,096 tokens are cached to the packed arrays of its
                  first step: alone, then with 10,000 other children of the last shared node

Prompts are random and share nothing. Their lengths differ by up to an eighth, or 256 tokens, so
that the sequences do not all need a block in the same step.

DIR is a checkout of github.com/GeeeekExplorer/nano-vllm, which is then measured in turns, with
PyTorch and its own loop. Its tensors stay in ordinary memory, so the copies to a GPU are left out,
which only helps it. It refuses blocks that are not a multiple of 256 tokens, and therefore has a
16th of the block-table entries. Each figure comes from a fresh process, because memory that an
earlier engine left behind would change it.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from bench.harness import Spread, machine, run_child, table, write_report

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.engine.runner import ModelRunner
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
    """Return random prompts of a little less than ``context`` tokens, the same for both engines.

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


# The engines.


class ConstantRunner(ModelRunner):
    """The real runner with a model that always answers `TOKEN`."""

    def run(self, plan: StepPlan) -> StepResult:
        """Pack the step's arrays and answer."""
        self.prepare(plan)
        self.pack(plan)
        decoded = [TOKEN] * len(plan.decodes)
        self.advance(plan, decoded)
        chunks = []
        for chunk in plan.chunks:
            drawn = [TOKEN] * len(chunk.choices)
            if drawn:
                self._last_tokens[chunk.row] = drawn[0]
            chunks.append(ChunkResult(token_ids=drawn, logprobs=[None] * len(drawn), scored=[]))
        return StepResult(token_ids=decoded, logprobs=[None] * len(decoded), chunks=chunks)


class Mie:
    """This engine, with everything but a model."""

    def new_engine(self, num_blocks: int, num_seqs: int) -> Engine:
        """Return a fresh engine."""
        config = EngineConfig(
            block_size=BLOCK_SIZE, max_num_seqs=num_seqs, max_num_batched_tokens=1 << 16
        )
        log = EventLog(config.event_log_steps)
        backend = SimpleNamespace(copy_blocks=lambda cache, src, dst: None, is_asynchronous=False)
        decoder: Any = SimpleNamespace(backend=backend, forward=dict)  # never called
        runner = ConstantRunner(
            decoder,
            kv_cache=None,
            block_size=BLOCK_SIZE,
            max_num_seqs=num_seqs,
            max_blocks_per_seq=min(num_blocks, 1024),
        )
        scheduler = new_scheduler(config, num_blocks, num_blocks * BLOCK_SIZE, log)
        return Engine(config, scheduler, runner, log, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS])

    def start(self, num_seqs: int, context: int) -> Callable[[], object]:
        """Return one decode step of a fresh engine that runs these sequences."""
        engine = self.new_engine(pool_blocks(num_seqs, context, BLOCK_SIZE), num_seqs)
        params = SamplingParams(max_tokens=2 * NUM_STEPS_MAX, temperature=0)
        for token_ids in prompts(num_seqs, context):
            engine.add_request(token_ids, params)
        while engine.scheduler.waiting or any(
            seq.is_prefilling for seq in engine.scheduler.running
        ):
            engine.step()
        assert len(engine.scheduler.running) == num_seqs
        return engine.step

    def start_admission(self, num_cached: int, num_children: int = 0) -> Admission:
        """Return the admission of a prompt with all but one token cached, to a fresh engine."""
        engine = self.new_engine(POOL_TOKENS // BLOCK_SIZE, 4)
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
            added.append(engine.add_request(token_ids, many))
            plan = engine.scheduler.schedule()
            runner: Any = engine._runner
            runner.prepare(plan)
            runner.pack(plan)
            assert plan.num_tokens == 1

        def take_out() -> None:
            engine.scheduler.manager.end_step()
            engine.abort(added.pop())
            engine.log.end_step({"step": engine.scheduler._step})

        return Admission(admit, take_out)


class _Absent(ModuleType):
    """A stand-in for a module that the host side never runs. Any name in it is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class NanoVllm:
    """The engine nano-vllm: its `LLMEngine.step` with its scheduler and block manager.

    Its `ModelRunner.run` packs the batch. The forward pass is replaced, with the copies into the
    buffers of a CUDA graph, and so is the sampling.
    """

    block_size = 256

    def __init__(self, path: str) -> None:
        import torch

        def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

        torch.set_num_threads(1)
        torch.tensor, torch.empty = unpinned(torch.tensor), unpinned(torch.empty)
        torch.Tensor.pin_memory = lambda self: self
        torch.Tensor.cuda = lambda self, non_blocking=False: self
        self._torch = torch
        absent = ("nanovllm.models.qwen3", "nanovllm.layers.sampler", "nanovllm.utils.loader")
        for name in (*absent, "transformers"):
            sys.modules[name] = _Absent(name)
        sys.path.insert(0, path)
        self._module = importlib.import_module("nanovllm.engine.llm_engine")

    def _new_engine(self, num_blocks: int) -> Any:
        module = self._module
        module.Sequence.block_size = self.block_size
        config = SimpleNamespace(
            max_num_seqs=512,
            max_num_batched_tokens=16_384,
            eos=EOS,
            kvcache_block_size=self.block_size,
            num_kvcache_blocks=num_blocks,
        )
        runner = object.__new__(module.ModelRunner)
        runner.block_size, runner.world_size, runner.rank = self.block_size, 1, 0
        runner.run_model = lambda input_ids, positions, is_prefill: None
        runner.sampler = lambda logits, temperatures: self._torch.full(temperatures.shape, TOKEN)
        engine = object.__new__(module.LLMEngine)
        engine.scheduler = module.Scheduler(config)
        engine.model_runner = runner
        return engine

    def _add(self, engine: Any, token_ids: list[int], max_tokens: int) -> None:
        engine.add_request(token_ids, self._module.SamplingParams(max_tokens=max_tokens))

    def start(self, num_seqs: int, context: int) -> Callable[[], object]:
        """Return one decode step of a fresh engine that runs these sequences."""
        engine = self._new_engine(pool_blocks(num_seqs, context, self.block_size))
        scheduler = engine.scheduler
        for token_ids in prompts(num_seqs, context):
            self._add(engine, token_ids, 2 * NUM_STEPS_MAX)
        while scheduler.waiting:
            seqs, is_prefill = scheduler.schedule()
            scheduler.postprocess(seqs, [TOKEN] * len(seqs), is_prefill)
        assert len(scheduler.running) == num_seqs
        step: Callable[[], object] = engine.step
        return step

    def start_admission(self, num_cached: int) -> Admission:
        """Return the admission of a prompt with all but one token cached, to a fresh engine."""
        engine = self._new_engine(POOL_TOKENS // self.block_size)
        scheduler, token_ids = engine.scheduler, cached_prompt(num_cached)
        self._add(engine, token_ids, 1)
        engine.step()

        def admit() -> None:
            self._add(engine, token_ids, NUM_STEPS_MAX)
            seqs, is_prefill = scheduler.schedule()
            engine.model_runner.run(seqs, is_prefill)

        def take_out() -> None:
            # Its update does the same at a stop.
            seq = scheduler.running.pop()
            assert seq.num_cached_tokens == num_cached // self.block_size * self.block_size
            scheduler.block_manager.deallocate(seq)

        return Admission(admit, take_out)


# The measurements.


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


def child(what: str, engine: str, path: str, size: int) -> Any:
    """Measure one thing in this process."""
    if what == "phases":
        return phases(NUM_SEQS, size)
    if what == "admission with children":
        return time_admissions(Mie().start_admission(size, NUM_CHILDREN))
    peer = Mie() if engine == "mie" else NanoVllm(path)
    if what == "step":
        return time_steps(peer.start(NUM_SEQS, size))
    return time_admissions(peer.start_admission(size))


def report(values: dict[str, Any]) -> list[str]:
    """Return the report as tables. Milliseconds are medians over rounds (least–most)."""
    names = values["engines"]
    rows = []
    for title, row in values["milliseconds"].items():
        spreads = [Spread.of(row[name]) if name in row else None for name in names]
        cells = [f"{s.median:.3f} ({s.least:.3f}–{s.most:.3f})" if s else "–" for s in spreads]
        rows.append((title, *cells))
    parts = next(iter(values["phases"].values()))
    by_context = values["phases"].values()
    micros = [(part, *(f"{1e3 * each[part]:.0f}" for each in by_context)) for part in parts]
    return [
        *(f"* {key}: {value}" for key, value in values["state"].items()),
        "",
        *table(("ms", *names), rows),
        "",
        *table(("of mie's step, µs", *values["phases"]), micros),
    ]


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nano-vllm", metavar="DIR", help="a checkout of nano-vllm")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", metavar="PREFIX", help="write PREFIX.json and PREFIX.md")
    args = parser.parse_args()
    engines = ["mie", *(["nano-vllm"] if args.nano_vllm else [])]
    state = machine()
    path = str(Path(args.nano_vllm).resolve()) if args.nano_vllm else ""

    def measured(what: str, size: int, engine: str = "mie") -> Any:
        return run_child("bench_sched", [what, engine, path, size], arguments=["--child"])

    milliseconds: dict[str, dict[str, list[float]]] = {}
    for number in range(args.rounds):
        rows = [(f"decode step, {c:,} tokens of context", "step", c, engines) for c in CONTEXTS]
        rows.append((f"admission, {NUM_CACHED:,} cached tokens", "admission", NUM_CACHED, engines))
        if number < 3:
            what = "admission with children"
            title = f"the same, {NUM_CHILDREN:,} children under one node"
            rows.append((title, what, NUM_CACHED, ["mie"]))
        for title, what, size, names in rows:
            for name in names:
                row = milliseconds.setdefault(title, {}).setdefault(name, [])
                row.append(measured(what, size, name))
    values = {
        "state": state,
        "engines": engines,
        "milliseconds": milliseconds,
        "phases": {f"at {context:,}": measured("phases", context) for context in CONTEXTS},
    }
    write_report(args.output, values, report(values))


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        print(json.dumps(child(*json.load(sys.stdin))))
    else:
        main()
