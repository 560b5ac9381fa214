"""Find the matrix products that the CPU backend computes slower than the plain operators.

    python scripts/bench_products.py [--models NAME ...] [--rows N ...] [--every] [--output FILE]

For each matrix of the published models and each number of rows, the backends `numpy` and
`numpy-plain` take turns in one process. Plain uses the BLAS's own threads, as its users do. After
its turn everything pauses until these threads sleep. The backend multiplies inside a step of as
many tokens, which helper processes share as in an engine. The weights come from memory, because the
calls go round through copies that no cache holds. Matrices above 128 MiB are measured with fewer
columns.

A ratio is the time of plain divided by that of the backend: the median over rounds (least–most).
Products that look slower by more than 3 % are measured again with three times as many rounds. The
script lists those that stay slower, and returns 1 if there are any.

By default the rows are a ladder from 1 to 512. --every takes all of them, for hours.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from bench.cpu.children import child_environment
from numpy.typing import NDArray

from mie.config.engine import EngineConfig
from mie.load.backends import load_backend
from mie.ops.backend import KVCacheShape, StepBatch
from mie.ops_cpu.crew import MAX_TOKENS
from mie.ops_cpu.threads.blas import Blas
from mie.sim.shapes import SHAPES, find_shape

LADDER = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
MODELS = ("SmolLM2-135M", "Qwen2.5-0.5B", "TinyLlama-1.1B")
TOLERATED = 0.97
"""The least ratio that is not slower."""
MOST_BYTES = 128 << 20
"""Bytes of a matrix at most."""
CACHE_BYTES = 192 << 20
"""Bytes of all copies of a matrix, more than a last-level cache."""
TURN_SECONDS = 0.06
HEAD_DIM, BLOCK_SIZE = 16, 16
LEAST_CALLS = 6
"""Calls of a turn at least, however long they take."""
BLAS_SLEEPS = 0.2
"""Seconds after which OpenBLAS's threads have stopped spinning.

They spin for 2^28 cycles of the clock (THREAD_TIMEOUT in driver/others/blas_server.c).
"""
WARM_UP = 64
"""Small steps after which helper processes have started, and the engine knows whether they pay.

Each step makes as many calls as a turn, because starting a step costs helper processes some time.
"""
WARM_UP_LARGE = 32
"""Large steps after which the best number of threads is known, and whether helpers pay."""


def shapes_of(name: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each fused matrix of a model, and its K and N."""
    config = find_shape(name)
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "qkv", config.hidden_size, heads + 2 * kv_heads
    yield "out", heads, config.hidden_size
    yield "gate+up", config.hidden_size, 2 * config.intermediate_size
    yield "down", config.intermediate_size, config.hidden_size
    yield "head", config.hidden_size, config.vocab_size


