"""`SamplingParams`: the defaults of vLLM, what is allowed, and what a refusal says."""

from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from mie import SamplingParams
from mie.errors import ConfigError, MieError


def refuses(message: str, **params: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SamplingParams(**params)


def test_the_defaults_are_those_of_vllm():
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": None,
        "stop_token_ids": None,
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": None,
        "allowed_token_ids": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "trace_decode_token_ids": None,
    }


# Numbers. Name: (allowed, refused, how the range reads).

INTEGERS: dict[str, tuple[list[Any], list[Any], str]] = {
    "n": ([1, 2, 1000], [0, -1], "at least 1"),
    "top_k": ([-1, 0, 1, 10**9], [-2], "at least -1"),
    "min_tokens": ([0, 1, 16], [-1], "at least 0"),
    "max_tokens": ([1, 10**9, None], [0, -5], "at least 1"),
    "logprobs": ([-1, 0, 20, None], [-2], "at least -1"),
    "prompt_logprobs": ([-1, 0, 20, None], [-2], "at least -1"),
    "seed": (
        [0, -(2**63), 2**64 - 1, None],
        [-(2**63) - 1, 2**64],
        f"in {-(2**63)} … {2**64 - 1}",
    ),
}
REALS: dict[str, tuple[list[Any], list[Any], str]] = {
    "temperature": ([0, 0.0, 1e-3, 2, 1e3], [-1e-9, -1, 1001, 10**400], "in [0, 1000]"),
    "top_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0001, 2], "in (0, 1]"),
    "min_p": ([0, 0.0, 0.5, 1], [-0.1, 1.1], "in [0, 1]"),
    "repetition_penalty": ([1e-3, 1, 5.5, 1000], [0, -1, 1e-4, 1001], "in [0.001, 1000]"),
    "presence_penalty": ([-2, 0, 2.0], [-2.1, 2.1], "in [-2, 2]"),
    "frequency_penalty": ([-2, 0, 2.0], [-2.1, 2.1], "in [-2, 2]"),
}
NUMBERS = INTEGERS | REALS


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, row in NUMBERS.items() for value in row[0]]
)
def test_numbers_in_range_are_taken(name: str, value: Any):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, row in NUMBERS.items() for value in row[1]]
)
def test_numbers_out_of_range_are_refused_by_name_and_range(name: str, value: Any):
    kind = "an integer" if name in INTEGERS else "a number"
    refuses(f"{name} must be {kind} {NUMBERS[name][2]}; got {value!r}", **{name: value})


@pytest.mark.parametrize("value", [True, False, "1", 1.0, 1.5, math.nan, [1], {}], ids=repr)
@pytest.mark.parametrize("name", INTEGERS)
def test_only_integers_are_integers(name: str, value: Any):
    refuses(f"{name} must be an integer {INTEGERS[name][2]}; got {value!r}", **{name: value})


@pytest.mark.parametrize(
    "value", [True, False, "1", None, math.nan, math.inf, -math.inf, 1j, [1.0]], ids=repr
)
@pytest.mark.parametrize("name", REALS)
def test_only_finite_numbers_are_numbers(name: str, value: Any):
    refuses(f"{name} must be a number {REALS[name][2]}; got {value!r}", **{name: value})


@pytest.mark.parametrize("name", ["n", "top_k", "min_tokens"])
def test_none_is_no_number(name: str):
    refuses(f"{name} must be an integer", **{name: None})


def test_numbers_of_numpy_and_fractions_are_numbers():
    params = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), top_p=Fraction(1, 2))
    assert (params.n, params.temperature, params.top_p) == (2, 0.5, 0.5)


def test_min_tokens_is_at_most_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    refuses("min_tokens must be at most max_tokens (4); got 5", min_tokens=5, max_tokens=4)
    refuses("min_tokens must be at most max_tokens (16); got 17", min_tokens=17)


SWITCHES = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name: str):
    for value in (True, False):
        assert getattr(SamplingParams(**{name: value}), name) is value
    for wrong in (0, 1, None, "True"):
        refuses(f"{name} must be True or False; got {wrong!r}", **{name: wrong})


# Lists of tokens.

TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids")


@pytest.mark.parametrize("name", TOKEN_LISTS)
def test_token_ids_become_a_tuple_of_ints(name: str):
    for given in ([3, 0, 3], (3, 0, 3), np.array([3, 0, 3]), iter([3, 0, 3])):
        value = getattr(SamplingParams(**{name: given}), name)
        assert value == (3, 0, 3)
        assert all(type(token_id) is int for token_id in value)
    assert getattr(SamplingParams(**{name: None}), name) is None


@pytest.mark.parametrize("name", TOKEN_LISTS)
def test_token_ids_are_integers_from_zero(name: str):
    for wrong in (-1, 1.0, "7", True, None):
        message = f"each of {name} must be an integer at least 0; got {wrong!r}"
        refuses(message, **{name: [5, wrong]})
    for wrong_list in (7, "77"):
        refuses(f"{name} must be a list of token ids; got {wrong_list!r}", **{name: wrong_list})


