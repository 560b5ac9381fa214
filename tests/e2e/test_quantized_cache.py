"""Test a quantised KV cache in the whole engine, with the bundled model."""

from __future__ import annotations

import json

import pytest
from command_line import mie
from emulated import needs_compiler

from mie import LLM, SamplingParams

PROMPT = "Tell me a story about Mia the otter, the old mill and a bell."


def stories(
    backend: str, stored: str, dtype: str = "auto", block_size: int = 8, max_tokens: int = 24
) -> tuple[list[list[int]], LLM]:
    """Return tokens of a chunked prompt, of a fork, and of sequences that were swapped out."""
    llm = LLM(
        "bundled",
        backend=backend,
        dtype=dtype,
        kv_cache_dtype=stored,
        block_size=block_size,
        num_blocks=56 // block_size,
        max_num_batched_tokens=12,
        preemption_mode="swap",
        swap_space=1 << 20,
    )
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    sampled = SamplingParams(temperature=1.5, seed=3, n=2, max_tokens=6, ignore_eos=True)
    prompts = ["Once upon a time", "Tom the owl", PROMPT]
    outputs = llm.generate(prompts, [greedy, greedy, sampled], use_tqdm=False)
    return [choice.token_ids for output in outputs for choice in output.outputs], llm


@needs_compiler
@pytest.mark.parametrize(
    ("stored", "max_tokens"),
    [("int8", 10), *(pytest.param(n, 24, marks=pytest.mark.slow) for n in ("int8", "fp8"))],
)
def test_the_emulated_gpu_gives_the_tokens_of_the_numpy_backend(stored: str, max_tokens: int):
    """Rounding to a neighbouring element moves the logits by much less than the best one leads."""
    tokens, llm = stories("cupy-emulated", stored, max_tokens=max_tokens)
    assert tokens == stories("numpy-plain", stored, max_tokens=max_tokens)[0]
    stats = llm.engine.scheduler.manager.stats
    assert stats.num_copies > 0
    assert stats.num_imported > 0


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_the_command_line_uses_the_requested_cache_dtype(stored: str):
    arguments = ["--json", "--temperature", "0", "--max-tokens", "60", "--kv-cache-dtype", stored]
    [line] = mie("generate", *arguments, PROMPT).stdout.splitlines()
    text = json.loads(line)["text"]
    assert all(word in text for word in ("Mia the otter", "mill", "bell")), text
