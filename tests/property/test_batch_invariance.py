"""With ``batch_invariant=True`` what a request gets is the same bit for bit, whatever else runs.

Random loads go through the real engine: in company, in chunks, with and without the prefix cache,
preempted by recompute and by swap, forked, with a window. Each request's logits (of every position
of its prompt, and of every token it drew) must equal those it gets alone, computed in one piece,
and so must its tokens. float32: in float64 differences would be too small to change a bit often.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import LLAMA, MISTRAL_WINDOW, QWEN2, QWEN3_TIED, random_weights, write_model

from mie import EngineConfig, SamplingParams
from mie.load import load_engine
from mie.ops_cpu import attention_plan, attention_prefill

VOCAB = LLAMA["vocab_size"]
# Contexts of several tiles, and groups of two tiles.
SIZES = {"max_position_embeddings": 1024, "eos_token_id": 39}
MODELS = {
    "llama": LLAMA | SIZES,
    "window": MISTRAL_WINDOW | SIZES | {"sliding_window": 150},
    "qwen2": QWEN2 | SIZES,
    "qwen3": QWEN3_TIED | SIZES,
}
NUM_EXAMPLES = int(os.environ.get("MIE_INVARIANCE_EXAMPLES", "30"))

seen: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def small_groups():
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention_plan, attention_prefill):
            patch.setattr(module, "SCORES", 1 << 12)
        yield


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return {
        name: write_model(base / name, config, random_weights(config))
        for name, config in MODELS.items()
    }


@st.composite
def loads(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shared = rng.integers(0, 39, 260).tolist()
    requests = []
    for number in range(draw(st.integers(2, 4))):
        prompt = shared[: draw(st.sampled_from([0, 17, 130, 260]))]
        prompt = prompt + rng.integers(0, 39, draw(st.sampled_from([1, 5, 60, 133]))).tolist()
        params = {
            "max_tokens": draw(st.sampled_from([2, 20, 40])),
            "temperature": draw(st.sampled_from([0.0, 1.0])),
            "n": draw(st.sampled_from([1, 1, 2])),
            "seed": number,
            "ignore_eos": True,
        }
        # Scoring its prompt, a request takes nothing from the prefix cache.
        if draw(st.booleans()):
            params["prompt_logprobs"] = -1
        requests.append((prompt, params, draw(st.integers(0, 3))))
    longest = max(len(p) + q["max_tokens"] for p, q, _ in requests)
    prompts = sum(-(-len(p) // 16) for p, _, _ in requests)  # all begin, not all can go on
    swaps = draw(st.booleans())
    config = {
        "num_blocks": max(-(-longest // 16), draw(st.sampled_from([prompts, prompts, 200]))) + 1,
        "watermark": 0.0,
        "max_num_batched_tokens": draw(st.sampled_from([7, 64, 2048])),
        "max_prefill_chunk": draw(st.sampled_from([None, 1, 50])),
        "enable_prefix_caching": draw(st.booleans()),
        "preemption_mode": "swap" if swaps else "recompute",
        "swap_space": 1 << 24 if swaps else None,
        "num_threads": draw(st.sampled_from([1, 2])),
    }
    return draw(st.sampled_from(sorted(MODELS))), requests, config


def outcome(directory, requests, config):
    """By request and choice: the tokens, and all log-probabilities behind them; by request: those
    of its prompt."""
    config = EngineConfig(batch_invariant=True, max_model_len=1024, **config)
    engine = load_engine(directory, config)
    tokens, logprobs, prompts = {}, {}, {}
    waiting, step = dict(requests), 0
    while waiting or engine.has_work:
        for name in [name for name, (*_, at) in waiting.items() if at <= step]:
            prompt, params, _ = waiting.pop(name)
            engine.add_request(prompt, SamplingParams(logprobs=-1, **params), str(name))
        output = engine.step()
        for name, rows in output.prompt_logprobs.items():
            prompts.setdefault(int(name), []).extend(map(by_id, rows))
        for new in output.outputs:
            key = int(new.request_id), new.index
            tokens.setdefault(key, []).extend(new.token_ids)
            logprobs.setdefault(key, []).extend(map(by_id, new.logprobs))
            if new.finish_reason is not None:
                seen["prefix hits"] += new.metrics.num_cached_tokens > 0
        step += 1
    for segment in engine.log.segments():
        for records in segment.steps:
            seen.update(record[0] for record in records)
    return tokens, logprobs, prompts


def by_id(row):
    """Log-probabilities [V] in the order of the ids."""
    values = np.empty(VOCAB)
    values[row.token_ids] = row.logprobs
    return values


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(load=loads())
def test_a_request_gets_the_same_alone_and_in_company(directories, load):
    model, requests, config = load
    company = outcome(directories[model], dict(enumerate(requests)), config)
    for number, (prompt, params, _) in enumerate(requests):
        alone = outcome(directories[model], {number: (prompt, params, 0)}, {"num_threads": 1})
        assert alone[0]
        for mine, theirs in zip(alone, company, strict=True):
            for key, value in mine.items():
                np.testing.assert_array_equal(theirs[key], value)


def test_it_happened():
    """The loads did what makes sums differ."""
    for kind in ("prefix hits", "preempt", "import", "fork", "copy"):
        assert seen[kind], f"{kind} never happened: {seen}"


@pytest.mark.skipif("MIE_INVARIANCE_CORE" in os.environ, reason="this is the run that it starts")
@pytest.mark.parametrize("core", ["the machine's own", "Haswell"])
def test_it_holds_under_other_kernels(core):
    """OpenBLAS chooses its kernels when it is loaded: each choice takes a process of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    if core == "Haswell":
        environment["OPENBLAS_CORETYPE"] = core
    environment |= {"MIE_INVARIANCE_CORE": core, "MIE_INVARIANCE_EXAMPLES": "15"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    command += ["-k", "alone_and_in_company"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:]
