"""Simulate how the CPU backend's plans spread over more cores than this machine has.

    python scripts/bench_cores.py [--models NAME ...] [--cores N ...] [--help]

The task lists come from the real planners: `tiled.tasks_of` for products, and `Planner.items` for
attention. Their times come from a simple machine. A core computes at --flops and reads at
--core-bandwidth, and all cores together read at --bandwidth for each --channel-cores cores.

Small steps run in lockstep in as many processes as there are cores. These meet after each product,
in log2(cores) rounds of --meet seconds. Larger steps take the faster of two ways:

* Processes share the tokens. Each reads all weights, and they meet twice in each layer.
* Threads share the products. Each task first holds the GIL for --gil seconds, one thread at a time,
  and the caller wakes up its helpers one after another. A thread takes the next task as soon as it
  is idle. For each product the number of threads is the one that `ThreadCount` would find: the
  fastest of the powers of two.

The table shows milliseconds of a step, and how many times as fast as one core it is. "t" marks
large steps that are faster with threads. What is not simulated: NUMA distances, clocks that fall
under load, other programs, norms, RoPE and sampling.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mie.arithmetic import ceil_div
from mie.checkpoint.config import ModelConfig
from mie.ops.backend import StepBatch
from mie.ops_cpu.attention.attention import SOONER, WORTH_SHARING
from mie.ops_cpu.attention.geometry import Geometry as AttentionGeometry
from mie.ops_cpu.attention.plan import Item, Planner, estimate
from mie.ops_cpu.crew import MAX_TOKENS
from mie.ops_cpu.linear.geometry import DEFAULT_WIDTH, MAX_GROUP, Geometry
from mie.ops_cpu.linear.matrix import work_bytes
from mie.ops_cpu.linear.tiled import tasks_of
from mie.sim.shapes import SHAPES, find_shape

FLOAT32 = np.dtype("float32")
BLOCK = 16
# The rows of a step, and the tokens of each sequence.
STEPS = {
    "decode 1 at 1,000": ([1], [1000]),
    "decode 1 at 16,000": ([1], [16_000]),
    "decode 8 at 500": ([1] * 8, [500] * 8),
    "decode 64 at 500": ([1] * 64, [500] * 64),
    "prefill 512": ([512], [512]),
}


Product = Callable[["Machine", int, int, int], float]
"""Return the time of a product, of inputs, outputs and rows."""


class Machine(NamedTuple):
    """The machine that is simulated."""

    cores: int
    flops: float
    core_bandwidth: float
    bandwidth: float
    gil: float
    wake: float
    meet: float

    def lockstep_seconds(self, shares: Sequence[tuple[float, float]]) -> float:
        """Return when all processes have computed their shares (flops, bytes) and met."""
        return self.meeting() + max(self.task(*share, len(shares)) for share in shares)

    def meeting(self) -> float:
        """Return how long it takes until each process knows that all are there."""
        return (self.cores - 1).bit_length() * self.meet

    def seconds(self, work: Sequence[tuple[float, float]], num_threads: int) -> float:
        """Return when the last of the tasks (flops, bytes) ends, if threads take them in order."""
        if num_threads == 1:
            return self.gil + sum(self.task(*task, 1) for task in work)
        gil_is_free, idle = 0.0, [self.wake * thread for thread in range(num_threads)]
        for task in work:
            thread = idle.index(min(idle))
            gil_is_free = max(gil_is_free, idle[thread]) + self.gil
            idle[thread] = gil_is_free + self.task(*task, num_threads)
        return max(idle)

    def task(self, flops: float, num_bytes: float, num_threads: int) -> float:
        """Return how long one of this many threads or processes takes."""
        share = min(self.core_bandwidth, self.bandwidth / num_threads)
        return max(flops / self.flops, num_bytes / share)


def with_threads(machine: Machine, num_inputs: int, num_outputs: int, num_rows: int) -> float:
    """Return the time of a product with the best number of threads."""
    group, num_groups, num_tiles = _cut(num_inputs, num_outputs, num_rows)
    num_bytes = work_bytes(4 * num_inputs * num_tiles * DEFAULT_WIDTH, group * num_groups)
    found = []
    for num_threads in threads_up_to(machine.cores):
        tasks = tasks_of(num_tiles, num_groups, num_threads, num_bytes)
        work = []
        for tiles, groups in tasks:
            columns = (tiles.stop - tiles.start) * DEFAULT_WIDTH
            rows = (groups.stop - groups.start) * group
            work.append((2.0 * rows * columns * num_inputs, 4.0 * columns * num_inputs))
        found.append(machine.seconds(work, num_threads))
    return min(found)


def by_column(machine: Machine, num_inputs: int, num_outputs: int, num_rows: int) -> float:
    """Return the time of a product whose columns processes share."""
    group, num_groups, num_tiles = _cut(num_inputs, num_outputs, num_rows)
    columns = DEFAULT_WIDTH * ceil_div(num_tiles, machine.cores)
    share = 2.0 * group * num_groups * columns * num_inputs, 4.0 * columns * num_inputs
    return machine.lockstep_seconds([share] * machine.cores)


def by_token(machine: Machine, num_inputs: int, num_outputs: int, num_rows: int) -> float:
    """Return the time of a product whose rows processes have shared before. They do not meet."""
    own = ceil_div(num_rows, machine.cores)
    group, num_groups, num_tiles = _cut(num_inputs, num_outputs, own)
    columns = DEFAULT_WIDTH * num_tiles
    flops = 2.0 * group * num_groups * columns * num_inputs
    return machine.task(flops, 4.0 * columns * num_inputs, machine.cores)


def _cut(num_inputs: int, num_outputs: int, num_rows: int) -> tuple[int, int, int]:
    """Return the rows of a group, the number of groups, and the number of tiles."""
    [(_, group, num_groups)] = Geometry(FLOAT32).cut(num_rows, num_inputs, DEFAULT_WIDTH).calls
    return group, num_groups, ceil_div(num_outputs, DEFAULT_WIDTH)


def attention_seconds(
    machine: Machine,
    config: ModelConfig,
    counts: Sequence[int],
    lengths: Sequence[int],
    *,
    in_lockstep: bool,
) -> float:
    """Return the time of one layer's attention, by processes in lockstep or by threads."""
    geometry = AttentionGeometry(
        num_kv_heads=config.num_kv_heads,
        heads_per_kv=config.num_heads // config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK,
        dtype=FLOAT32,
    )
    planner = Planner(_batch(counts, lengths), geometry, None, is_batch_invariant=True)
    num_products = estimate(counts, lengths, geometry) * (SOONER if in_lockstep else 1)
    worth = 2 * math.isqrt(num_products // WORTH_SHARING)
    num_threads = min(machine.cores, max(1, worth))
    items = planner.items(num_threads)
    if in_lockstep:
        shares = [items[i::num_threads] for i in range(num_threads)]
        return machine.lockstep_seconds([(sum(map(_flops, own)), 0.0) for own in shares])
    return machine.seconds([(_flops(item), 0.0) for item in items], num_threads)


def _flops(item: Item) -> float:
    # An item's products include reading its keys, at the rate of products (see PRODUCTS_PER_KEY).
    return 4.0 * item.num_products


def _batch(counts: Sequence[int], lengths: Sequence[int]) -> StepBatch:
    """Return a step of sequences whose blocks follow each other."""
    empty, num_blocks = np.empty(0, np.int64), [ceil_div(length, BLOCK) for length in lengths]
    tables = np.zeros((len(lengths), max(num_blocks)), np.int64)
    for row, (first, last) in enumerate(pairwise(np.cumsum([0, *num_blocks]).tolist())):
        tables[row, : last - first] = np.arange(first, last)
    return StepBatch(
        token_ids=empty,
        positions=empty,
        slot_mapping=empty,
        cu_seqlens_q=np.cumsum([0, *counts]),
        seq_lens=np.array(lengths),
        block_tables=tables,
        logits_rows=empty,
    )


def threads_up_to(cores: int) -> list[int]:
    """Return 1, 2, 4 … and ``cores``."""
    return [*(1 << i for i in range((cores - 1).bit_length())), cores]


def step_seconds(machine: Machine, config: ModelConfig, step: str) -> dict[str, float]:
    """Return the time of a step's products and attention in each way that an engine may take."""
    counts, lengths = STEPS[step]
    num_tokens, num_rows = sum(counts), len(counts)
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    shapes = [(hidden, qkv), (heads, hidden), (hidden, 2 * config.intermediate_size)]
    shapes.append((config.intermediate_size, hidden))

    def seconds(product: Product, head: Product, *, in_lockstep: bool, meeting: float = 0) -> float:
        layer = sum(product(machine, *shape, num_tokens) for shape in shapes)
        layer += attention_seconds(machine, config, counts, lengths, in_lockstep=in_lockstep)
        layer += meeting
        return config.num_layers * layer + head(machine, hidden, config.vocab_size, num_rows)

    if machine.cores > 1 and num_tokens <= MAX_TOKENS:
        return {"processes": seconds(by_column, by_column, in_lockstep=True)}
    ways = {"threads": seconds(with_threads, with_threads, in_lockstep=False)}
    if machine.cores > 1 and num_tokens // machine.cores > MAX_GROUP:
        # Processes that share tokens also meet before attention.
        meeting = machine.meeting()
        ways["processes"] = seconds(by_token, by_column, in_lockstep=True, meeting=meeting)
    return ways


def core_count(text: str) -> int:
    """Return a number of cores, or say why it cannot be simulated."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}; give a number from 1 on")
    return int(text)


def main() -> int:
    """Simulate and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="NAME")
    add("--cores", nargs="+", type=core_count, default=[1, 2, 4, 8, 16, 32, 64])
    add("--flops", type=float, default=2e11, help="operations per second of a core")
    add("--core-bandwidth", type=float, default=3e10, help="bytes per second that a core reads")
    add("--bandwidth", type=float, default=5e10, help="bytes per second of a group of cores")
    add("--channel-cores", type=int, default=4, help="cores that share this bandwidth")
    add("--gil", type=float, default=8e-6, help="seconds that a task holds the GIL")
    add("--wake", type=float, default=2e-6, help="seconds to wake up a helper")
    add("--meet", type=float, default=1.2e-6, help="seconds of a round of processes that meet")
    args = parser.parse_args()
    print(f"| model, step | {' | '.join(f'{cores} cores' for cores in args.cores)} |")
    print("|---|" + "---|" * len(args.cores))
    for name in args.models:
        config = find_shape(name)
        for step in STEPS:
            found = []
            for cores in args.cores:
                bandwidth = args.bandwidth * max(1, cores / args.channel_cores)
                costs = args.gil, args.wake, args.meet
                machine = Machine(cores, args.flops, args.core_bandwidth, bandwidth, *costs)
                ways = step_seconds(machine, config, step)
                way = min(ways, key=lambda way: ways[way])
                mark = " t" if way == "threads" and cores > 1 else ""
                found.append((ways[way], mark))
            one = found[0][0]
            cells = (f"{1e3 * each:.1f} ({one / each:.1f} ×){mark}" for each, mark in found)
            print(f"| {name}, {step} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
