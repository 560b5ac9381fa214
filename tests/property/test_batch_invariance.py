"""Check that with ``batch_invariant=True`` a request's result does not depend on the batch.

Random loads go through the real engine. Requests run with others, in chunks, with and without the
prefix cache, preempted by recompute and by swap, forked, and with a window. Each request's logits
(of every position of its prompt and of every sampled token) must equal those it gets alone bit for
bit, computed in one piece. So must its tokens. Weights are those of the file, or rounded to int8 or
int4. Then activations may be rounded too. The dtype is float32, because in float64 the differences
would rarely be large enough to change a bit. The jit backend is always invariant: alone it runs
operator by operator, and in the batch it replays programs.
"""

import os
import sys
from collections import Counter

import numpy as np
import pytest
from compiled import needs_numba
from deadlines import run
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rare import check_until_seen
from tiny_models import (
    LLAMA,
    MISTRAL_WINDOW,
    QWEN2,
    QWEN3_MOE,
    QWEN3_TIED,
    random_weights,
    write_model,
)

from mie import EngineConfig, SamplingParams
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings
from mie.ops.blas import Blas

VOCAB = LLAMA["vocab_size"]
SIZES = {"max_position_embeddings": 1024, "eos_token_id": 39}
# Shapes that make bits differ. With AVX-512, products of fewer keys differ at head sizes that are
# not a multiple of 16. Products of more or fewer rows differ at head and hidden sizes from 32 on.
# With Haswell's kernels, products of fewer keys differ in blocks of 4 or with more than 8 query
# heads for each KV head. Products of more or fewer rows differ at any size.
ODD = SIZES | {"hidden_size": 100, "intermediate_size": 130, "head_dim": 40}
MODELS = {
    "llama": LLAMA | ODD | {"num_key_value_heads": 1},
    "window": MISTRAL_WINDOW | ODD | {"num_key_value_heads": 2, "sliding_window": 150},
    "qwen2": QWEN2 | ODD | {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64},
    "qwen3": QWEN3_TIED | ODD,
    "experts": QWEN3_MOE | ODD | {"num_experts_per_tok": 3, "moe_intermediate_size": 40},
    "wide group": LLAMA | ODD | {"num_attention_heads": 9, "num_key_value_heads": 1},
}
NUM_EXAMPLES = max(4, settings().max_examples // 50)
NUMERICS = ("dtype", "kv_cache_dtype", "quantization", "activations")
"""Settings that may change a bit, and are the same alone."""
BACKENDS = ["numpy", pytest.param("jit", marks=needs_numba)]

HAS_ACTIVATIONS = EngineConfig.SETTINGS["activations"].backends

seen: Counter[tuple[str, str]] = Counter()


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
            "max_tokens": draw(st.sampled_from([2, 12, 24])),
            "temperature": draw(st.sampled_from([0.0, 1.0])),
            "n": draw(st.sampled_from([1, 1, 2])),
            "seed": number,
            "ignore_eos": True,
        }
        # While it scores its prompt, a request takes nothing from the prefix cache.
        if draw(st.booleans()):
            params["prompt_logprobs"] = -1
        requests.append((prompt, params, draw(st.integers(0, 3))))
    size = draw(st.sampled_from([3, 4, 7, 16, 20, 48]))
    longest = max(len(p) + q["max_tokens"] for p, q, _ in requests)
    prompts = sum(-(-len(p) // size) for p, _, _ in requests)  # all begin, not all can finish
    most = draw(st.sampled_from([prompts, prompts, 3200 // size]))
    swaps = draw(st.booleans())
    config = {
        "block_size": size,
        "num_blocks": max(-(-longest // size), most) + 1,
        "watermark": 0.0,
        "max_num_batched_tokens": draw(st.sampled_from([7, 64, 2048])),
        "max_prefill_chunk": draw(st.sampled_from([None, 1, 50])),
        "enable_prefix_caching": draw(st.booleans()),
        "preemption_mode": "swap" if swaps else "recompute",
        "swap_space": 1 << 24 if swaps else None,
        "num_threads": draw(st.sampled_from([1, 2, 3])),
        "dtype": draw(st.sampled_from(["float32", "float32", "bfloat16"])),
        "quantization": draw(st.sampled_from([None, None, "int8", "int4"])),
    }
    if config["quantization"] is not None:
        config["activations"] = draw(st.sampled_from(["float32", "int8"]))
    return str(rng.choice(list(MODELS))), requests, config


def _prompt(seed, length):
    return np.random.default_rng(seed).integers(0, 39, length).tolist()


WITH_A_HIT = (
    "llama",
    [
        (_prompt(0, 130) + _prompt(1, 5), {"max_tokens": 20, "temperature": 0, "seed": 0}, 0),
        (_prompt(0, 130) + _prompt(2, 60), {"max_tokens": 20, "temperature": 1, "seed": 1}, 3),
    ],
    {
        "block_size": 16,
        "num_blocks": 40,
        "max_num_batched_tokens": 64,
        "max_prefill_chunk": None,
        "enable_prefix_caching": True,
        "preemption_mode": "recompute",
        "num_threads": 2,
        "dtype": "float32",
        "quantization": "int4",
    },
)
"""A load whose second prompt begins like the first, which is in the cache."""


def outcome(directory, requests, config, backend):
    """Return the tokens and all their log-probabilities by request and choice.

    Also return the log-probabilities of the prompts by request.
    """
    of_model = {name: config[name] for name in ("dtype", "quantization")}
    own = {name: value for name, value in config.items() if name not in of_model}
    own = EngineConfig(batch_invariant=True, max_model_len=1024, **own)
    engine = load_engine(directory, LoadSettings(engine=own, backend=backend, **of_model))
    seen[backend, str(config["quantization"])] += 1
    seen[backend, "integers"] += config.get("activations") == "int8"
    tokens, logprobs, prompts = {}, {}, {}
    waiting, step, added = dict(requests), 0, {}
    while waiting or engine.has_work:
        for name in [name for name, (*_, at) in waiting.items() if at <= step]:
            prompt, params, _ = waiting.pop(name)
            added[name] = engine.add_request(prompt, SamplingParams(logprobs=-1, **params))
        engine.step()
        step += 1
    for name, request in added.items():
        if request.prompt_logprobs:
            prompts[name] = [*map(by_id, request.prompt_logprobs)]
        for seq in request.sequences:
            tokens[name, seq.index] = seq.output_ids
            logprobs[name, seq.index] = [*map(by_id, seq.logprobs)]
            seen[backend, "prefix hits"] += request.metrics.num_cached_tokens > 0
    for segment in engine.log.segments():
        for records in segment.steps:
            seen.update((backend, record[0]) for record in records)
    return tokens, logprobs, prompts


def by_id(row):
    """Return the log-probabilities [V] in the order of the ids."""
    values = np.empty(VOCAB)
    values[row.token_ids] = row.logprobs
    return values


@settings(max_examples=NUM_EXAMPLES, deadline=None)
@given(load=loads())
@example(load=WITH_A_HIT)
@example(load=(*WITH_A_HIT[:2], WITH_A_HIT[2] | {"quantization": "int8"}))
@example(load=(*WITH_A_HIT[:2], WITH_A_HIT[2] | {"activations": "int8"}))
def check_loads(directories, backend, load):
    stored = ("auto", "int8", "fp8")[len(load[1]) % 3]
    compare(directories, backend, load, stored)


def check_int4_caches(directories, backend, num_examples):
    @settings(max_examples=num_examples, deadline=None)
    @given(load=loads())
    def check(load):
        compare(directories, backend, load, "int4")

    check()


def compare(directories, backend, load, stored):
    """Compare a load with each of its requests alone, over a cache of this dtype."""
    model, requests, config = load
    if backend not in HAS_ACTIVATIONS:
        config = {name: value for name, value in config.items() if name != "activations"}
    config = config | {"kv_cache_dtype": stored}
    in_batch = outcome(directories[model], dict(enumerate(requests)), config, backend)
    own = {name: config[name] for name in NUMERICS if name in config}
    own |= {"num_threads": 1} | ({"enforce_eager": True} if backend == "jit" else {})
    for number, (prompt, params, _) in enumerate(requests):
        alone = outcome(directories[model], {number: (prompt, params, 0)}, own, backend)
        assert alone[0]
        for mine, theirs in zip(alone, in_batch, strict=True):
            for key, value in mine.items():
                np.testing.assert_array_equal(theirs[key], value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_gets_the_same_result_alone_and_in_a_batch(directories, backend):
    """The loads contain every case that makes sums differ."""
    kinds = ("prefix hits", "preempt", "import", "fork", "copy", "None", "int8", "int4")
    kinds += ("integers",) * (backend in HAS_ACTIVATIONS)
    wanted = {(backend, kind): 1 for kind in kinds}
    check_until_seen(lambda check: check(directories, backend), check_loads, seen, wanted)


@pytest.mark.parametrize(
    "backend",
    [pytest.param("numpy", marks=pytest.mark.slow), pytest.param("jit", marks=needs_numba)],
)
def test_int4_caches_give_the_same_result_alone_and_in_a_batch(directories, backend):
    check_int4_caches(directories, backend, NUM_EXAMPLES)


@needs_numba
@pytest.mark.slow
def test_500_loads_with_an_int4_cache(directories):
    """Blocks of the loads are shared, copied on write and swapped."""
    before = seen.copy()
    check_int4_caches(directories, "jit", 500)
    found = seen - before
    assert all(found["jit", kind] for kind in ("prefix hits", "preempt", "import", "fork", "copy"))


@pytest.mark.skipif("MIE_OTHER_KERNELS" in os.environ, reason="this is the run that it starts")
@pytest.mark.parametrize("core", ["", "Haswell"])
@pytest.mark.slow
def test_batch_invariance_holds_under_other_kernels(core):
    """OpenBLAS chooses its kernels when it is loaded, so each choice takes a separate process."""
    # On AMD's Zen, OpenBLAS multiplies with the kernels for Haswell.
    is_haswell = core == "Haswell" and Blas().core in ("Haswell", "Zen")
    if is_haswell or core == os.environ.get("OPENBLAS_CORETYPE", ""):
        pytest.skip("the kernels of this process")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("OPENBLAS_")}
    environment["MIE_OTHER_KERNELS"] = "1"
    if core:
        environment["OPENBLAS_CORETYPE"] = core
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["-k", "not jit", __file__]
    done = run(command, env=environment, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:]
