"""Define the processes of the parts."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from typing import Any

from gpu.run import ROOT


def child_environment(is_dry_run: bool) -> dict[str, Any]:
    """Return the facts that the figures hold for.

    Raises:
        MieError: there is no CuPy or no device.
    """
    import numpy as np

    state: dict[str, Any] = {"python": platform.python_version(), "numpy": np.__version__}
    state |= {name: installed_version(name) for name in ("torch", "transformers", "ml_dtypes")}
    if is_dry_run:
        return {**state, "device": "none (dry run)"}
    from mie.ops_gpu.environment import library_facts
    from mie.ops_gpu.launcher import CupyLauncher

    cupy: Any = CupyLauncher().xp
    runtime, device = cupy.cuda.runtime, cupy.cuda.Device()
    properties = runtime.getDeviceProperties(device.id)
    return {
        **state,
        "device": properties["name"].decode(),
        "compute_capability": device.compute_capability,
        "cupy": cupy.__version__,
        "cuda_driver": runtime.driverGetVersion(),
        **library_facts(cupy),
        "num_multiprocessors": properties["multiProcessorCount"],
        "l2_bytes": properties["l2CacheSize"],
        "memory_bytes": properties["totalGlobalMem"],
    }


def installed_version(name: str) -> str:
    """Return a package's version without importing the package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


STORY = "Tell me a story about Mia the otter, the mill and a bell."
PROMPTS = ("Once upon a time", "Tom the owl", STORY)

LIMITS = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.2}
"""Maximum difference of a token's log-probability from NumPy's in float32."""

