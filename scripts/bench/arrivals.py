"""Measure an engine whose requests arrive one after another, as at a server.

    python scripts/benchmark.py arrivals [--model MODEL] [--rates 20 80] [--azure FOLDER]
                                         [--set KEY=VALUE] [--compare KEY=VALUE] [--output PREFIX]

Requests arrive at random (a Poisson process) with lengths that differ. With --azure they also
arrive as in Azure's traces: FOLDER has azure_conv.csv and azure_code.csv of AzurePublicDataset,
plain or as .xz. Lengths of a trace are divided by --scale, and its times are stretched until its
requests arrive at the rate. Its bursts stay. MODEL is a directory, a hub id, or the name of a
shape, which gets random weights.

The engine runs in this process, without a tokenizer. Each answer has the length that the load gives
it. Every setting gets the same requests. With --compare, two settings take turns, each with an
engine of its own. A run begins with an empty prefix cache. The first run of each engine is not
counted, so kernels are compiled.

    tokens/s       generated tokens, from the first arrival to the last token. Below the limit of
                   the engine this is the rate of the load
    TTFT, ITL      time from the arrival of a request to its first token, and between two tokens
    steps          a step computes one token of each running request, and perhaps chunks of prompts

On a GPU, steps are also counted by how they were launched. With --device, the steps take the
times of the simulator, and are counted as backend cupy would launch them. Figures are medians of
the rounds, of the runs' own percentiles.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from bench.azure import read_azure
from bench.cpu import parse_settings
from bench.harness import in_turn, machine, number, parser_of, table, write_report
from bench.models import SHAPES, write_model
from mie.base.stats.step import StepStats
from mie.errors import MieError
from mie.lab.draws import LogNormal
from mie.lab.loads import independent
from mie.lab.metrics import summarize
from mie.lab.sim.costs import SECOND, WallClock
from mie.lab.sim.driver import Bench, run_load
from mie.lab.workload import Text, Workload, WorkloadRequest
from mie.ops.backend import StepBatch
from mie.ops_gpu.queue import EmulatedQueue
from mie.ops_gpu.steps import LAUNCHES, StepKind, Steps
from mie.sched.plan import StepPlan
from mie.sched.result import StepResult

TRACES = ("conv", "code")
PERCENTILES = (50, 99)
LATENCIES = ("ttft", "itl")
LABELS = ("load", "requests/s", "setting")
Counts = Counter[StepKind]
"""Steps by how they were launched."""


class Load(NamedTuple):
    """Requests that arrive at a rate."""

    name: str
    rate: float
    """Requests per second."""
    workload: Workload


def poisson(rate: float, args: argparse.Namespace) -> Load:
    """Return requests that arrive at random. Half of them have at most a tenth of the context."""
    most = args.max_model_len // 2
    workload = independent(
        num_requests=args.requests,
        input_len=LogNormal(max(1, most // 5), 0.8, 1, most),
        output_len=LogNormal(max(1, most // 10), 0.6, 1, most),
        request_rate=rate,
        seed=args.seed,
        name="Poisson",
    )
    return Load("Poisson", rate, workload)


def trace_of(name: str, rate: float, args: argparse.Namespace) -> Load:
    """Return the first requests of a trace of Azure, with its bursts, at the rate."""
    [path] = [each for each in files_of(args.azure, name) if each.is_file()][:1]
    rows, most = read_azure(path, args.requests), args.max_model_len // 2
    stretch = len(rows) * SECOND / rate / max(1, rows[-1].time_ns)
    requests = tuple(
        WorkloadRequest(
            request_id=str(at),
            prompt=(Text(1 + at, min(most, max(1, row.num_prompt // args.scale))),),
            max_tokens=min(most, max(1, row.num_answer // args.scale)),
            arrival_ns=round(row.time_ns * stretch),
        )
        for at, row in enumerate(rows)
    )
    return Load(f"Azure, {name}", rate, Workload(name=name, requests=requests))


def files_of(folder: Path, name: str) -> list[Path]:
    """Return the paths at which a trace may be."""
    return [folder / f"azure_{name}.csv{suffix}" for suffix in ("", ".xz")]


class Side:
    """An engine with one setting."""

    def __init__(self, name: str, settings: Mapping[str, Any], args: argparse.Namespace) -> None:
        self.name = name
        settings = {"max_model_len": args.max_model_len, **settings}
        if args.device:
            self._bench, self._counts = simulated_side(args, settings)
        else:
            self._bench, self._counts = real_side(args, settings)

    def run(self, workload: Workload) -> dict[str, Any]:
        """Run a load, and return its figures.

        Raises:
            RuntimeError: the engine refused a request.
        """
        self._bench.engine.reset_prefix_cache()
        before = Counter(self._counts)
        result = run_load(self._bench, workload)
        refused = [each.error for each in result.records if each.error is not None]
        if refused:
            raise RuntimeError(f"{len(refused)} requests were refused: {refused[0]}")
        wanted: dict[str, Any] = {"metrics": LATENCIES, "percentiles": PERCENTILES}
        kinds = Counter(self._counts) - before
        return {
            "tokens/s": summarize(result.records, result.duration_ns)["output_throughput"],
            **summarize(result.records, result.duration_ns, **wanted),
            "peak_running": result.peak_running,
            "steps": {
                what: {"number": len(each), "median_ms": 1000 * statistics.median(each or [0])}
                for what, each in seconds_of(result.steps).items()
            },
            "launched": [[*kind, count] for kind, count in kinds.items()],
        }


def seconds_of(steps: Sequence[StepStats]) -> dict[str, list[float]]:
    """Return the seconds of steps with and without chunks of prompts."""
    return {
        "decodes": [each.seconds for each in steps if not each.num_prefill_tokens],
        "chunks": [each.seconds for each in steps if each.num_prefill_tokens],
    }


def real_side(args: argparse.Namespace, settings: Mapping[str, Any]) -> tuple[Bench, Counts]:
    """Return an engine with a model, and the counts of its backend's steps if it has any."""
    from mie import LLM

    llm = LLM(args.model, backend=args.backend, skip_tokenizer_init=True, **settings)
    backend = getattr(llm.engine.runner, "backend", None)
    vocab_size = llm.model_config.vocab_size
    bench = Bench(engine=llm.engine, clock=WallClock(), vocab_size=vocab_size)
    counts: Any = getattr(backend, "step_counts", Counter())
    return bench, counts


