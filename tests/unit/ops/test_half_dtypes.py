"""dtype "bfloat16" or "float16" on a CPU: weights and KV cache have 16 bits, arithmetic has 32."""

import logging
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import tiny_models
from compiled import HAS_NUMBA, needs_numba

from mie import LLM, SamplingParams
from mie.errors import WeightsError
from mie.ops.kv_cache import HALVES, gather_kv, move_blocks, write_kv
from mie.ops.weights.quantised_cache import QuantizedCache

CPUS = ("numpy", pytest.param("jit", marks=needs_numba))
NAMES = ("numpy", *(["jit"] if HAS_NUMBA else []))
PROMPT = [5, 9, 2, 7, 11, 3, 8, 6, 4, 10, 12, 5, 9]
SEEN = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)


def load(directory: Path, dtype: str, **settings: Any) -> LLM:
    given = {"skip_tokenizer_init": True, "num_blocks": 32, "block_size": 4, **settings}
    return LLM(directory, dtype=dtype, **given)


def logprobs(llm: LLM) -> list[float]:
    """Return the log-probability of every token after the prompt."""
    [output] = llm.generate([PROMPT], SEEN, use_tqdm=False)
    [row] = output.outputs[0].logprobs or []
    return [row[token_id].logprob for token_id in sorted(row)]


def tokens(llm: LLM) -> list[list[int]]:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    outputs = llm.generate([PROMPT, PROMPT[:5], [*PROMPT, 1]], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [
        *((dtype, "numpy") for dtype in HALVES),
        pytest.param("bfloat16", "jit", marks=needs_numba),
        pytest.param("float16", "jit", marks=[needs_numba, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
def test_a_checkpoint_of_floats_is_rounded(name, dtype, backend, tiny, tmp_path):
    model = tiny[name]
    weights = {each: array.astype(HALVES[dtype]) for each, array in model.weights.items()}
    rounded = tiny_models.write_model(tmp_path, model.config, weights)
    one = load(model.directory, dtype, backend=backend)
    two = load(rounded, dtype, backend=backend)
    assert tokens(one) == tokens(two)
    assert logprobs(one) == logprobs(two)
    exact = {each: array.astype(np.float64) for each, array in weights.items()}
    x = naive.logits(model.config, exact, PROMPT)[-1]
    expected = x - np.log(np.exp(x - x.max()).sum()) - x.max()
    np.testing.assert_allclose(logprobs(one), expected, atol=0.2)
    assert logprobs(one) != logprobs(load(rounded, "float32", backend=backend)), "the cache too"


@pytest.mark.parametrize(
    ("backend", "dtype", "name"),
    [("numpy", "half", "float16"), pytest.param("jit", "bfloat16", "bfloat16", marks=needs_numba)],
)
def test_sizes_halve_and_one_log_line_says_so(backend, dtype, name, tiny, caplog):
    def sizes(dtype: str) -> dict[str, float]:
        llm = load(tiny["llama"].directory, dtype, backend=backend)
        found = {"mie:weights_bytes", "mie:kv_bytes"}
        return {each.name: each.value for each in llm.get_metrics() if each.name in found}  # type: ignore[attr-defined]  # they are gauges

    with caplog.at_level(logging.INFO, "mie"):
        whole = sizes("float32")
        assert "computes in float32" not in caplog.text
        half = sizes(dtype)
        assert caplog.text.count(f"kept in {name} and the KV cache in {name}; a CPU") == 1
    assert half["mie:kv_bytes"] == whole["mie:kv_bytes"] / 2
    assert 0.5 <= half["mie:weights_bytes"] / whole["mie:weights_bytes"] < 0.55


@pytest.mark.parametrize("backend", ["numpy", pytest.param("jit", marks=needs_numba)])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_blocks_are_copied_swapped_and_shared(preemption_mode: str, backend: str, tiny: Any):
    given = {"max_num_batched_tokens": 8, "max_num_seqs": 3, "max_model_len": 40}
    if preemption_mode == "swap":
        given["swap_space"] = 1 << 20
    roomy = load(tiny["llama"].directory, "bfloat16", backend=backend)
    tight = load(
        tiny["llama"].directory,
        "bfloat16",
        backend=backend,
        **{**given, "num_blocks": 12, "preemption_mode": preemption_mode},
    )
    assert tokens(tight) == tokens(roomy)
    assert tokens(tight) == tokens(roomy), "with what is cached"
    counts = {each.name: each.value for each in tight.get_metrics() if hasattr(each, "value")}
    assert counts["vllm:num_preemptions"] > 0


def test_a_weight_that_float16_does_not_have_is_refused(tiny: Any, tmp_path: Path):
    model = tiny["llama"]
    name = "model.layers.1.mlp.up_proj.weight"
    weights = {each: array.astype(np.float32) for each, array in model.weights.items()}
    weights[name][3, 4] = 1e5
    directory = tiny_models.write_model(tmp_path, model.config, weights)
    for backend in NAMES:
        with pytest.raises(WeightsError, match=f"{name}.*float16 does not have.*bfloat16"):
            load(directory, "half", backend=backend)
    assert load(directory, "bfloat16").generate([PROMPT], SEEN, use_tqdm=False)[0].finished


@pytest.mark.parametrize("dtype", HALVES)
def test_a_cache_of_halves_has_the_rounded_numbers(dtype: str):
    rng = np.random.default_rng(0)
    cache = QuantizedCache.zeros((2, 2, 6, 4, 3, 8), HALVES[dtype])
    keys, values = rng.normal(size=(2, 5, 3, 8)).astype(np.float32)
    keys[0, 0, 0] = 1e5  # float16 has infinity
    slots = np.array([4, 5, 6, 7, 12])
    write_kv(keys, values, cache[1, 0], cache[1, 1], slots)
    move_blocks(cache, cache, np.array([1]), np.array([5]))
    with np.errstate(over="ignore"):
        expected = keys.astype(HALVES[dtype]).astype(np.float32)
    for block in (1, 5):
        got = gather_kv(cache[1, 0], np.array([block, 3]), 0, 5)
        assert got.dtype == np.float32
        np.testing.assert_array_equal(got, expected)
    assert cache.scales is None
    assert cache.elements.dtype == HALVES[dtype]
