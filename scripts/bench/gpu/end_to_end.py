"""Measure whole engines on the same random weights, each in its own process."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cpu.shapes import Costs, Format, random_prompts, write_model
from bench.gpu.peers import torch_is_missing
from bench.gpu.report import BenchReport
from bench.gpu.shapes import BLOCK_SIZE
from bench.harness import run_child
from mie.base.arithmetic import ceil_div
from mie.checkpoint.config import ModelConfig

MODEL, DRY_MODEL = "TinyLlama-1.1B", "toy"
PROMPT_LENGTH = 16
ENGINES = ("mie", "mie eager", "transformers")
"""Engine names. "eager" has neither CUDA graphs nor overlapped scheduling."""


@dataclass(frozen=True, kw_only=True)
class GpuWorkload:
    """Requests of one kind, which mie runs at once and `generate` one after another."""

    num_requests: int
    num_tokens: int
    num_generated: int
    """How many requests `generate` runs. Its rate does not depend on the number."""


WORKLOADS = (
    GpuWorkload(num_requests=1, num_tokens=150, num_generated=1),
    GpuWorkload(num_requests=64, num_tokens=150, num_generated=2),
)
DRY_WORKLOADS = (GpuWorkload(num_requests=2, num_tokens=3, num_generated=1),)


# In the parent.


def bench_end_to_end(report: BenchReport, seconds_left: Callable[[], float]) -> None:
    """Add the rows of every engine. Each runs in a child of bench_gpu.py (``--child``)."""
    name = DRY_MODEL if report.is_dry_run else MODEL
    with tempfile.TemporaryDirectory(prefix="mie-bench-") as temporary:
        config = write_model(name, Path(temporary))
        for engine in ENGINES:
            reason = engine_is_missing(engine, report.is_dry_run)
            if not reason:
                options = ["--child", engine, "--directory", temporary]
                options += ["--dry-run"] if report.is_dry_run else []
                try:
                    results = run_child(
                        "bench_gpu", arguments=options, seconds=max(1.0, seconds_left())
                    )
                    report.end_to_end += rows(name, config, engine, results, report)
                    report.save()
                    continue
                except RuntimeError as error:
                    reason = str(error)
                if engine != "transformers":
                    report.fail(f"end to end, {engine}: {reason}")
            report.skip(f"end to end, {engine}", reason)


def engine_is_missing(engine: str, is_dry_run: bool) -> str:
    """Return why an engine cannot run here, or an empty string."""
    from importlib.util import find_spec

    if engine != "transformers":
        return ""
    if find_spec("transformers") is None:
        return "transformers is not installed"
    return torch_is_missing(is_dry_run)


def rows(
    model: str, config: ModelConfig, engine: str, results: Sequence[Any], report: BenchReport
) -> list[dict[str, Any]]:
    """Add a row for each workload."""
    workloads = DRY_WORKLOADS if report.is_dry_run else WORKLOADS
    found = []
    for workload, result in zip(workloads, results, strict=True):
        row = row_of(engine, workload, result, step_floor_ms(config, workload, report.ceilings))
        print(f"end to end, {engine}: {row}", flush=True)
        found.append({"model": model, **row})
    return found


def row_of(
    engine: str, workload: GpuWorkload, result: Mapping[str, Any], floor_ms: float
) -> dict[str, Any]:
    """Return tokens per second of a workload.

    For mie the row also has a decode step, and the time that its bytes take at the ceiling.
    """
    num_tokens = workload.num_requests * workload.num_tokens
    row = {
        "engine": engine,
        "num_requests": workload.num_requests,
        "num_tokens": workload.num_tokens,
        **result,
        "tokens_per_s": num_tokens / result["seconds"],
    }
    if "step_ms" in result:
        row["decode_tokens_per_s"] = 1000 * workload.num_requests / result["step_ms"]
        row |= {"floor_ms": floor_ms, "over_floor": result["step_ms"] / floor_ms}
    return row


def step_floor_ms(
    config: ModelConfig, workload: GpuWorkload, ceilings: Mapping[str, float]
) -> float:
    """Return the milliseconds that a median step needs to read its bytes once.

    The bytes are the 16-bit weights and the cache, read at the higher of the two ceilings.
    """
    context = PROMPT_LENGTH + workload.num_tokens / 2
    stored = Format(weight=2, cache=2)
    num_bytes = Costs.of(config).decode_bytes(workload.num_requests, context, stored)
    return 1e-6 * num_bytes / max(ceilings["copy_gb_per_s"], ceilings["read_gb_per_s"])


# In the children.


def child(args: argparse.Namespace) -> None:
    """Print an engine's results as one line of JSON, the last of the output."""
    workloads = DRY_WORKLOADS if args.dry_run else WORKLOADS
    if args.child == "transformers":
        results = run_transformers(args.directory, workloads)
    else:
        backend = "cupy-emulated" if args.dry_run else "cupy"
        settings = {"enforce_eager": True, "async_scheduling": False}
        results = run_mie(
            args.directory, backend, workloads, settings if args.child == "mie eager" else {}
        )
    print(json.dumps(results))