class CountingRunner:
    """A runner of the simulator whose steps are counted as backend cupy would launch them."""

    is_ahead = False

    def __init__(self, runner: Any, most_tokens: int) -> None:
        self._runner = runner
        nothing: Any = SimpleNamespace(xp=np)
        self.steps = Steps(
            nothing, EmulatedQueue(), enforce_eager=False, follows_lengths=lambda: False
        )
        self.steps.most_tokens = most_tokens

    def run(self, plan: StepPlan) -> StepResult:
        """Run a plan."""
        if not plan.is_empty:
            self.steps.run(lambda batch: np.zeros((len(batch.logits_rows), 1)), shape_of(plan))
        result: StepResult = self._runner.run(plan)
        return result


def shape_of(plan: StepPlan) -> StepBatch:
    """Return the batch of a plan, with zeros for all numbers that have no effect on launches."""
    num_decodes = len(plan.decodes)
    counts = [1] * num_decodes + [len(chunk.token_ids) for chunk in plan.chunks]
    num_logits = num_decodes + sum(len(each.choices) + each.num_drafts for each in plan.chunks)
    zeros = np.zeros(sum(counts), np.int64)
    return StepBatch(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros,
        cu_seqlens_q=np.cumsum([0, *counts]),
        seq_lens=np.array(counts),
        block_tables=np.zeros((len(counts), 1), np.int64),
        logits_rows=np.zeros(num_logits, np.int64),
        num_decodes=num_decodes,
    )


def simulated_side(args: argparse.Namespace, settings: Mapping[str, Any]) -> tuple[Bench, Counts]:
    """Return a simulated engine, and the counts of its steps."""
    from mie.config.engine import EngineConfig
    from mie.lab.sim.devices import find_device, find_shape
    from mie.lab.sim.simulated import simulated_on

    config = EngineConfig(event_log_steps=0, **settings)
    bench = simulated_on(find_device(args.device), find_shape(args.model), config)
    engine: Any = bench.engine
    engine.runner = CountingRunner(engine.runner, engine.config.max_num_batched_tokens)
    return bench, engine.runner.steps.counts


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure, and the steps of the last round."""
    last = rounds[-1]
    return {
        **last,
        **{
            name: statistics.median(each[name] for each in rounds)
            for name, value in last.items()
            if isinstance(value, float)
        },
    }


def rows_of(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Return the tables."""
    columns = [f"p{percent}_{name}_ms" for name in LATENCIES for percent in PERCENTILES]
    heads = [f"{name.upper()} p{percent}, ms" for name in LATENCIES for percent in PERCENTILES]
    cells = [
        (*labels(each), number(each["tokens/s"]), *(number(each[name]) for name in columns))
        for each in found
    ]
    yield from table((*LABELS, "tokens/s", *heads), cells)
    yield ""
    heads = ["steps of decodes", "median ms", "steps with chunks", "median ms"]
    cells = []
    for row in found:
        steps = [row["steps"][what] for what in ("decodes", "chunks")]
        numbers = ((str(each["number"]), number(each["median_ms"])) for each in steps)
        cells.append((*labels(row), *chain.from_iterable(numbers)))
    yield from table((*LABELS, *heads), cells)
    counts = [{StepKind(*kind): count for *kind, count in row["launched"]} for row in found]
    seen = {kind for each in counts for kind in each}
    kinds = sorted(seen, key=lambda kind: (kind.has_chunks, LAUNCHES.index(kind.launch)))
    if kinds:
        heads = [f"{'chunks' if kind.has_chunks else 'decodes'}, {kind.launch}" for kind in kinds]
        cells = [
            (*labels(row), *(str(launched.get(kind, 0)) for kind in kinds))
            for row, launched in zip(found, counts, strict=True)
        ]
        yield from ("", *table((*LABELS, *heads), cells))


