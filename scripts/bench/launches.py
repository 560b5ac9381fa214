"""Measure the Python of a step on a GPU whose launches cost nothing.

    python scripts/benchmark.py launches [--decodes 0 8 64] [--layers 22] [--steps 40]

The engine runs backend cupy over NumPy arrays. Its kernels check their arguments as on a GPU, and
compute nothing. CuPy's own part of a launch is left out. Each step computes a prompt of 100 tokens
or more beside as many decodes. Figures are CPU time (`time.thread_time`) of `Engine.step`, the
least of the steps. "eager" steps are launched kernel by kernel, and "captured" ones replay a graph.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bench.harness import machine, parser_of, table
from bench.models import LLAMA
from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops.backend import Backend
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.cupy_backend import CupyBackend
from mie.ops_gpu.queue import EmulatedQueue
from mie.ops_gpu.signature import check_arguments, check_launch, declared

H200 = Chip(num_multiprocessors=132, shared_bytes=228 << 10)
PROMPT = 100
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
"""A small model. The Python of a step depends on its layers alone."""


class FreeGpu:
    """A `Launcher` and a `Gemm` that check and count launches, and do nothing else."""

    def __init__(self) -> None:
        self.xp: ModuleType = np
        self.num_launches = 0
        self._kernels: dict[tuple[str, str], FreeKernel] = {}

    def kernel(self, file: str, name: str, options: tuple[str, ...] = ()) -> FreeKernel:
        """Return a kernel by its name."""
        if (file, name) not in self._kernels:
            self._kernels[file, name] = FreeKernel(self, file, name)
        return self._kernels[file, name]

    def matmul(self, *matrices: Any, is_added: bool) -> None:
        """Count a product."""
        self.num_launches += 1


class FreeKernel:
    """A kernel that computes nothing."""

    def __init__(self, gpu: FreeGpu, file: str, name: str) -> None:
        self._gpu, self._name, self._parameters = gpu, f"{file} {name}", declared(name)

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: tuple[Any, ...],
        shared_bytes: int = 0,
    ) -> None:
        """Check a launch, and count it."""
        check_launch(self._name, grid, block)
        if self._parameters is not None:
            check_arguments(self._name, self._parameters, args, np.ndarray)
        self._gpu.num_launches += 1


def load(gpu: FreeGpu, num_layers: int, *, enforce_eager: bool) -> Engine:
    """Return an engine on the GPU. Each of its tokens is the same."""

    def wrap(backend: Backend) -> Backend:
        device: Any = gpu
        free: Any = CupyBackend(
            "cupy-emulated",
            device,
            device,
            "float16",
            H200,
            queue=EmulatedQueue(),
            enforce_eager=enforce_eager,
        )
        free.finish_sample = lambda drawn: [5] * len(drawn.token_ids)
        return free  # type: ignore[no-any-return]

    with tempfile.TemporaryDirectory(prefix="mie-bench-") as folder:
        config = {**LLAMA, **SHAPE, "num_hidden_layers": num_layers}
        Path(folder, "config.json").write_text(json.dumps(config))
        settings = EngineConfig(
            num_blocks=1 << 14,
            max_num_seqs=256,
            async_scheduling=False,
            enable_prefix_caching=False,
        )
        return load_engine(
            Path(folder),
            LoadSettings(
                engine=settings, backend="cupy-emulated", load_format="dummy", dtype="float16"
            ),
            wrap=wrap,
        )


def measure(gpu: FreeGpu, engine: Engine, num_decodes: int, num_steps: int) -> tuple[float, int]:
    """Return the seconds of a step with a prompt, and its launches. All requests then end."""
    common: dict[str, Any] = {"ignore_eos": True, "temperature": 0.0}
    for number in range(num_decodes):
        engine.add_request([5 + number] * 8, SamplingParams(max_tokens=2000, **common))
        engine.step()
    least, num_launches = float("inf"), 0
    for number in range(num_steps):
        engine.add_request([7] * (PROMPT + number), SamplingParams(max_tokens=1, **common))
        before, begin = gpu.num_launches, time.thread_time()
        engine.step()
        least = min(least, time.thread_time() - begin)
        num_launches = gpu.num_launches - before
    for request in list(engine.requests):
        engine.abort(request.request_id)
    return least, num_launches


def main(argv: Sequence[str]) -> None:
    """Measure, and print a table."""
    parser = parser_of("launches", __doc__)
    add = parser.add_argument
    add("--decodes", type=int, nargs="+", default=[0, 8, 64])
    add("--layers", type=int, default=22)
    add("--steps", type=int, default=40)
    args = parser.parse_args(argv)
    if args.layers < 1 or args.steps < 8 or not 0 <= min(args.decodes) <= max(args.decodes) < 256:
        parser.error("--layers is at least 1, --steps at least 8, and --decodes 0 to 255")
    print("\n".join(f"* {key}: {value}" for key, value in machine().items()), end="\n\n")
    rows = []
    for name, enforce_eager in (("eager", True), ("captured", False)):
        gpu = FreeGpu()
        engine = load(gpu, args.layers, enforce_eager=enforce_eager)
        for count in args.decodes:
            print(name, count, "decodes", file=sys.stderr, flush=True)
            seconds, num_launches = measure(gpu, engine, count, args.steps)
            rows.append((name, str(count), f"{1000 * seconds:.2f}", str(num_launches)))
    print("\n".join(table(("steps", "decodes beside a prompt", "ms", "launches"), rows)))
