"""Test `SamplingParams`: the defaults of vLLM, allowed values, and messages of refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import pydoc
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from mie import BeamSearchParams, RequestLimits, RequestOutputKind, SamplingParams
from mie.errors import ConfigError, MieError, RequestError
from mie.params.sampling import truncated
from mie.refusals import NEUTRAL


def refuses(message: str, **params: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        SamplingParams(**params)


def test_the_defaults_are_those_of_vllm():
    fields = dataclasses.fields(SamplingParams)
    assert {field.name: getattr(SamplingParams(), field.name) for field in fields} == {
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
        "bad_words": None,
        "bad_words_token_ids": None,
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
        "spaces_between_special_tokens": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
        "truncate_prompt_tokens": None,
        "skip_reading_prefix_cache": None,
        "trace_decode_token_ids": None,
        "structured_outputs": None,
        "extra_args": None,
    }


# Numbers by name: (allowed, refused, the text of the range).

INTEGERS: dict[str, tuple[list[Any], list[Any], str]] = {
    "n": ([1, 2, 1024], [0, -1, 1025, 10**9], "in 1 … 1024"),
    "top_k": ([-1, 0, 1, 10**9], [-2], "at least -1"),
    "min_tokens": ([0, 1, 16], [-1], "at least 0"),
    "max_tokens": ([1, 10**9, None], [0, -5], "at least 1"),
    "logprobs": ([-1, 0, 20, None], [-2], "at least -1"),
    "prompt_logprobs": ([-1, 0, 20, None], [-2], "at least -1"),
    "truncate_prompt_tokens": ([-1, 1, 10**9, None], [-2], "at least -1"),
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
def test_none_is_not_a_number(name: str):
    refuses(f"{name} must be an integer", **{name: None})


def test_numbers_of_numpy_and_fractions_are_numbers():
    params = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), top_p=Fraction(1, 2))
    assert (params.n, params.temperature, params.top_p) == (2, 0.5, 0.5)


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [
        ("seed", np.int64(-3), -3),
        ("seed", np.uint64(2**64 - 1), 2**64 - 1),
        ("n", np.uint8(3), 3),
        ("max_tokens", np.int16(300), 300),
        ("logprobs", np.int8(-1), -1),
        ("temperature", Fraction(1, 3), 1 / 3),
        ("temperature", np.float16(0.5), 0.5),
        ("temperature", 1, 1.0),
        ("top_p", np.longdouble(1), 1.0),
        ("top_p", 5e-324, 5e-324),
        ("repetition_penalty", np.int32(2), 2.0),
    ],
)
def test_numbers_become_plain_when_made_and_when_verified(name: str, value: Any, plain: Any):
    made, assigned = SamplingParams(**{name: value}), SamplingParams()
    setattr(assigned, name, value)
    for params in (made, assigned.verified()):
        assert getattr(params, name) == plain
        assert type(getattr(params, name)) is type(plain)


@pytest.mark.parametrize(
    "value", [Fraction(1, 10**400), 0 * Fraction(1, 3), np.float32(0), np.timedelta64("NaT")]
)
def test_a_top_p_that_rounds_to_zero_is_refused(value: Any):
    refuses("top_p must be a number in (0, 1]", top_p=value)


def test_min_tokens_is_at_most_max_tokens():
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500
    refuses("min_tokens must be at most max_tokens (4); got 5", min_tokens=5, max_tokens=4)
    refuses("min_tokens must be at most max_tokens (16); got 17", min_tokens=17)


SWITCHES = (
    "include_stop_str_in_output",
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)


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
        stop_token_ids=[1],
        allowed_token_ids=[2, 3],
        trace_decode_token_ids=[4],
        logit_bias={5: 1},
        bad_words_token_ids=[[6, 7], [8]],
    )
    assert params.named_token_ids == {
        "stop_token_ids": (1,),
        "allowed_token_ids": (2, 3),
        "trace_decode_token_ids": (4,),
        "logit_bias": (5,),
        "bad_words_token_ids": (6, 7, 8),
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
        message = f"each of stop must be a non-empty string; got {wrong!r}"
        refuses(message, stop=["a", wrong])
    refuses("each of stop must be a non-empty string; got ''", stop="")


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


def test_logit_bias_is_limited_as_in_the_api():
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


def test_an_unknown_name_without_a_near_match_is_refused_without_a_list():
    with pytest.raises(ConfigError, match="no parameter 'xyzzy'; leave it out"):
        SamplingParams(xyzzy=1)


def test_positional_arguments_are_refused():
    with pytest.raises(TypeError):
        SamplingParams(1)  # type: ignore[misc]


def test_a_refusal_is_a_value_error_and_an_error_of_mie():
    for error in (ValueError, MieError):
        with pytest.raises(error):
            SamplingParams(top_p=0)


def test_fields_can_be_assigned_but_no_new_name():
    params = SamplingParams()
    params.temperature = 0.0
    assert params.temperature == 0.0
    with pytest.raises(AttributeError):
        params.temprature = 0.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("temperature", -1, "temperature must be a number in [0, 1000]; got -1"),
        ("n", True, "n must be an integer in 1 … 1024; got True"),
        ("stop", [""], "each of stop must be a non-empty string"),
        ("stop_token_ids", iter([1]), "stop_token_ids is an iterator"),
        ("bad_words", ["a", " "], "each of bad_words must have more than spaces"),
        ("min_tokens", 17, "min_tokens must be at most max_tokens (16); got 17"),
        ("output_kind", "DELTA", "output_kind must be one of RequestOutputKind.CUMULATIVE"),
        ("extra_args", [1], "extra_args must be a mapping; got [1]"),
    ],
)
def test_an_assigned_value_is_checked_when_it_is_used(name: str, value: Any, message: str):
    params = SamplingParams()
    setattr(params, name, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
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
    assert verified == cloned == params
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


def test_a_list_that_is_assigned_and_grows_is_read_when_it_is_used():
    params, stop = SamplingParams(), ["a"]
    params.stop = stop
    first = params.verified()
    stop.append("b")
    assert (first.stop, params.verified().stop) == (("a",), ("a", "b"))


def test_a_clone_is_not_checked_again():
    params = SamplingParams(seed=3)
    params.top_p = 7.0
    assert params.clone().top_p == 7.0


def test_parameters_pickle():
    params = SamplingParams(stop=["a"], logit_bias={1: 2.0}, output_kind=RequestOutputKind.DELTA)
    assert pickle.loads(pickle.dumps(params)) == params


def test_arguments_are_copied():
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
def test_values_that_only_resemble_a_list_are_refused(value):
    with pytest.raises(ConfigError, match="stop must be"):
        SamplingParams(stop=value)
    with pytest.raises(ConfigError, match="stop_token_ids must be a list"):
        SamplingParams(stop_token_ids=value)


# Limits of one request.


def counted(values: Any, most: int) -> Any:
    """Yield an iterator that fails when more than ``most`` values are taken."""
    for number, value in enumerate(values):
        assert number < most, "read past the limit"
        yield value


LIMITED: dict[str, tuple[Any, int]] = {
    "stop": ("x", RequestLimits().max_stop_strings),
    "stop_token_ids": (1, RequestLimits().max_stop_token_ids),
    "allowed_token_ids": (1, RequestLimits().max_allowed_token_ids),
    "trace_decode_token_ids": (1, RequestLimits().max_forced_tokens),
    "bad_words": ("x", RequestLimits().max_bad_words),
    "bad_words_token_ids": ([1], 2 * RequestLimits().max_bad_words),
}


@pytest.mark.parametrize("name", LIMITED)
def test_an_endless_list_is_refused_without_reading_on(name: str):
    value, limit = LIMITED[name]
    message = f"{name} may have at most {limit} entries; got more"
    refuses(message, **{name: counted(itertools.repeat(value), limit + 1)})
    assert len(getattr(SamplingParams(**{name: [value] * min(limit, 5000)}), name)) > 0


def test_long_ranges_and_maps_are_refused():
    for name in ("stop_token_ids", "allowed_token_ids", "trace_decode_token_ids"):
        refuses(f"{name} may have at most", **{name: range(10**9)})
    limits = RequestLimits(max_logit_bias=3)
    params = SamplingParams(logit_bias=dict.fromkeys(range(4), 0.5))
    with pytest.raises(ConfigError, match="logit_bias may have at most 3 entries"):
        params.verified(limits)
    refuses("n must be an integer in 1 … 1024; got 1000000000", n=10**9)
    refuses("stop may have at most 256 entries", stop=[str(i) for i in range(10**5)])


def test_long_strings_are_refused_by_their_length():
    refuses("each of stop may have at most 1024 characters; got 1025", stop="x" * 1025)
    refuses("each of bad_words may have at most 256 characters", bad_words=["x" * 257])
    refuses("each of bad_words_token_ids may have at most", bad_words_token_ids=[range(1029)])


def test_a_server_may_set_lower_limits():
    limits = RequestLimits(max_n=2, max_stop_strings=1)
    assert SamplingParams(n=2, stop="a").verified(limits).n == 2
    with pytest.raises(ConfigError, match=re.escape("n must be an integer in 1 … 2; got 3")):
        SamplingParams(n=3).verified(limits)
    with pytest.raises(ConfigError, match="stop may have at most 1 entries"):
        SamplingParams(stop=["a", "b"]).verified(limits)
    with pytest.raises(ConfigError, match="max_n must be an integer in 1 … 1024; got 0"):
        RequestLimits(max_n=0)


@pytest.mark.parametrize("wrong", [[[1]], [{}], [set()], [b"x"], [None], [np.array([1, 2])]])
def test_ids_that_are_not_integers_are_refused(wrong: list[Any]):
    refuses("each of stop_token_ids must be an integer at least 0", stop_token_ids=wrong)


def test_an_array_without_dimensions_is_not_a_list():
    refuses("stop_token_ids must be a list of token ids", stop_token_ids=np.array(3))


def test_a_message_quotes_at_most_a_part_of_a_value():
    with pytest.raises(ConfigError) as error:
        SamplingParams(temperature="x" * 10**6)
    assert len(str(error.value)) < 1000
    with pytest.raises(ConfigError, match="n must be an integer"):
        SamplingParams(n=-(10**5000))


# Parameters that only vLLM has.

ASKED = {
    "best_of": 3,
    "use_beam_search": True,
    "length_penalty": 2.0,
    "early_stopping": True,
    "logits_processors": [print],
    "guided_decoding": {"json": "{}"},
    "logprob_token_ids": [1],
    "flat_logprobs": True,
    "prompt_logprob_start": 5,
    "stream_interval": 4,
    "repetition_detection": {"max_pattern_size": 3},
    "thinking_token_budget": 100,
    "watermarking": True,
    "prompt_logprob_token_ids": [5],
    "routed_experts_prompt_start": 4,
    "skip_clone": None,
}


@pytest.mark.parametrize("name", NEUTRAL["SamplingParams"])
def test_unsupported_parameters_are_accepted_without_effect(name: str):
    for neutral in NEUTRAL["SamplingParams"][name][0]:
        assert SamplingParams(**{name: neutral}, seed=1) == SamplingParams(seed=1)
    refuses(f"{name} is not supported: ", **{name: ASKED[name]})


def test_a_neutral_value_of_another_type_is_refused():
    refuses("best_of is not supported", best_of=True)
    refuses("logits_processors is not supported", logits_processors=np.zeros(2))


# New parameters.


def test_bad_words_are_words():
    assert SamplingParams(bad_words=["a", "b c"]).bad_words == ("a", "b c")
    assert SamplingParams(bad_words=[]).bad_words is None
    assert SamplingParams(bad_words_token_ids=[(1, 2), [3]]).bad_words_token_ids == ((1, 2), (3,))
    refuses("bad_words must be a list of strings; got 'word'", bad_words="word")
    refuses("each of bad_words must be a non-empty string; got ''", bad_words=[""])
    refuses("each of bad_words_token_ids must name at least one token", bad_words_token_ids=[[]])


def test_output_kinds_equal_those_of_vllm():
    assert [(kind.name, kind.value) for kind in RequestOutputKind] == [
        ("CUMULATIVE", 0),
        ("DELTA", 1),
        ("FINAL_ONLY", 2),
    ]
    assert SamplingParams(output_kind=RequestOutputKind.DELTA).output_kind.name == "DELTA"
    for wrong in (1, "DELTA", None):
        refuses(f"got {wrong!r}", output_kind=wrong)


def test_reading_the_prefix_cache_contradicts_prompt_logprobs():
    for value in (None, True):
        params = SamplingParams(prompt_logprobs=0, skip_reading_prefix_cache=value)
        assert params.skip_reading_prefix_cache is value
    assert SamplingParams(skip_reading_prefix_cache=False).skip_reading_prefix_cache is False
    message = "skip_reading_prefix_cache=False contradicts prompt_logprobs"
    refuses(message, prompt_logprobs=0, skip_reading_prefix_cache=False)
    refuses("skip_reading_prefix_cache must be True or False", skip_reading_prefix_cache=1)


def test_extra_arguments_are_kept():
    assert SamplingParams(extra_args={"a": [1]}).verified().extra_args == {"a": [1]}
    assert SamplingParams(extra_args={}).extra_args == {}


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
def test_a_prompt_is_truncated_from_its_beginning(
    truncate: int | None, max_tokens: int | None, kept: int
):
    params = SamplingParams(truncate_prompt_tokens=truncate, max_tokens=max_tokens)
    prompt = list(range(50))
    assert truncated(prompt, params, 60) == prompt[50 - kept :]
    assert truncated("x" * 50, params, 60) == "x" * kept


def test_a_prompt_is_not_truncated_to_more_than_the_context():
    params = SamplingParams(truncate_prompt_tokens=61)
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 61; the context holds 60"):
        truncated([1], params, 60)
    refuses("truncate_prompt_tokens must be at least 1, or -1", truncate_prompt_tokens=0)


# Beam search.


def test_the_defaults_of_beam_search_are_those_of_vllm():
    assert dataclasses.asdict(BeamSearchParams(beam_width=np.int64(4), max_tokens=64)) == {
        "beam_width": 4,
        "max_tokens": 64,
        "ignore_eos": False,
        "temperature": 0.0,
        "length_penalty": 1.0,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
    }


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


# help()


@pytest.mark.parametrize("cls", [SamplingParams, BeamSearchParams])
def test_help_explains_every_field_with_its_default(cls: type):
    text = pydoc.render_doc(cls, renderer=pydoc.plaintext)
    entries = dict(re.findall(r"^ \|  (\w+): ((?:.|\n \|      )+)$", text, re.MULTILINE))
    fields = dataclasses.fields(cls)
    assert list(entries)[: len(fields)] == [field.name for field in fields]
    for field in fields:
        entry = " ".join(entries[field.name].replace("|", " ").split())
        assert entry.endswith("."), field.name
        default = getattr(field.default, "name", repr(field.default))
        is_required = field.default is dataclasses.MISSING
        assert is_required or entry.endswith(f" Default: {default}."), field.name
