"""Check that every number of ranks gives the same tokens and log-probabilities, bit for bit.

The ranks are processes. A model is loaded once for each number of ranks, with a cache so small that
sequences are preempted. Then random scenarios run on all of them.
"""

import random

import pytest
from compiled import needs_numba
from tiny_hybrids import HYBRIDS, TinyHybrid
from tiny_models import CONFIGS, TinyModel

from mie import SamplingParams
from mie.config.engine import EngineConfig
from mie.load.engine import load_engine
from mie.load.settings import LoadSettings

NUM_SCENARIOS = 500
MANY_HEADS = {"num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 96}
ONE_KV_HEAD = MANY_HEADS | {"num_key_value_heads": 1}

CASES = {
    "llama": (CONFIGS["llama"] | MANY_HEADS, {}, {}),
    "one KV head": (CONFIGS["llama"] | ONE_KV_HEAD, {"preemption_mode": "swap"}, {}),
    "windows": (CONFIGS["gemma3"] | MANY_HEADS, {"preemption_mode": "swap", "num_blocks": 30}, {}),
    "norms of all heads": (CONFIGS["olmo3"] | MANY_HEADS, {}, {}),
    "norms of one KV head": (CONFIGS["olmo3"] | ONE_KV_HEAD, {}, {}),
    "experts with sinks": (CONFIGS["gpt_oss"] | MANY_HEADS, {"preemption_mode": "swap"}, {}),
    "experts": (CONFIGS["qwen3_moe"] | ONE_KV_HEAD, {}, {}),
    "states": (HYBRIDS["qwen35"] | ONE_KV_HEAD, {"preemption_mode": "swap"}, {}),
    "states of Mamba": (HYBRIDS["granite4"] | MANY_HEADS, {}, {}),
    "short convolutions": (HYBRIDS["lfm2"] | MANY_HEADS, {}, {}),
    "int4 weights": (CONFIGS["llama"] | MANY_HEADS, {}, {"quantization": "int4"}),
    "int8 weights and activations": (
        CONFIGS["qwen3_tied"] | ONE_KV_HEAD,
        {"activations": "int8"},
        {"quantization": "int8"},
    ),
    "int8 cache": (CONFIGS["llama"] | MANY_HEADS, {"kv_cache_dtype": "int8"}, {}),
    "drafts": (
        CONFIGS["llama"] | MANY_HEADS,
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {},
    ),
}
"""By name: the model, settings of the engine, and other settings."""


def scenario(rng, vocab_size):
    """Return requests with the steps in which they arrive, and a step that aborts one."""
    prefix = [rng.randrange(4, vocab_size) for _ in range(20)]
    requests = []
    for number in range(rng.randint(1, 6)):
        own = [rng.randrange(4, vocab_size) for _ in range(rng.randint(1, 30))]
        params = SamplingParams(
            temperature=rng.choice([0, 0.8, 2.0]),
            n=rng.choice([1, 1, 2]),
            top_p=rng.choice([1, 0.9]),
            seed=rng.randrange(100),
            max_tokens=rng.randint(1, 24),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
            repetition_penalty=rng.choice([1, 1.2]),
        )
        prompt = prefix[: rng.choice([0, 8, 20])] + own
        requests.append((rng.randrange(12), f"r{number}", prompt, params))
    return requests, (rng.randrange(20), f"r{rng.randrange(9)}")


def run(engine, requests, abort):
    """Return the answers of all requests."""
    engine.reset_prefix_cache()
    begun, step = [], 0
    while engine.has_work or step <= max(at for at, *_ in requests):
        for at, request_id, prompt, params in requests:
            if at == step:
                begun.append(engine.add_request(prompt, params, request_id))
        if step == abort[0]:
            engine.abort(abort[1])
        if engine.has_work:
            engine.step()
        step += 1
    return [
        (each.prompt_logprobs, [(seq.output_ids, seq.logprobs) for seq in each.sequences])
        for each in begun
    ]


@needs_numba
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_scenarios_have_the_same_bits_on_one_to_four_ranks(name, tmp_path):
    config, settings, others = CASES[name]
    make = TinyHybrid if name.startswith(("states", "short")) else TinyModel
    model = make(tmp_path, config)
    sizes = {"num_blocks": 24, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    engine_config = EngineConfig(**{**sizes, **settings}, num_threads=1)
    engines = [
        load_engine(
            model.directory,
            LoadSettings(
                engine=engine_config, backend="jit", tensor_parallel_size=num_ranks, **others
            ),
        )
        for num_ranks in (1, 2, 3, 4)
    ]
    rng = random.Random(name)
    for _ in range(-(-NUM_SCENARIOS // len(CASES))):
        requests, abort = scenario(rng, engines[0].vocab_size)
        expected = run(engines[0], requests, abort)
        for engine in engines[1:]:
            assert run(engine, requests, abort) == expected
    stats = engines[0].stats
    assert stats.num_preemptions > 0, "the scenarios preempt"
    engines.clear()
