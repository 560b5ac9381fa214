"""Check that the engine on the emulated GPU gives the tokens of the NumPy backend.

The stories have chunks, a prefix hit, a fork that copies a block, and a preemption that swaps.
Tokens are compared although both sides compute in float32: the bundled model's best logit leads by
far more than rounding errors.
"""

import numpy as np
import pytest
import tiny_models
from compiled import needs_numba
from emulated import needs_compiler
from rank_threads import ranks_as_threads
from small_pool import PROMPT, check_small_pool, stories

from mie import LLM, SamplingParams

LENGTHS = pytest.mark.parametrize("max_tokens", [10, 24])


@pytest.mark.slow
@needs_compiler
@LENGTHS
@pytest.mark.parametrize("stored", ["auto", "int8", "fp8", "int4"])
def test_the_emulated_gpu_gives_the_tokens_of_numpy(stored: str, max_tokens: int):
    """Rounding to a neighbouring number of a quantised cache moves no best logit either."""
    tokens, llm = stories("cupy-emulated", max_tokens=max_tokens, kv_cache_dtype=stored)
    wanted, _ = stories("numpy", max_tokens=max_tokens, kv_cache_dtype=stored)
    assert tokens == wanted
    check_small_pool(llm)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("settings", [{}, {"kv_cache_dtype": "int8", "batch_invariant": True}])
def test_two_ranks_of_the_emulated_gpu_give_the_tokens_of_one(settings):
    expected, _ = stories("cupy-emulated", max_tokens=10, **settings)
    with ranks_as_threads():
        tokens, llm = stories("cupy-emulated", max_tokens=10, tensor_parallel_size=2, **settings)
        check_small_pool(llm)
    assert tokens == expected


@pytest.mark.slow
@needs_compiler
@LENGTHS
def test_float16_on_tensor_cores_gives_the_same_story(max_tokens: int):
    """The best logit leads by at least 0.1 in each step, ten times the error of float16."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    texts = [
        LLM("bundled", backend=backend, dtype=dtype, num_blocks=8)
        .generate([PROMPT], greedy, use_tqdm=False)[0]
        .outputs[0]
        .text
        for backend, dtype in (("cupy-emulated", "float16"), ("numpy", "float32"))
    ]
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A model whose tokens i and i + 20 have equal logits: the best one is always tied."""
    weights = tiny_models.random_weights(tiny_models.LLAMA)
    head = weights["lm_head.weight"]
    head[20:] = head[:20]
    return tiny_models.write_model(tmp_path_factory.mktemp("twins"), tiny_models.LLAMA, weights)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("numpy", "float32"),
        pytest.param("jit", "float32", marks=needs_numba),
        pytest.param("cupy-emulated", "float16", marks=[pytest.mark.slow, needs_compiler]),
        pytest.param("cupy-emulated", "bfloat16", marks=[pytest.mark.slow, needs_compiler]),
    ],
)
def test_a_single_candidate_is_the_greedy_token_if_logits_are_tied(twins, backend, dtype):
    # With hits, the second run would compute fewer rows at a time and round differently.
    llm = LLM(
        twins,
        backend=backend,
        dtype=dtype,
        num_blocks=64,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
    )
    rng = np.random.default_rng(1)
    prompts = [rng.integers(4, 40, size=5).tolist() for _ in range(6)]

    def tokens(**params):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, seed=1, **params)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    greedy = tokens(temperature=0)
    assert all(token_id < 20 for answer in greedy for token_id in answer)
    assert tokens(temperature=1.0, top_k=1) == greedy
    assert tokens(temperature=1.0, top_p=1e-9) == greedy
    assert tokens(temperature=1.0, min_p=1.0, top_k=1) == greedy
    assert tokens(temperature=1.0, top_k=2) != greedy
