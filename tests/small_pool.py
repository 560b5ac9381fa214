"""Serve a few stories in a pool so small that the engine shares, copies, swaps and preempts."""

from typing import Any

from mie import LLM, SamplingParams

PROMPT = "Tell me a story about Mia the otter, the mill and a bell."


def stories(backend: str, *, max_tokens: int = 24, **settings: Any) -> tuple[list[list[int]], LLM]:
    """Return the tokens of greedy and of sampled requests in 56 slots, and their engine.

    The bundled model's best logit leads by far more than rounding errors, so these tokens can be
    compared between backends.
    """
    size = settings.get("block_size", 8)
    given = {"num_blocks": 56 // size, "max_num_batched_tokens": 16, "block_size": 8, **settings}
    llm = LLM("bundled", backend=backend, preemption_mode="swap", swap_space=1 << 20, **given)
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    sampled = SamplingParams(temperature=1.5, seed=3, n=2, max_tokens=6, ignore_eos=True)
    nucleus = SamplingParams(
        temperature=1.2, top_p=0.95, top_k=60, seed=4, max_tokens=6, ignore_eos=True
    )
    outputs = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    requests = ["Once upon a time", "Tom the owl", PROMPT, "Mia"]
    outputs += llm.generate(requests, [greedy, greedy, sampled, nucleus], use_tqdm=False)
    return [choice.token_ids for output in outputs for choice in output.outputs], llm


def check_small_pool(llm: LLM) -> None:
    """Assert that the stories hit the cache, copied blocks and were swapped, and left nothing."""
    manager = llm.engine.scheduler.manager
    assert manager.stats.num_hit_tokens > 0
    assert manager.stats.num_copies > 0
    assert manager.stats.num_exported > 0
    assert manager.stats.num_imported > 0
    assert manager.num_used == 0
