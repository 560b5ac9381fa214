"""Test `SamplingParams` and `BeamSearchParams`: allowed values, and the messages of refusals."""

import dataclasses
import inspect
import itertools
import math
import pickle
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from tables import table

from mie import BeamSearchParams, RequestLimits, SamplingParams, StructuredOutputsParams
from mie.config.params.sampling import truncated
from mie.errors import ConfigError, RequestError, shown

LIMITS = RequestLimits()


def refuses(message: str, **params: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SamplingParams(**params)


# Numbers by name: (allowed, refused, the text of the range).

INTEGERS: dict[str, tuple[list[Any], list[Any], str]] = {
    "n": ([1, 2, 1024], [0, -1, 1025, 10**9, None], "in 1 … 1024"),
    "top_k": ([-1, 0, 1, 10**9], [-2, None], "at least -1"),
    "min_tokens": ([0, 1, 16], [-1, None], "at least 0"),
    "max_tokens": ([1, 10**9, None], [0, -5], "at least 1"),
    "logprobs": ([-1, 0, 20, None], [-2], "at least -1"),
    "prompt_logprobs": ([-1, 0, 20, None], [-2], "at least -1"),
    "truncate_prompt_tokens": ([-1, 1, 10**9, None], [-2], "at least -1"),
    "seed": ([0, -(2**63), 2**64 - 1, None], [-(2**63) - 1, 2**64], f"in {-(2**63)} … {2**64 - 1}"),
}
REALS: dict[str, tuple[list[Any], list[Any], str]] = {
    "temperature": ([0, 0.0, 1e-3, 2, 1e3], [-1e-9, -1, 1001, 10**400], "in [0, 1000]"),
    "top_p": ([1e-9, 0.5, 1, 1.0], [0, 0.0, -0.1, 1.0001, 2, 10**400], "in (0, 1]"),
    "min_p": ([0, 0.0, 0.5, 1], [-0.1, 1.1], "in [0, 1]"),
    "repetition_penalty": ([1e-3, 1, 5.5, 1000], [0, -1, 1e-4, 1001], "in [0.001, 1000]"),
    "presence_penalty": ([-2, 0, 2.0], [-2.1, 2.1], "in [-2, 2]"),
    "frequency_penalty": ([-2, 0, 2.0], [-2.1, 2.1], "in [-2, 2]"),
}
NO_INTEGERS = [True, False, "1", 1.0, 1.5, math.nan, [1], {}]
NO_REALS = [True, False, "1", None, math.nan, math.inf, -math.inf, 1j, [1.0]]


@pytest.mark.parametrize("name", INTEGERS | REALS)
def test_a_number_is_in_its_range_or_refused_by_name_and_range(name: str):
    allowed, refused, in_range = (INTEGERS | REALS)[name]
    for value in allowed:
        assert getattr(SamplingParams(**{name: value}), name) == value
    kind, others = ("an integer", NO_INTEGERS) if name in INTEGERS else ("a number", NO_REALS)
    for value in [*refused, *others]:
        refuses(f"{name} must be {kind} {in_range}; got {shown(value)}", **{name: value})


LARGEST = 2**63 - 1
TOO_LARGE = (LARGEST + 1, 2**64, -(2**63) - 1, 10**400, -(10**400), 10**5000)
UNLIMITED = ("seed", "extra_args")
"""A seed may be an unsigned integer, and ``extra_args`` are the caller's own."""


@pytest.mark.parametrize(
    "name", [n for n in SamplingParams.__dataclass_fields__ if n not in UNLIMITED]
)
def test_no_parameter_takes_an_integer_beyond_64_bits(name: str):
    for value in TOO_LARGE:
        for given in (value, [value], [[value]], {value: 1.0}, {value: 1}, {5: value}):
            with pytest.raises(ConfigError, match=rf"^(each of )*{name}|^StructuredOutputsParams"):
                SamplingParams(**{name: given})
            params = SamplingParams()
            setattr(params, name, given)
            with pytest.raises(ConfigError, match=rf"^(each of )*{name}|^StructuredOutputsParams"):
                params.verified()


@pytest.mark.parametrize(
    "name", ["max_tokens", "min_tokens", "top_k", "logprobs", "truncate_prompt_tokens"]
)
def test_the_largest_integer_of_64_bits_is_a_parameter(name: str):
    more = {"max_tokens": None} if name == "min_tokens" else {}
    assert getattr(SamplingParams(**{name: LARGEST, **more}), name) == LARGEST
    refuses(f"{name} must be an integer in", **{name: LARGEST + 1, **more})


@pytest.mark.parametrize("value", [*TOO_LARGE[:2], 10**400, 10**5000], ids=["1", "2", "3", "4"])
def test_a_beam_search_takes_no_integer_beyond_64_bits(value: int):
    for name in ("beam_width", "max_tokens"):
        with pytest.raises(ConfigError, match=f"^{name} must be an integer"):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})