QUANTISED_WEIGHTS: tuple[dict[str, str], ...] = ({"quantization": "int8"}, {"quantization": "int4"})
TOKEN_KINDS: tuple[dict[str, Any], ...] = (
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    *({"dtype": dtype, **each} for dtype in LIMITS for each in QUANTISED_WEIGHTS),
    {"dtype": "float16", "kv_cache_dtype": "int8"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
    *({"dtype": dtype, "kv_cache_dtype": "int4"} for dtype in LIMITS),
    {"dtype": "float16", "quantization": "int4", "kv_cache_dtype": "int8"},
    {"dtype": "float32", "quantization": "int4", "activations": "int8"},
    {"dtype": "bfloat16", "quantization": "int8", "activations": "int8"},
    {"dtype": "bfloat16", "batch_invariant": True},
)


def child_end_to_end(is_dry_run: bool) -> dict[str, Any]:
    """Judge every token by NumPy's log-probabilities of it and of the best one at its place.

    Both must be the device's, up to rounding, and the token must be the best or as good.
    """
    backend, num_tokens = ("cupy-emulated", 6) if is_dry_run else ("cupy", 48)
    is_right, largest = {}, {}
    for kind in TOKEN_KINDS[: 2 if is_dry_run else None]:
        name = " ".join(map(str, kind.values()))
        found = judged_tokens(backend, kind, num_tokens)
        largest[name] = max(max(off, behind) for off, behind in found)
        is_right[name] = largest[name] <= LIMITS[kind["dtype"]]
    return {"num_tokens": len(found), "largest_difference": largest, "is_right": is_right}


def judged_tokens(
    backend: str, kind: Mapping[str, Any], num_tokens: int
) -> list[tuple[float, float]]:
    """Return how far each token's log-probability is from NumPy's, and behind NumPy's best.

    The greedy requests are in few blocks, and have chunks, prefix hits, and swaps.
    """
    from mie import LLM, SamplingParams

    room: dict[str, Any] = {"block_size": 8, "num_blocks": 14, "max_num_batched_tokens": 16}
    swap: dict[str, Any] = {"preemption_mode": "swap", "swap_space": 1 << 20}
    llm = LLM("bundled", backend=backend, **kind, **room, **swap)
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    outputs = llm.generate([STORY], params, use_tqdm=False)
    outputs += llm.generate(list(PROMPTS), params, use_tqdm=False)
    rounding = ("quantization", "kv_cache_dtype", "activations")
    stored = {name: kind[name] for name in rounding if name in kind}
    oracle = LLM("bundled", backend="numpy", dtype="float32", **stored)
    answers = [output.outputs[0] for output in outputs]
    texts = [
        {"prompt_token_ids": [*output.prompt_token_ids, *answer.token_ids]}
        for output, answer in zip(outputs, answers, strict=True)
    ]
    scored = SamplingParams(max_tokens=1, prompt_logprobs=1)
    found = []
    for answer, text in zip(answers, oracle.generate(texts, scored, use_tqdm=False), strict=True):
        rows = [row for row in text.prompt_logprobs or () if row is not None]
        ours_of, rows = answer.logprobs or [], rows[-len(answer.token_ids) :]
        places = zip(answer.token_ids, ours_of, rows, strict=True)
        for token, ours, wanted in places:
            best = max(each.logprob for each in wanted.values())
            own = wanted[token].logprob
            found.append((abs(ours[token].logprob - own), best - own))
    return found


GRAPH_KINDS = (
    {"dtype": "float32"},
    {"dtype": "float16"},
    {"dtype": "bfloat16"},
    {"dtype": "float16", "kv_cache_dtype": "int8"},
    {"dtype": "float16", "kv_cache_dtype": "int4"},
    {"dtype": "bfloat16", "quantization": "int4"},
    {"dtype": "bfloat16", "quantization": "int4", "activations": "int8"},
)


def child_graphs(is_dry_run: bool) -> dict[str, Any]:
    """Check that captured steps give the bits of eager ones: tokens and log-probabilities."""
    backend, num_tokens = ("cupy-emulated", 6) if is_dry_run else ("cupy", 32)
    is_equal, num_logprobs = {}, 0
    for settings in GRAPH_KINDS[: 1 if is_dry_run else None]:
        eager, captured = (
            logprobs_of(backend, num_tokens, {**settings, "enforce_eager": is_eager})
            for is_eager in (True, False)
        )
        is_equal[" ".join(settings.values())] = eager == captured
        num_logprobs += len(eager)
    return {"num_logprobs": num_logprobs, "is_equal": is_equal}


def logprobs_of(
    backend: str, num_tokens: int, settings: Mapping[str, Any]
) -> list[tuple[int, float]]:
    """Return the candidates of three greedy requests.

    The requests end one after another, so that batches have several sizes.
    """
    from mie import LLM, SamplingParams

    # Steps are not overlapped, so that the batches are the same ones.
    llm = LLM("bundled", backend=backend, async_scheduling=False, **settings)
    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens - each, ignore_eos=True, logprobs=3)
        for each in range(3)
    ]
    outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
    steps = [step for output in outputs for step in output.outputs[0].logprobs or []]
    return [(token, found.logprob) for step in steps for token, found in step.items()]


def child_sanitized(tool: str, is_dry_run: bool) -> int:
    """Run pytest in this process under the sanitizer, and return its exit code."""
    import pytest

    selected = "cupy and float16 and not bfloat16"
    if tool != "memcheck":  # the kernels that share memory or wait for each other
        selected += " and (paged or long or rms_norm or argmax or sample)"
    if is_dry_run:
        selected = "checked and rms_norm and float16 and not bfloat16"
    else:
        import cupy

        cupy.cuda.set_allocator(None)  # the pool would hide an access past an array's end
    file = str(ROOT / "tests" / "kernels" / "test_kernels.py")
    options = ["-q", "-W", "default", "-o", "addopts=", "-o", "timeout=0", "-p", "no:cacheprovider"]
    return int(pytest.main([file, "-k", selected, *options]))


CHILDREN: dict[str, Callable[[bool], dict[str, Any]]] = {
    "environment": child_environment,
    "end-to-end": child_end_to_end,
    "graphs": child_graphs,
}
"""The children that print one JSON object."""


def run_child(name: str, tool: str | None, is_dry_run: bool) -> int:
    """Run one child and return its exit code."""
    if name == "sanitized":
        assert tool is not None
        return child_sanitized(tool, is_dry_run)
    from mie.errors import MieError

    try:
        print(json.dumps(CHILDREN[name](is_dry_run)))
    except MieError as error:
        print(f"gpu_check: {error}")
        return 2
    return 0