def run_mie(
    directory: str, backend: str, workloads: Sequence[GpuWorkload], settings: Mapping[str, Any]
) -> list[Any]:
    """Return the results of each workload.

    They are the seconds end to end, the median step in which all requests decode, and peak memory.
    """
    from mie import LLM

    most = max(each.num_requests for each in workloads)
    length = PROMPT_LENGTH + max(each.num_tokens for each in workloads)
    llm = LLM(
        directory,
        skip_tokenizer_init=True,
        backend=backend,
        dtype="float16",
        max_model_len=length,
        max_num_seqs=most,
        num_blocks=ceil_div(length, BLOCK_SIZE) * most * 2,
        block_size=BLOCK_SIZE,
        enable_prefix_caching=False,
        **settings,
    )
    vocab_size = ModelConfig.load(Path(directory)).vocab_size
    results = []
    for seed, workload in enumerate(workloads):
        count = workload.num_requests
        # Its decodes have every size of table, so that each is compiled and captured.
        step_through(
            llm, random_prompts(vocab_size, count, PROMPT_LENGTH, 100 + seed), workload.num_tokens
        )
        prompts = random_prompts(vocab_size, count, PROMPT_LENGTH, seed)
        seconds, steps = step_through(llm, prompts, workload.num_tokens)
        results.append(
            {
                "seconds": seconds,
                "step_ms": 1000 * statistics.median(steps),
                "peak_bytes": device_pool_bytes(backend),
            }
        )
    return results


def step_through(
    llm: Any, prompts: Sequence[list[int]], num_tokens: int
) -> tuple[float, list[float]]:
    """Return the seconds of all requests, and of each decode step.

    The total counts from the first request's arrival to the last token.
    """
    from mie import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start, steps, num_finished = time.perf_counter(), [], 0
    for prompt in prompts:
        llm.add_request({"prompt_token_ids": prompt}, params)
    while llm.has_work:
        before = time.perf_counter()
        outputs = llm.step()
        steps.append(time.perf_counter() - before)
        finished = [output for output in outputs if output.finished]
        assert all(len(output.outputs[0].token_ids) == num_tokens for output in finished)
        num_finished += len(finished)
    assert num_finished == len(prompts)
    return time.perf_counter() - start, steps[1:]  # the first computes the prompts


def device_pool_bytes(backend: str) -> int | None:
    """Return the bytes that CuPy's pool holds. The pool gives no memory back unasked."""
    if backend != "cupy":
        return None
    import cupy

    return int(cupy.get_default_memory_pool().total_bytes())


def run_transformers(directory: str, workloads: Sequence[GpuWorkload]) -> list[Any]:
    """Return the seconds that all requests of each workload would take one after another."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float16)
    model = model.to("cuda").eval()
    model.generation_config.eos_token_id = None
    vocab_size = int(model.config.vocab_size)
    results = []
    for seed, workload in enumerate(workloads):
        prompts = random_prompts(vocab_size, workload.num_generated, PROMPT_LENGTH, seed)
        generate(model, prompts[0], 8)
        seconds = sum(generate(model, prompt, workload.num_tokens) for prompt in prompts)
        scale = workload.num_requests / workload.num_generated
        peak = int(torch.cuda.max_memory_allocated())
        results.append({"seconds": seconds * scale, "peak_bytes": peak})
    return results


def generate(model: Any, prompt: list[int], num_tokens: int) -> float:
    """Return the seconds of one greedy request."""
    import torch

    ids = torch.tensor([prompt], device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
    torch.cuda.synchronize()
    assert output.shape[1] == len(prompt) + num_tokens
    return time.perf_counter() - start