def labels(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a row's load, rate and setting."""
    return row["load"], f"{row['rate']:g}", row["setting"]


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every load on every side, in turns."""
    common = parse_settings(args.set)
    sides = [Side(",".join(args.set) or "as it is", common, args)]
    if args.compare:
        settings = {**common, **parse_settings(args.compare)}
        sides.append(Side(",".join(args.compare), settings, args))
    loads = [poisson(rate, args) for rate in args.rates]
    for name in TRACES if args.azure else ():
        loads += [trace_of(name, rate, args) for rate in args.rates]
    found = []
    for side in () if args.device else sides:
        side.run(loads[-1].workload)
    for load in loads:
        rounds: dict[str, list[dict[str, Any]]] = {side.name: [] for side in sides}
        for turn in range(args.rounds):
            for side in in_turn(sides, turn):
                rounds[side.name].append(side.run(load.workload))
        for side in sides:
            row = {"load": load.name, "rate": load.rate, "setting": side.name}
            found.append(row | medians(rounds[side.name]))
            print(*labels(row), "measured", file=sys.stderr, flush=True)
    return found


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of("arrivals", __doc__)
    add = parser.add_argument
    add("--model", help="default: bundled, or Llama-3.2-1B with --device")
    add("--backend", default="auto")
    add("--device", help="simulate this device of `mie sim`, such as h200")
    add("--rates", type=float, nargs="+", default=[20, 80], help="requests per second")
    add("--requests", type=int, default=150, help="requests of each load")
    add("--max-model-len", type=int, default=512, help="prompts and answers have at most half")
    add("--azure", type=Path, metavar="FOLDER", help="run Azure's traces in this folder, too")
    add("--scale", type=int, default=8, help="divide the lengths of a trace by this")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of LLM")
    add("--compare", action="append", default=[], metavar="KEY=VALUE", help="of the second engine")
    add("--rounds", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--output", metavar="PREFIX", help="write PREFIX.json and PREFIX.md")
    args = parser.parse_args(argv)
    args.model = args.model or ("Llama-3.2-1B" if args.device else "bundled")
    for name, low in (("requests", 1), ("rounds", 1), ("scale", 1), ("max_model_len", 4)):
        if getattr(args, name) < low:
            parser.error(f"--{name.replace('_', '-')} must be at least {low}")
    if min(args.rates) <= 0:
        parser.error(f"--rates must be above 0; got {min(args.rates):g}")
    if args.device:
        args.rounds = 1  # every round is the same
    for name in TRACES if args.azure else ():
        paths = files_of(args.azure, name)
        if not any(path.is_file() for path in paths):
            parser.error(f"--azure: there is no {paths[0]} and no {paths[1].name}")
    try:
        parse_settings([*args.set, *args.compare])
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str]) -> int:
    """Measure, and print and write the tables."""
    args = parse_arguments(argv)
    with contextlib.ExitStack() as stack:
        state = {**machine(), **{name: str(value) for name, value in vars(args).items()}}
        if args.model in SHAPES and not args.device:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mie-bench-"))
            write_model(args.model, Path(folder))
            args.model = folder
        try:
            found = measure(args)
        except (MieError, RuntimeError) as error:
            print(f"benchmark.py arrivals: {error}", file=sys.stderr)
            return 2
    if args.device:
        state |= {"simulated": "the times are the simulator's, and nothing was measured"}
    lines = [f"* {key}: {value}" for key, value in state.items()]
    write_report(args.output, {"state": state, "rows": found}, [*lines, "", *rows_of(found)])
    return 0
