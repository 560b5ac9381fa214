"""Simulate how the CPU backend's plans spread over more cores than this machine has.

    python scripts/bench_cores.py [--models NAME ...] [--cores N ...] [--help]

The task lists come from the real planners: `tiled.tasks_of` for products, and `Planner.items` for
attention. Their times come from a simple machine. A core computes at --flops and reads at
--core-bandwidth, and all cores together read at --bandwidth for each --channel-cores cores.

Small steps run in lockstep in as many processes as there are cores. These meet after each product,
in log2(cores) rounds of --meet seconds. In larger steps, each task first holds the GIL for --gil
seconds, one thread at a time, and the caller wakes up its helpers one after another. A thread takes
the next task as soon as it is idle. For each product the number of threads is the one that
`ThreadCount` would find: the fastest of the powers of two.

The table shows milliseconds of a step, and how many times as fast as one core it is. What is not
simulated: NUMA distances, clocks that fall under load, other programs, norms, RoPE and sampling.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from mie.arithmetic import ceil_div
from mie.checkpoint.config import ModelConfig
from mie.ops.backend import StepBatch
from mie.ops_cpu.attention.geometry import Geometry as AttentionGeometry
from mie.ops_cpu.attention.plan import WORTH_SHARING, Item, Planner, estimate
from mie.ops_cpu.crew import MAX_TOKENS
from mie.ops_cpu.linear.geometry import DEFAULT_WIDTH, Geometry
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
        rounds = (len(shares) - 1).bit_length()
        return rounds * self.meet + max(self._task(*share, len(shares)) for share in shares)

    def seconds(self, work: Sequence[tuple[float, float]], num_threads: int) -> float:
        """Return when the last of the tasks (flops, bytes) ends, if threads take them in order."""
        if num_threads == 1:
            return self.gil + sum(self._task(*task, 1) for task in work)
        gil_is_free, idle = 0.0, [self.wake * thread for thread in range(num_threads)]
        for task in work:
            thread = idle.index(min(idle))
            gil_is_free = max(gil_is_free, idle[thread]) + self.gil
            idle[thread] = gil_is_free + self._task(*task, num_threads)
        return max(idle)

    def _task(self, flops: float, num_bytes: float, num_threads: int) -> float:
        share = min(self.core_bandwidth, self.bandwidth / num_threads)
        return max(flops / self.flops, num_bytes / share)


def product_seconds(machine: Machine, num_inputs: int, num_outputs: int, num_rows: int) -> float:
    """Return the time of a product, by processes or with the best number of threads."""
    width = DEFAULT_WIDTH
    [(_, group, num_groups)] = Geometry(FLOAT32).cut(num_rows, num_inputs, width).calls
    num_tiles = ceil_div(num_outputs, width)
    if machine.cores > 1 and num_rows <= MAX_TOKENS:
        padded = group * num_groups
        columns = width * ceil_div(num_tiles, machine.cores)
        share = 2.0 * padded * columns * num_inputs, 4.0 * columns * num_inputs
        return machine.lockstep_seconds([share] * machine.cores)
    num_bytes = work_bytes(4 * num_inputs * num_tiles * width, group * num_groups)
    found = []
    for num_threads in threads_up_to(machine.cores):
        tasks = tasks_of(num_tiles, num_groups, num_threads, num_bytes)
        work = []
        for tiles, groups in tasks:
            columns = (tiles.stop - tiles.start) * width
            rows = (groups.stop - groups.start) * group
            work.append((2.0 * rows * columns * num_inputs, 4.0 * columns * num_inputs))
        found.append(machine.seconds(work, num_threads))
    return min(found)


def attention_seconds(
    machine: Machine, config: ModelConfig, counts: Sequence[int], lengths: Sequence[int]
) -> float:
    """Return the time of one layer's attention."""
    geometry = AttentionGeometry(
        num_kv_heads=config.num_kv_heads,
        heads_per_kv=config.num_heads // config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=BLOCK,
        dtype=FLOAT32,
    )
    planner = Planner(_batch(counts, lengths), geometry, None, is_batch_invariant=True)
    worth = 2 * math.isqrt(estimate(counts, lengths, geometry) // WORTH_SHARING)
    num_threads = min(machine.cores, max(1, worth))
    items = planner.items(num_threads)
    if num_threads > 1 and sum(counts) <= MAX_TOKENS:
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


def step_seconds(machine: Machine, config: ModelConfig, step: str) -> float:
    """Return the time of a step's products and attention."""
    counts, lengths = STEPS[step]
    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    shapes = (hidden, qkv), (heads, hidden), (hidden, 2 * config.intermediate_size)
    layer = sum(product_seconds(machine, *shape, sum(counts)) for shape in shapes)
    layer += product_seconds(machine, config.intermediate_size, hidden, sum(counts))
    layer += attention_seconds(machine, config, counts, lengths)
    return config.num_layers * layer + product_seconds(
        machine, hidden, config.vocab_size, len(counts)
    )


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
            times = []
            for cores in args.cores:
                bandwidth = args.bandwidth * max(1, cores / args.channel_cores)
                costs = args.gil, args.wake, args.meet
                machine = Machine(cores, args.flops, args.core_bandwidth, bandwidth, *costs)
                times.append(step_seconds(machine, config, step))
            cells = (f"{1e3 * each:.1f} ({times[0] / each:.1f} ×)" for each in times)
            print(f"| {name}, {step} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
