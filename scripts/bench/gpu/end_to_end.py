"""Measure whole engines on the same random weights, each in its own process."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.child import Child, PeerError
from bench.engines import EngineSpec
from bench.gpu.report import BenchReport
from bench.gpu.shapes import BLOCK_SIZE
from bench.models import decode_bytes, random_prompts, write_model
from mie.base.arithmetic import ceil_div
from mie.model.config import ModelConfig

MODEL, DRY_MODEL = "TinyLlama-1.1B", "toy"
PROMPT_LENGTH = 16
EAGER = {"enforce_eager": True, "async_scheduling": False}
INT4 = {"quantization": "int4"}
ENGINES: dict[str, dict[str, Any]] = {
    "mie": {},
    "mie int4": INT4,
    "mie int4, int8 activations": INT4 | {"activations": "int8"},
    "mie eager": EAGER,
    "transformers": {},
}
"""Engine names, and settings of mie. transformers runs the requests as one static batch."""
INT4_SIZES = (5 / 8, 9 / 8)
WEIGHT_SIZES = {"mie int4": INT4_SIZES, "mie int4, int8 activations": INT4_SIZES}
"""Bytes of a quantised weight and its share of a float32 scale: of the layers, and of the head."""
WORKLOADS, DRY_WORKLOADS = ((1, 150), (64, 150)), ((2, 3),)
"""Requests that arrive at once, and the new tokens of each."""


def bench_end_to_end(report: BenchReport) -> None:
    """Add the rows of every engine."""
    name = DRY_MODEL if report.is_dry_run else MODEL
    with tempfile.TemporaryDirectory(prefix="mie-bench-") as temporary:
        config = write_model(name, Path(temporary))
        for engine in ENGINES:
            reason = _why_missing(engine, report.is_dry_run)
            if not reason:
                try:
                    _measure(name, config, engine, temporary, report)
                    continue
                except PeerError as error:
                    reason = str(error)
                if engine != "transformers":
                    report.fail(f"end to end, {engine}: {reason}")
            report.skip(f"end to end, {engine}", reason)


def _why_missing(engine: str, is_dry_run: bool) -> str:
    """Return why an engine cannot run here, or an empty string."""
    if engine != "transformers":
        return ""
    if is_dry_run:
        return "dry run"
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    return f"{missing[0]} is not installed" if missing else ""


def _measure(
    model: str, config: ModelConfig, engine: str, directory: str, report: BenchReport
) -> None:
    workloads = DRY_WORKLOADS if report.is_dry_run else WORKLOADS
    most, length = (max(each) for each in zip(*workloads, strict=True))
    settings: dict[str, Any] = {
        "backend": "cupy-emulated" if report.is_dry_run else "cupy",
        "dtype": "float16",
        "num_blocks": ceil_div(PROMPT_LENGTH + length, BLOCK_SIZE) * most * 2,
        "block_size": BLOCK_SIZE,
    }
    spec = EngineSpec(
        family=engine.partition(" ")[0],
        kind="f16",
        directory=directory,
        max_num_seqs=most,
        max_model_len=PROMPT_LENGTH + length,
        settings=settings | ENGINES[engine],
        device="cuda",
    )
    with contextlib.closing(Child(spec)) as child:
        for number, (num_requests, num_tokens) in enumerate(workloads):
            # The first call has every size of table, so that each is compiled and captured.
            for seed in (100 + number, number):
                size = (num_requests, PROMPT_LENGTH)
                prompts = random_prompts(config.vocab_size, *size, seed)
                found = child.generate(prompts, num_tokens)
            sizes = WEIGHT_SIZES.get(engine)
            row = row_of(config, num_requests, num_tokens, found, report.ceilings, sizes)
            report.end_to_end.append({"model": model, "engine": engine, **row})
            print(f"end to end, {engine}: {row}", flush=True)
            report.save()


def row_of(
    config: ModelConfig,
    num_requests: int,
    num_tokens: int,
    found: Mapping[str, Any],
    ceilings: Mapping[str, float],
    weight_sizes: tuple[float, float] | None = None,
) -> dict[str, Any]:
    """Return tokens per second of a workload, and of its decode steps.

    The floor of a step is the time of its bytes at the higher of the two ceilings: the
    weights, and the cache of all requests in the middle of their answers.
    """
    steps = [later - sooner for sooner, later in pairwise(found["times"][0])]
    step_ms = 1000 * statistics.median(steps)
    context = PROMPT_LENGTH + num_tokens / 2
    num_bytes = decode_bytes(config, num_requests, context, 2, weight_sizes)
    floor_ms = 1e-6 * num_bytes / max(ceilings["copy_gb_per_s"], ceilings["read_gb_per_s"])
    return {
        "num_requests": num_requests,
        "num_tokens": num_requests * num_tokens,
        "seconds": found["seconds"],
        "peak_bytes": found["peak_bytes"],
        "tokens_per_s": num_requests * num_tokens / found["seconds"],
        "step_ms": step_ms,
        "decode_tokens_per_s": 1000 * num_requests / step_ms,
        "floor_ms": floor_ms,
        "over_floor": step_ms / floor_ms,
    }