@pytest.mark.parametrize(
    "value", [Fraction(1, 10**400), 0 * Fraction(1, 3), np.float32(0), np.timedelta64("NaT")]
)
def test_a_top_p_that_rounds_to_zero_is_refused(value: Any):
    refuses("top_p must be a number in (0, 1]", top_p=value)


SWITCHES = (
    "include_stop_str_in_output ignore_eos detokenize skip_special_tokens "
    "spaces_between_special_tokens"
)


@pytest.mark.parametrize("name", SWITCHES.split())
def test_switches(name: str):
    for value in (True, False):
        assert getattr(SamplingParams(**{name: value}), name) is value
    for wrong in (0, 1, None, "True"):
        refuses(f"{name} must be True or False; got {wrong!r}", **{name: wrong})


# Lists, strings and mappings.

TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids")


@pytest.mark.parametrize("name", TOKEN_LISTS)
def test_token_ids_are_a_list_of_integers_from_zero(name: str):
    for given in ([3, 0, 3], (3, 0, 3), np.array([3, 0, 3]), iter([3, 0, 3])):
        value = getattr(SamplingParams(**{name: given}), name)
        assert value == (3, 0, 3)
        assert all(type(token_id) is int for token_id in value)
    for wrong in (-1, 1.0, "7", True, None, [1], {}, b"x"):
        message = f"each of {name} must be an integer at least 0; got {wrong!r}"
        refuses(message, **{name: [5, wrong]})
    for wrong_list in (7, "77", b"abc", {"a": 1}, np.array(3)):
        refuses(f"{name} must be a list of token ids; got {wrong_list!r}", **{name: wrong_list})


@pytest.mark.parametrize(
    ("message", "given"),
    [
        *table("sampling_params", "wrong values"),
        ("stop must be a string or a list of strings; got b'x'", {"stop": b"x"}),
        ("each of stop must be a non-empty string; got b'x'", {"stop": ["a", b"x"]}),
        ("each of stop may have at most 1024 characters; got 1025", {"stop": "x" * 1025}),
        ("each of bad_words may have at most 256 characters", {"bad_words": ["x" * 257]}),
        ("each of bad_words_token_ids may have", {"bad_words_token_ids": [range(1029)]}),
        ("logits_processors is not supported", {"logits_processors": np.zeros(2)}),
    ],
)
def test_a_wrong_value_is_refused_when_made_and_when_used(message: str, given: dict[str, Any]):
    refuses(message, **given)
    if given.keys() <= {field.name for field in dataclasses.fields(SamplingParams)}:
        params = SamplingParams()
        for name, value in given.items():
            setattr(params, name, value)
        with pytest.raises(ConfigError, match=re.escape(message)):
            params.verified()


def test_logit_bias_is_limited_as_in_the_api():
    for wrong in (100.5, -101, math.nan, math.inf, "1", None, True, -(10**400)):
        message = "logit_bias of token 1 must be a number in [-100, 100]; got "
        refuses(message, logit_bias={1: wrong})
    for key in (-1, 1.0, "-1", "one", "", True, None, "9" * 5000):
        refuses("logit_bias must have token ids as keys; got ", logit_bias={key: 1.0})


# Limits of one request.

LIMITED: dict[str, tuple[Any, int]] = {
    "stop": ("x", LIMITS.max_stop_strings),
    "stop_token_ids": (1, LIMITS.max_stop_token_ids),
    "allowed_token_ids": (1, LIMITS.max_allowed_token_ids),
    "trace_decode_token_ids": (1, LIMITS.max_traced_tokens),
    "bad_words": ("x", LIMITS.max_bad_words),
    "bad_words_token_ids": ([1], 2 * LIMITS.max_bad_words),
}


