"""The crown: whatever is asked, and however it is scheduled, the engine gives the oracle's tokens.

The engine runs in float64, its cache filled with NaN, and its invariants are checked after every
step.
"""

from collections import Counter

import naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mie import EngineConfig, SamplingParams
from mie.load import load_engine

VOCAB, EOS = 40, 3
NUM_SCENARIOS = 500

seen: Counter[str] = Counter()

token_ids = st.integers(0, VOCAB - 1)


@st.composite
def prompts(draw):
    """Prompts that often begin alike."""
    shared = draw(st.lists(token_ids, max_size=12))
    own = st.lists(token_ids, min_size=1, max_size=8)
    return [
        shared[: draw(st.integers(0, len(shared)))] + draw(own)
        for _ in range(draw(st.integers(1, 5)))
    ]


@st.composite
def sampling(draw):
    """Keyword arguments of SamplingParams, as the oracle reads them too."""
    params = {
        "n": draw(st.sampled_from([1, 1, 1, 2, 3])),
        "max_tokens": draw(st.integers(1, 10)),
        "temperature": draw(st.sampled_from([0.0, 0.0, 0.7, 1.5])),
    }
    optional = {
        "seed": st.integers(-5, 5),
        "top_k": st.integers(1, 10),
        "top_p": st.floats(0.1, 0.99),
        "min_p": st.floats(0.01, 0.5),
        "repetition_penalty": st.floats(0.5, 2.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(token_ids, st.floats(-5.0, 5.0), min_size=1, max_size=3),
        "allowed_token_ids": st.lists(token_ids, min_size=3, max_size=20, unique=True),
        "stop_token_ids": st.lists(token_ids, max_size=3),
        "ignore_eos": st.booleans(),
        "trace_decode_token_ids": st.lists(token_ids, min_size=1, max_size=4),
        "prompt_logprobs": st.just(0),
    }
    for name in draw(st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)):
        params[name] = draw(optional[name])
    if "allowed_token_ids" not in params:
        params["min_tokens"] = draw(st.integers(0, params["max_tokens"]))
    return params


@st.composite
def scenarios(draw):
    prompt_list = draw(prompts())
    requests = [(prompt, draw(sampling()), draw(st.integers(0, 6))) for prompt in prompt_list]
    block_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    # From "one request barely fits" to "there is plenty".
    longest = max(len(prompt) for prompt in prompt_list)
    num_blocks = -(-longest // block_size) + draw(st.integers(0, 8))
    return {
        "model": draw(st.sampled_from(["llama", "mistral_window", "qwen2", "qwen3_tied"])),
        "requests": requests,
        "aborted": draw(st.sampled_from([None, None, None, *range(len(requests))])),
        "abort_step": draw(st.integers(1, 12)),
        "config": {
            "block_size": block_size,
            "num_blocks": num_blocks,
            "max_num_seqs": draw(st.integers(3, 6)),
            "max_num_batched_tokens": draw(st.sampled_from([1, 2, 3, 5, 8, 32])),
            "max_model_len": draw(st.sampled_from([24, 40])),
            "enable_prefix_caching": draw(st.booleans()),
        },
    }


def run(engine, scenario):
    """What came out: {(request, choice): …} three times, and twice {request: …}."""
    tokens, logprobs, reasons, scored, numbers = {}, {}, {}, {}, {}
    requests, step = scenario["requests"], 0
    waiting = dict(enumerate(requests))
    while waiting or engine.has_work:
        for index in [i for i, (_, _, arrival) in waiting.items() if arrival <= step]:
            prompt, params, _ = waiting.pop(index)
            engine.add_request(prompt, SamplingParams(logprobs=0, **params), str(index))
            numbers[index] = len(numbers)
        if step == scenario["abort_step"] and scenario["aborted"] is not None:
            engine.abort(str(scenario["aborted"]))
        output = engine.step()
        engine.scheduler.check_invariants()
        step += 1
        assert step < 2000, "the engine has work and does nothing"
        used = output.stats.num_prefill_tokens + output.stats.num_decode_tokens
        assert used <= scenario["config"]["max_num_batched_tokens"]
        assert output.stats.num_running <= scenario["config"]["max_num_seqs"]
        seen["preemptions"] += output.stats.num_preempted
        for request_id, rows in output.prompt_logprobs.items():
            scored.setdefault(int(request_id), []).extend(row.logprobs[0] for row in rows)
        for new in output.outputs:
            key = int(new.request_id), new.index
            tokens.setdefault(key, []).extend(new.token_ids)
            logprobs.setdefault(key, []).extend(row.logprobs[0] for row in new.logprobs)
            reasons[key] = new.finish_reason
            seen["prefix hits"] += new.num_cached_tokens > 0
            seen["forks"] += new.index > 0
    return tokens, logprobs, reasons, scored, numbers


@given(scenario=scenarios())
@settings(max_examples=max(NUM_SCENARIOS, settings().max_examples))
def check_scenario(tiny, scenario):
    model, config = tiny[scenario["model"]], scenario["config"]
    engine = load_engine(model.directory, EngineConfig(**config), dtype="float64")
    engine._runner._kv_cache.fill(np.nan)
    tokens, logprobs, reasons, scored, numbers = run(engine, scenario)
    assert engine.scheduler.manager.num_used == 0, "a block did not come home"
    limit = min(config["max_model_len"], config["num_blocks"] * config["block_size"] + 1)
    seen["scenarios"] += 1
    for index, (prompt, params, _) in enumerate(scenario["requests"]):
        was_aborted = index == scenario["aborted"]
        # Without a seed of its own, a request draws from the engine's (0), by order of arrival.
        stream = 0 if "seed" in params else numbers[index] + 1
        for choice in range(params["n"]):
            expected, reason, expected_logprobs = naive.generate(
                model.config,
                model.weights,
                prompt,
                params,
                choice=choice,
                stream=stream,
                eos=[EOS],
                limit=limit,
            )
            got = tokens.get((index, choice), [])
            assert got == expected[: len(got)] if was_aborted else got == expected
            assert was_aborted or reasons[index, choice] == reason
            np.testing.assert_allclose(
                logprobs.get((index, choice), []), expected_logprobs[: len(got)], atol=1e-9
            )
        if "prompt_logprobs" in params:
            check_prompt_logprobs(model, prompt, scored.get(index, []), was_aborted)


def check_prompt_logprobs(model, prompt, got, was_aborted):
    rows = naive.logits(model.config, model.weights, prompt)
    expected = [
        row[token] - np.log(np.exp(row - row.max()).sum()) - row.max()
        for row, token in zip(rows[:-1], prompt[1:], strict=True)
    ]
    assert was_aborted or len(got) == len(expected)
    np.testing.assert_allclose(got, expected[: len(got)], atol=1e-9)


@pytest.mark.timeout(0)
def test_engine_equals_naive(tiny):
    seen.clear()
    check_scenario(tiny)
    assert seen["scenarios"] >= 400, seen
    # The scenarios would prove little if these were rare.
    for what in ("preemptions", "prefix hits", "forks"):
        assert seen[what] >= 100, seen