class Pair:
    """A matrix in both backends, in as many copies as no cache holds."""

    def __init__(self, num_inputs: int, num_outputs: int, settings: dict[str, Any]) -> None:
        num_outputs = min(num_outputs, MOST_BYTES // (4 * num_inputs))
        self._backend = load_backend("numpy", config=EngineConfig(**settings))
        plain = load_backend("numpy-plain")
        generator = np.random.default_rng(0)
        weight = generator.random((num_outputs, num_inputs), np.float32)
        count = max(2, CACHE_BYTES // weight.nbytes)
        self._num_inputs = num_inputs
        self.plan = ""
        self._plain, self._tuned = (
            _cycle(
                backend.linear,
                [backend.load_linear(weight.shape, [weight]) for _ in range(count)],
            )
            for backend in (plain, self._backend)
        )
        [self.plan] = set(self._backend.linear_plans.values())
        # Processes share the tokens of a large step if it has attention.
        shape = {"num_layers": 1, "num_kv_heads": 1, "head_dim": HEAD_DIM}
        self._cache = self._backend.new_kv_cache(
            KVCacheShape(num_blocks=max(LADDER), block_size=BLOCK_SIZE, **shape)
        )

    def warm_up(self, num_rows: int) -> int:
        """Let the backend choose who shares its work. Return the number of calls of a turn."""
        self._step(num_rows, LEAST_CALLS)
        num_calls = max(LEAST_CALLS, int(TURN_SECONDS / self._step(num_rows, LEAST_CALLS)))
        for _ in range(WARM_UP if num_rows <= MAX_TOKENS else WARM_UP_LARGE):
            self._step(num_rows, num_calls)
        return num_calls

    def ratio(self, num_rows: int, rounds: int) -> list[float]:
        """Return the times of plain divided by those of the backend, round by round."""
        x = np.ones((num_rows, self._num_inputs), np.float32)
        num_calls = self.warm_up(num_rows)
        found = []
        for _ in range(rounds):
            time.sleep(BLAS_SLEEPS)  # before each turn, because a CPU is slower after a pause
            plain_seconds = _turn(self._plain, x, num_calls)
            time.sleep(BLAS_SLEEPS)
            found.append(plain_seconds / self._step(num_rows, num_calls))
        return found

    def _step(self, num_rows: int, num_calls: int) -> float:
        """Return the time of a call by the backend, in a step of so many tokens and calls."""
        rows = np.arange(num_rows)
        batch = StepBatch(
            token_ids=np.full(num_rows, num_calls),
            positions=0 * rows,
            slot_mapping=BLOCK_SIZE * rows,
            cu_seqlens_q=np.arange(num_rows + 1),
            seq_lens=np.ones_like(rows),
            block_tables=rows[:, None],
            logits_rows=rows[:1],
        )
        return float(self._backend.run_step(self._forward, batch).item())

    def _forward(self, batch: StepBatch) -> NDArray[np.float64]:
        """Make as many calls as each token says, in each of the processes."""
        num_tokens, num_calls = len(batch.token_ids), batch.token_ids.item(0)
        q = np.zeros((num_tokens, 1, HEAD_DIM), np.float32)
        self._backend.paged_attention(q, self._cache, 0, batch, None)
        x = np.ones((num_tokens, self._num_inputs), np.float32)
        seconds = _turn(self._tuned, x, num_calls)
        self._backend.take_rows(x, batch.logits_rows)
        return np.array(seconds)

    def close(self) -> None:
        """End the backend's threads."""
        self._backend.workers.close()


def _cycle(linear: Callable[[Any, Any], Any], copies: list[Any]) -> Callable[[Any], Any]:
    """Return a function that multiplies by the next copy at each call."""
    count = 0

    def call(x: Any) -> Any:
        nonlocal count
        count += 1
        return linear(x, copies[count % len(copies)])

    return call


def _turn(call: Callable[[Any], Any], x: Any, num_calls: int) -> float:
    """Return the median time of a call, from the second half of the calls of one turn.

    The first ones wake up the threads, and the CPUs after a pause.
    """
    times: list[float] = []
    for _ in range(num_calls):
        begin = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[len(times) // 2 :])


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all products and print a line for each matrix."""
    rows = []
    for model in args.models:
        for name, num_inputs, num_outputs in shapes_of(model):
            pair = Pair(num_inputs, num_outputs, args.settings)
            print(f"{model} {name} {num_inputs}x{num_outputs} ({pair.plan}):", end="", flush=True)
            for num_rows in args.rows:
                ratios = pair.ratio(num_rows, args.rounds)
                if statistics.median(ratios) < TOLERATED:
                    ratios = pair.ratio(num_rows, 3 * args.rounds)
                row = {"model": model, "matrix": name, "rows": num_rows, "ratios": ratios}
                rows.append({**row, "shape": [num_inputs, num_outputs], "plan": pair.plan})
                print(f"  {num_rows}: {statistics.median(ratios):.2f}", end="", flush=True)
            print()
            pair.close()
    return rows


def row_count(text: str) -> int:
    """Return a number of rows, or say why it cannot be measured."""
    if not text.isdecimal() or not 1 <= int(text) <= max(LADDER):
        raise argparse.ArgumentTypeError(f"got {text!r}; give a number from 1 to {max(LADDER)}")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=SHAPES, default=MODELS, metavar="NAME")
    add("--rows", nargs="+", type=row_count, default=LADDER, metavar="N")
    add("--every", action="store_true", help="measure every number of rows from 1 to 512")
    add("--rounds", type=int, default=5)
    add("--plan", default="auto", help="the backend's linear_plan")
    add("--core", help="OPENBLAS_CORETYPE of the process, which is unset by default")
    add("--output", type=Path, help="write the ratios as JSON")
    args = parser.parse_args()
    args.rows = range(1, 513) if args.every else args.rows
    args.settings = {"linear_plan": args.plan}
    return args


def main() -> int:
    """Measure, print, and list what is slower."""
    args = parse_arguments()
    environment = child_environment(without_avx512=False)
    if args.core:
        environment["OPENBLAS_CORETYPE"] = args.core
    if environment != dict(os.environ):  # OpenBLAS reads its variables when it is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    print(f"load average {os.getloadavg()[0]:.1f}; kernels {Blas().core}")
    rows = measure(args)
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1) + "\n")
    slower = [row for row in rows if statistics.median(row["ratios"]) < TOLERATED]
    print(f"{len(rows)} products; {len(slower)} slower than plain by more than 3 %:")
    for row in slower:
        ratios = row["ratios"]
        print(
            f"  {row['model']} {row['matrix']}, {row['rows']} rows: {statistics.median(ratios):.2f}"
            f" ({min(ratios):.2f}–{max(ratios):.2f})"
        )
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