def test_only_the_list_of_stop_tokens_may_be_empty():
    assert SamplingParams(stop_token_ids=[]).stop_token_ids == ()
    for name in ("allowed_token_ids", "trace_decode_token_ids"):
        refuses(f"{name} must name at least one token, or be None; got an empty list", **{name: []})


def test_named_token_ids_are_all_that_must_be_in_the_vocabulary():
    params = SamplingParams(
        stop_token_ids=[1], allowed_token_ids=[2, 3], trace_decode_token_ids=[4], logit_bias={5: 1}
    )
    assert params.named_token_ids == {
        "stop_token_ids": (1,),
        "allowed_token_ids": (2, 3),
        "trace_decode_token_ids": (4,),
        "logit_bias": (5,),
    }
    assert not any(SamplingParams().named_token_ids.values())


# Stop strings and biases.


def test_stop_strings_become_a_tuple():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "bc"]).stop == ("a", "bc")
    assert SamplingParams(stop=[]).stop == ()
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "bc"]).stop_strings == ("a", "bc")
    assert SamplingParams().stop_strings == ()


def test_stop_strings_are_strings_that_are_not_empty():
    refuses("stop must be a string or a list of strings; got 5", stop=5)
    for wrong in ("", 5, None, b"x"):
        message = f"each of stop must be a string that is not empty; got {wrong!r}"
        refuses(message, stop=["a", wrong])
    refuses("each of stop must be a string that is not empty; got ''", stop="")


def test_stop_strings_need_text():
    refuses("stop strings need detokenize=True", stop="end", detokenize=False)
    assert SamplingParams(stop=[], detokenize=False).stop == ()


def test_logit_bias_takes_the_keys_of_json():
    bias = SamplingParams(logit_bias={"7": 1, 3: -2.5, np.int64(4): np.float32(0.5)}).logit_bias
    assert bias == {7: 1.0, 3: -2.5, 4: 0.5}
    assert [type(key) for key in bias] == [int] * 3
    assert [type(value) for value in bias.values()] == [float] * 3


def test_logit_bias_without_entries_is_none():
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_logit_bias_is_within_what_the_api_allows():
    for amount in (-100, 100, 0):
        assert SamplingParams(logit_bias={1: amount}).logit_bias == {1: float(amount)}
    for wrong in (100.5, -101, math.nan, math.inf, "1", None, True):
        message = f"logit_bias of token 1 must be a number in [-100, 100]; got {wrong!r}"
        refuses(message, logit_bias={1: wrong})
    for key in (-1, 1.0, "-1", "one", "", True, None):
        message = f"each key of logit_bias must be an integer at least 0; got {key!r}"
        refuses(message, logit_bias={key: 1.0})
    for wrong_map in ([1], "1", 5):
        message = f"logit_bias must map token ids to numbers; got {wrong_map!r}"
        refuses(message, logit_bias=wrong_map)


# Names, errors, and the object.


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("topk", "top_k"),
        ("stops", "stop"),
        ("skip_special_token", "skip_special_tokens"),
    ],
)
def test_an_unknown_name_is_refused_with_a_suggestion(name: str, near: str):
    refuses(f"SamplingParams has no parameter {name!r}; did you mean {near!r}?", **{name: 1})


def test_a_name_like_no_other_is_refused_without_a_list():
    with pytest.raises(ConfigError, match="no parameter 'xyzzy'; leave it out"):
        SamplingParams(xyzzy=1)


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]


def test_a_refusal_is_a_value_error_and_an_error_of_mie():
    for error in (ValueError, MieError):
        with pytest.raises(error):
            SamplingParams(top_p=0)


def test_nothing_can_be_changed_afterwards():
    params = SamplingParams()
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 0.0  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del params.n
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temprature = 0.0  # type: ignore[attr-defined]


def test_what_was_passed_in_is_copied():
    stop, tokens, bias = ["a"], [1], {1: 1.0}
    params = SamplingParams(stop=stop, stop_token_ids=tokens, logit_bias=bias)
    stop.append("b")
    tokens.append(2)
    bias[2] = 2.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (1,), {1: 1.0})


def test_equal_parameters_are_equal_and_a_changed_copy_is_checked_again():
    params = SamplingParams(stop="a", logit_bias={"1": 2}, seed=4)
    assert params == SamplingParams(stop=["a"], logit_bias={1: 2.0}, seed=4)
    assert dataclasses.replace(params) == params
    assert dataclasses.replace(params, seed=5) != params
    with pytest.raises(ConfigError, match="top_p must be a number"):
        dataclasses.replace(params, top_p=7)


def test_huge_numbers_are_refused_like_any_others():
    with pytest.raises(ConfigError, match="top_p must be a number in"):
        SamplingParams(top_p=10**400)
    with pytest.raises(ConfigError, match="logit_bias"):
        SamplingParams(logit_bias={"9" * 5000: 1})
    with pytest.raises(ConfigError, match="logit_bias"):
        SamplingParams(logit_bias={1: -(10**400)})


@pytest.mark.parametrize("value", [b"abc", {"a": 1}])
def test_what_only_looks_like_a_list_is_refused(value):
    with pytest.raises(ConfigError, match="stop must be"):
        SamplingParams(stop=value)
    with pytest.raises(ConfigError, match="stop_token_ids must be a list"):
        SamplingParams(stop_token_ids=value)
