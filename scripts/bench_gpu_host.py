"""Measure the CPU time of a step on a GPU that does nothing: what the host adds to every step.

    python scripts/bench_gpu_host.py [--layers 22] [--steps 100]

The GPU is the tests' stand-in for CuPy, with kernels and products that return at once. So this
measures what mie does, without CuPy's own launches, which take 5 to 8 us each outside of graphs.
Figures are medians of the process's CPU time over warm steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "kernels")]

import fake_cupy  # noqa: E402
import tiny_models  # noqa: E402
from fake_cublas import FakeCublas  # noqa: E402

from mie.config.engine import EngineConfig  # noqa: E402
from mie.engine.engine import Engine  # noqa: E402
from mie.load.engine import load_engine  # noqa: E402
from mie.params.sampling import SamplingParams  # noqa: E402

LOADS = {
    "decode, 1 request, greedy": (1, 16, {"temperature": 0}),
    "decode, 64 requests, greedy": (64, 16, {"temperature": 0}),
    "decode, 64 requests, temperature and top-p": (64, 16, {"temperature": 0.8, "top_p": 0.9}),
    "decode, 256 requests, greedy": (256, 16, {"temperature": 0}),
    "prompts of 400 beside decodes, 512 tokens a step": (60, 400, {"temperature": 0}),
}
"""Requests, prompt tokens and sampling of each load."""


class IdleKernel:
    """A kernel that does nothing."""

    max_dynamic_shared_size_bytes = 48 << 10

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Return at once."""


class IdleCupy(fake_cupy.FakeCupy):
    """The stand-in without work: modules of idle kernels, and copies that copy nothing."""

    def __init__(self) -> None:
        super().__init__()
        # CuPy keeps an array's address. The stand-in would ask NumPy for it, which takes 1 us.
        self.ndarray = type("ndarray", (self.ndarray,), {"data": SimpleNamespace(ptr=0)})

    def RawModule(self, **_: Any) -> Any:
        """Return a module whose functions are idle."""
        return mock.Mock(get_function=lambda name: IdleKernel())

    def copy(self, host: Any, stream: Any, task: Any) -> None:
        """Copy nothing."""

    def memcpy2DAsync(self, *args: int) -> None:
        """Copy nothing."""


def idle_cupy() -> IdleCupy:
    """Put an idle stand-in in place of CuPy, with a cuBLAS that multiplies nothing."""
    cupy = IdleCupy()
    library = FakeCublas(cupy)
    library.cublasGemmEx = lambda *args: 0
    sys.modules["cupy"] = cupy
    for kind, method, result in (
        (fake_cupy.Stream, "begin_capture", None),
        (fake_cupy.Stream, "end_capture", mock.Mock()),
        (fake_cupy.Event, "record", None),
        (fake_cupy.Event, "synchronize", None),
    ):
        mock.patch.object(kind, method, return_value=result).start()
    mock.patch("mie.ops_gpu.cublas.load_library", return_value=library).start()
    return cupy


def engine_for(model: Path, num_requests: int, prompt: int, sampling: dict[str, Any]) -> Engine:
    """Return an engine with the load's requests."""
    config = EngineConfig(
        num_blocks=num_requests * (prompt // 16 + 40),
        max_num_batched_tokens=512,
        max_num_seqs=num_requests,
        max_model_len=4096,
        async_scheduling=True,
        enable_prefix_caching=False,
    )
    engine = load_engine(model, config, backend="cupy", dtype="float16")
    for i in range(num_requests):
        token_ids = [(7 * i + j) % 390 + 5 for j in range(prompt)]
        params = SamplingParams(**sampling, seed=i, max_tokens=500, ignore_eos=True)
        engine.add_request(token_ids, params)
    return engine


def cpu_seconds(engine: Engine, num_steps: int, *, is_prompt: bool) -> list[float]:
    """Return the CPU time of warm steps, which have prompt tokens or only decode."""
    seconds = []
    for _ in range(40 if is_prompt else 40 + num_steps):
        began = time.process_time()
        engine.step()
        seconds.append(time.process_time() - began)
    return seconds[10:40] if is_prompt else seconds[40:]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each load and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--steps", type=int, default=100, help="measured steps of each load")
    args = parser.parse_args(argv)
    idle_cupy()
    shape = {
        "num_hidden_layers": args.layers,
        "max_position_embeddings": 4096,
        "vocab_size": 400,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 64,
    }
    config = tiny_models.LLAMA | shape
    print(f"{args.layers} layers; ms of CPU time of a step, median (least)")
    with tempfile.TemporaryDirectory() as folder:
        weights = tiny_models.random_weights(config)
        model = tiny_models.write_model(Path(folder), config, weights)
        for name, (num_requests, prompt, sampling) in LOADS.items():
            engine = engine_for(model, num_requests, prompt, sampling)
            seconds = cpu_seconds(engine, args.steps, is_prompt=prompt > 100)
            print(f"{name}: {statistics.median(seconds) * 1e3:.2f} ({min(seconds) * 1e3:.2f})")


if __name__ == "__main__":
    main()