@pytest.mark.parametrize("name", LIMITED)
def test_an_endless_list_is_refused_without_reading_on(name: str):
    value, limit = LIMITED[name]

    def counted() -> Iterator[Any]:
        for number in itertools.count():
            assert number <= limit, "read past the limit"
            yield value

    refuses(f"{name} may have at most {limit} entries; got more", **{name: counted()})
    assert len(getattr(SamplingParams(**{name: [value] * min(limit, 5000)}), name)) > 0


# The object.


def test_fields_can_be_assigned_but_no_new_name():
    params = SamplingParams()
    params.temperature = 0.0
    assert params.temperature == 0.0
    with pytest.raises(AttributeError):
        params.temprature = 0.0  # type: ignore[attr-defined]
    params.stop_token_ids = iter([1])  # type: ignore[assignment]  # as a caller might
    with pytest.raises(ConfigError, match="stop_token_ids is an iterator"):
        params.verified()


def test_a_verified_copy_does_not_change_with_the_original():
    full: dict[str, Any] = {
        "stop": ["a"],
        "stop_token_ids": [1],
        "bad_words": ["b"],
        "bad_words_token_ids": [[1, 2]],
        "logit_bias": {1: 1.0},
        "allowed_token_ids": [1],
        "extra_args": {"key": 1},
    }
    params = SamplingParams(**full)
    verified, cloned = params.verified(), params.clone()
    assert verified == cloned == params == pickle.loads(pickle.dumps(params))
    for name in full:
        setattr(params, name, None)
    params.seed = 7
    assert verified == cloned == SamplingParams(**full)
    assert params.verified() == SamplingParams(seed=7)
    for copy in (verified, cloned):
        copy.logit_bias[2] = 2.0
        copy.extra_args["key"] = 2
    assert full["logit_bias"] == {1: 1.0}
    assert full["extra_args"] == {"key": 1}
    verified.logit_bias[2] = 1000.0
    with pytest.raises(ConfigError, match="logit_bias of token 2"):
        verified.verified()


def test_values_are_converted_once():
    params = SamplingParams(stop=["a"], stop_token_ids=[1, 2])
    assert params.verified().stop is params.stop
    limited = params.verified(RequestLimits(max_stop_strings=1))
    assert limited == params


# Parameters that only vLLM has. tests/unit/config/test_vllm_names.py has the values without effect.


# Truncated prompts.


@pytest.mark.parametrize(
    ("truncate", "max_tokens", "kept"),
    [
        (None, 16, 50),
        (1, 16, 1),
        (20, 16, 20),
        (50, 16, 50),
        (60, 16, 50),
        (-1, 16, 44),
        (-1, None, 50),
        (-1, 59, 1),
        (-1, 10**9, 1),
    ],
)
def test_a_prompt_is_truncated_from_its_beginning(truncate, max_tokens, kept):
    params = SamplingParams(truncate_prompt_tokens=truncate, max_tokens=max_tokens)
    prompt = list(range(50))
    assert truncated(prompt, params, 60) == prompt[50 - kept :]
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 61; the context holds 60"):
        truncated([1], SamplingParams(truncate_prompt_tokens=61), 60)


# Beam search, and help().


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 10**9),
        ("max_tokens", 0),
        ("temperature", -1),
        ("length_penalty", math.nan),
        ("length_penalty", 11),
        ("ignore_eos", 1),
    ],
)
def test_bad_values_of_beam_search_are_refused_by_name(name: str, value: Any):
    with pytest.raises(ConfigError, match=f"{name} must be"):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})


@pytest.mark.parametrize("params", [SamplingParams, StructuredOutputsParams])
def test_help_lists_each_parameter_on_a_line_of_its_own(params: type[Any]) -> None:
    doc = inspect.cleandoc(params.__doc__ or "")  # Python 3.13 removes the indentation by itself
    listed = re.findall(r"^(\w+): ", doc, re.MULTILINE)
    assert [*listed] == [field.name for field in dataclasses.fields(params) if field.init]
