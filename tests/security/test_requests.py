"""Check that excessive requests are refused cheaply and do not affect others."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hostile_requests import ASYNC, GROUPS, LARGEST
from measured import Zygote
from tables import quick_third

from mie import LLM, EngineArgs, RequestLimits, SamplingParams
from mie.errors import ConfigError, RequestError

CASES = [(group, name) for group, cases in GROUPS.items() for name in cases]


@pytest.mark.parametrize(("group", "name"), quick_third(CASES))
def test_a_hostile_request_is_refused_by_name(zygote: Zygote, group: str, name: str) -> None:
    result = zygote.run("call", "hostile_requests:run", group, name)
    result.check_refused(GROUPS[group][name][1])


@pytest.mark.parametrize(("group", "name"), quick_third(CASES[::8]))
def test_a_hostile_request_does_not_affect_a_running_one(zygote, group, name) -> None:
    result = zygote.run("call", "hostile_requests:run_beside_others", group, name)
    result.check_refused(GROUPS[group][name][1])


@pytest.mark.parametrize(("prompt", "params"), ASYNC)
def test_a_hostile_request_to_async_llm_does_not_affect_others(zygote, prompt, params) -> None:
    result = zygote.run("call", "hostile_requests:run_async", prompt, params)
    assert result.error in ("RequestError", "PromptTooLongError", "ConfigError"), result
    assert len(result.message) < 2000


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_requests_cost_little(zygote: Zygote, name: str) -> None:
    result = zygote.run("call", "hostile_requests:run_largest", name)
    result.check_cost()
    assert result.error is None, result
    assert result.stdout


# The limits are settings.


@pytest.mark.parametrize(
    ("limits", "prompt", "params", "message"),
    [
        ({"max_prompt_chars": 3}, "abcd", {}, "prompt has 4 characters; the limit is 3"),
        ({"max_n": 2}, "a", {"n": 3}, "n must be an integer in 1 … 2; got 3"),
        ({"max_stop_strings": 1}, "a", {"stop": ["a", "b"]}, "stop may have at most 1 entries"),
        ({"max_stop_chars": 2}, "a", {"stop": "abc"}, "at most 2 characters"),
        ({"max_stop_token_ids": 1}, "a", {"stop_token_ids": [1, 2]}, "stop_token_ids may have"),
        ({"max_allowed_token_ids": 1}, "a", {"allowed_token_ids": [1, 2]}, "allowed_token_ids"),
        ({"max_logit_bias": 1}, "a", {"logit_bias": {1: 1, 2: 1}}, "logit_bias may have"),
        ({"max_traced_tokens": 1}, "a", {"trace_decode_token_ids": [1, 2]}, "trace_decode"),
        ({"max_bad_words": 1}, "a", {"bad_words": ["a", "b"]}, "bad_words may have at most 1"),
        ({"max_bad_word_length": 1}, "a", {"bad_words": ["ab"]}, "at most 1 characters"),
        (
            {"max_grammar_chars": 3},
            "a",
            {"structured_outputs": {"regex": "abcd"}},
            "structured_outputs may have at most 3 characters; got 4",
        ),
        ({"max_extra_args": 1}, "a", {"extra_args": {"a": 1, "b": 2}}, "extra_args may have"),
        ({"max_cache_salt_chars": 1}, {"prompt": "a", "cache_salt": "ab"}, {}, "cache_salt may"),
    ],
)
def test_each_limit_is_a_setting(own, limits, prompt, params, message) -> None:
    sampling = SamplingParams(max_tokens=2, **params)
    own.prepare(prompt, sampling)
    strict = replace(own.llm_engine.preparer, limits=EngineArgs(request_limits=limits).limits)
    with pytest.raises((ConfigError, RequestError), match=re.escape(message)):
        strict.prepare(prompt, sampling)


class NeverEncodes:
    """A tokenizer that must not be called."""

    def encode(self, text: str, **options: Any) -> list[int]:
        raise AssertionError(f"{len(text)} characters were encoded")


def test_a_long_prompt_is_never_encoded(own: LLM) -> None:
    tokenizer: Any = NeverEncodes()
    preparer = replace(own.llm_engine.preparer, tokenizer=tokenizer, limits=RequestLimits())
    for params in (SamplingParams(), SamplingParams(truncate_prompt_tokens=3)):
        with pytest.raises(RequestError, match="65537 characters; the limit is 65536"):
            preparer.prepare("a" * 65_537, params)
    with pytest.raises(RequestError, match="65537 characters; the limit is 65536"):
        preparer.encode("a" * 65_537, add_special_tokens=False)  # a rendered conversation
    with pytest.raises(AssertionError, match="65536 characters were encoded"):
        preparer.prepare("a" * 65_536, SamplingParams())


@pytest.fixture(scope="module")
def own() -> LLM:
    return LLM("bundled", max_model_len=64, num_threads=1, use_tqdm_on_load=False)


def test_every_limit_is_tested_above() -> None:
    tested = {
        name
        for mark in test_each_limit_is_a_setting.pytestmark
        for limits, *_ in mark.args[1]
        for name in limits
    }
    limits = vars(RequestLimits()).keys()
    assert limits - tested == {"max_request_id_chars"}  # `prepare` gets it separately; tested below


def test_an_engine_takes_its_limits_from_its_settings() -> None:
    limits = {"max_n": 1, "max_request_id_chars": 3, "max_prompt_chars": 100_000}
    llm = LLM("bundled", max_model_len=64, num_threads=1, request_limits=limits)
    assert llm.engine_args.limits == RequestLimits(**limits)
    params = SamplingParams(max_tokens=1)
    llm.add_request("a", params, "abc")
    with pytest.raises(RequestError, match="request_id may have at most 3 characters; got 4"):
        llm.add_request("a", params, "abcd")
    with pytest.raises(ConfigError, match="n must be an integer in 1 … 1; got 2"):
        llm.generate("a", SamplingParams(n=2), use_tqdm=False)
    with pytest.raises(RequestError, match="the context holds 64"):
        llm.generate("a" * 99_999, use_tqdm=False)
    with pytest.raises(RequestError, match="100001 characters; the limit is 100000"):
        llm.generate("a" * 100_001, use_tqdm=False)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_m": 1}, "RequestLimits has no parameter 'max_m'; did you mean 'max_n'?"),
        ({"max_n": 1025}, "max_n must be an integer in 1 … 1024; got 1025"),
        ({"max_n": True}, "max_n must be an integer"),
        ({"max_prompt_chars": 0}, "max_prompt_chars must be an integer at least 1; got 0"),
        ({"max_stop_strings": 0}, "max_stop_strings must be an integer in 1 …"),
        ({5: 1}, "RequestLimits has no parameter '5'"),
        ([("max_n", 1)], "request_limits must be a dictionary or RequestLimits"),
    ],
)
def test_wrong_limits_are_refused_by_name(limits: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        EngineArgs(request_limits=limits)


# Unusual requests that are valid.


@pytest.mark.parametrize(
    "prompt",
    [
        [5, 6],
        (5, 6),
        np.array([5, 6]),
        np.array([5, 6], np.uint8),
        [np.int64(5), np.int32(6)],
        {"prompt_token_ids": np.array([5, 6])},
        {"prompt": None, "prompt_token_ids": [5, 6], "cache_salt": None, "multi_modal_data": None},
        range(5, 7),
    ],
    ids=repr,
)
def test_ids_of_every_integer_type_give_the_same_prompt(own: LLM, prompt: Any) -> None:
    params = SamplingParams(max_tokens=3, temperature=0.0)
    [expected] = own.generate([[5, 6]], params, use_tqdm=False)
    [output] = own.generate(prompt, params, use_tqdm=False)
    assert output.prompt_token_ids == [5, 6]
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_long_list_of_ids_is_truncated_on_request(own: LLM) -> None:
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=3)
    [output] = own.generate({"prompt_token_ids": range(10**9)[:2000]}, params, use_tqdm=False)
    assert output.prompt_token_ids == [1997, 1998, 1999]


def test_the_default_limit_of_a_prompt_grows_with_the_context() -> None:
    assert RequestLimits().prompt_chars(1024) == 65_536
    assert RequestLimits().prompt_chars(131_072) == 1_048_576
    assert RequestLimits(max_prompt_chars=7).prompt_chars(131_072) == 7
