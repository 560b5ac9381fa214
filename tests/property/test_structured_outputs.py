"""Check outputs of random schemas: they validate, and taking tokens at once changes nothing.

Most requests sample at a temperature at which nearly every allowed token is as likely as any other.
`jsonschema` validates independently of the library that computes the masks.
"""

import json
import re
from collections import Counter
from functools import cache
from itertools import cycle

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from rare import check_until_seen

from mie import LLM, SamplingParams, StructuredOutputsParams
from mie.errors import RequestFailedError

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

NUM_SCHEMAS = min(max(60, settings().max_examples), 2000)
BATCHES = (64, *[8] * 4, *[1] * 4)
"""Sizes of batches, in turn."""
NUM_MIXES = 4

seen: Counter[str] = Counter()

names = st.sampled_from(["a", "b", "name", "été", "with space", 'quo"te', "$x", ""])
scalars = st.none() | st.booleans() | st.integers(-99, 99) | st.sampled_from(["", "x", "é", 'a"b'])


@st.composite
def strings(draw):
    if draw(st.booleans()):
        return {"type": "string", "pattern": draw(st.sampled_from(["^[a-c]{1,3}$", "^x*é$"]))}
    low = draw(st.integers(0, 3))
    return {"type": "string", "minLength": low, "maxLength": low + draw(st.integers(0, 4))}


@st.composite
def integers(draw):
    low = draw(st.integers(-200, 200))
    return {"type": "integer", "minimum": low, "maximum": low + draw(st.integers(0, 300))}


@st.composite
def numbers(draw):
    low = draw(st.integers(-5, 5))
    return {"type": "number", "minimum": low, "exclusiveMaximum": low + draw(st.integers(1, 9))}


@st.composite
def arrays(draw, inner):
    low = draw(st.integers(0, 2))
    schema = {"type": "array", "minItems": low, "maxItems": low + draw(st.integers(0, 2))}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=2))
    return {**schema, "items": draw(inner)}


@st.composite
def objects(draw, inner):
    properties = draw(st.dictionaries(names, inner, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def any_of(each):
    return {"anyOf": each}


leaves = st.one_of(
    *(strings(), strings()),  # half of them have patterns
    integers(),
    numbers(),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": "string", "format": "date"}]),
    scalars.map(lambda value: {"const": value}),
    st.lists(scalars, min_size=1, max_size=3).map(lambda values: {"enum": values}),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        arrays(inner), objects(inner), st.lists(inner, min_size=1, max_size=3).map(any_of)
    ),
    max_leaves=6,
)


@cache
def bundled(**changes):
    return LLM("bundled", num_threads=1, **changes)


@given(schema=schemas)
@settings(max_examples=NUM_SCHEMAS, phases=[Phase.generate], database=None)
def collect(found, schema):
    """Add a schema to those that are tried."""
    found.append(schema)


def check_batch(batch, seed):
    is_compact = [(seed + i) % 5 > 0 for i in range(len(batch))]
    params = [
        SamplingParams(
            temperature=1000.0 if i % 4 else 1.0,
            seed=seed + i,
            max_tokens=300,
            structured_outputs=StructuredOutputsParams(
                json=schema, disable_any_whitespace=is_compact[i]
            ),
        )
        for i, schema in enumerate(batch)
    ]
    outputs = bundled().generate(["Once"] * len(batch), params, use_tqdm=False)
    for i, (schema, output) in enumerate(zip(batch, outputs, strict=True)):
        [choice] = output.outputs
        seen["outputs"] += 1
        seen["forced"] += output.metrics.num_forced_tokens > 0
        if choice.finish_reason == "length":  # a number's digits need not end
            seen["cut"] += is_compact[i]  # and neither need whitespace
            continue
        value = json.loads(choice.text)
        jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
        if is_compact[i]:
            outside_strings = re.sub(r'"(?:[^"\\]|\\.)*"', "", choice.text)
            assert not re.search(r"\s", outside_strings)
        for kind in KINDS:
            seen[kind] += f'"{kind}"' in json.dumps(schema)


KINDS = ("object", "array", "anyOf", "pattern", "number", "enum")


def check_schemas(collect):
    left = []
    collect(left)
    for seed, size in enumerate(cycle(BATCHES)):
        batch, left = left[:size], left[size:]
        if not batch:
            break
        check_batch(batch, seed)
    assert seen["cut"] <= seen["outputs"] // 10, seen


def test_outputs_of_random_schemas_validate():
    wanted = {"outputs": NUM_SCHEMAS, "forced": 30, **dict.fromkeys(KINDS, 3)}
    check_until_seen(check_schemas, collect, seen, wanted)


# Determined tokens.

ENGINES = {
    "plain": {},
    "short runs": {"max_forced_run": 2, "num_blocks": 10},
    "small budget": {"max_num_batched_tokens": 5, "max_prefill_chunk": 3},
    "static": {"batching": "static", "max_num_seqs": 3},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
    "overlap": {"async_scheduling": True},
    "no cache": {"enable_prefix_caching": False},
    "recompute": {"num_blocks": 8},
    "swap": {"num_blocks": 8, "preemption_mode": "swap", "swap_space": 2**22},
}


@st.composite
def mixed_params(draw):
    """Draw parameters of a request, most of them constrained."""
    if not draw(st.integers(0, 5)):
        return {"temperature": 1.0, "seed": 1, "max_tokens": 36, "n": 2}
    structure = draw(
        st.one_of(
            schemas.map(lambda schema: {"json": schema}),
            st.sampled_from(
                [
                    {"regex": "a{3}(b|c)dear reader[0-9]{2}"},
                    {"choice": ["yes", "no", "a long answer, which is determined"]},
                    {"grammar": 'start: "<" ("ab" | "c"){1,3} ">" " is all there is"'},
                ]
            ),
        )
    )
    max_tokens = draw(st.sampled_from([40, 40, 9, 4, 1]))
    optional = {
        "n": st.integers(2, 3),
        "min_tokens": st.integers(1, max_tokens),
        "ignore_eos": st.just(True),
        "stop": st.sampled_from(['"', "e", "der", "ll the", "1"]),
        "include_stop_str_in_output": st.just(True),
        "stop_token_ids": st.lists(st.integers(2, 400), min_size=2, max_size=60),
        "presence_penalty": st.just(1.5),
        "repetition_penalty": st.just(1.3),
        "logit_bias": st.dictionaries(st.integers(2, 400), st.floats(-9, 9), min_size=1),
        "bad_words": st.sampled_from([["reader"], ["e"], ["1", "2"], ["ab"]]),
        "prompt_logprobs": st.just(1),
        "detokenize": st.just(False),
    }
    names = draw(st.lists(st.sampled_from(sorted(optional)), max_size=4, unique=True))
    if "stop" in names:
        names = [name for name in names if name != "detokenize"]
    return {
        "structured_outputs": structure,
        "temperature": draw(st.sampled_from([0.0, 1.0, 1000.0])),
        "seed": draw(st.integers(0, 9)),
        "max_tokens": max_tokens,
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        **{name: draw(optional[name]) for name in names},
    }


MANY = [
    {
        "structured_outputs": {"regex": "[a-z ]{9}(dear reader, [0-9]){3}"},
        "temperature": 1000.0,
        "seed": i,
        "max_tokens": 40,
        "logprobs": [None, 0][i % 2],
    }
    for i in range(6)
]
"""Requests that together need more blocks than a small pool has."""

NOTHING_FOLLOWS = {
    "structured_outputs": {"json": {"type": "string", "maxLength": 0}},
    "temperature": 0.0,
    "max_tokens": 40,
    "logprobs": 0,
    "min_tokens": 3,
}
"""A request that fails when all that is determined was taken."""


def answers(llm, params):
    """Return the visible part of each request."""
    prompt = "Once upon a time there was an otter who lived by the sea, near a mill"
    try:
        outputs = llm.generate([prompt] * len(params), params, use_tqdm=False)
    except RequestFailedError as error:
        outputs = error.outputs
    return outputs


def check_equal(one, other):
    if one.error and len(one.outputs) > 1:  # which choice fails first depends on the schedule
        assert other.error
        return
    assert one.error == other.error
    check_logprobs(one.prompt_logprobs, other.prompt_logprobs)
    if one.error:  # the determined tokens of the step that failed are not put out
        [a], [b] = one.outputs, other.outputs
        assert a.token_ids == b.token_ids[: len(a.token_ids)]
        return
    for a, b in zip(one.outputs, other.outputs, strict=True):
        assert a.token_ids == b.token_ids
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
        check_logprobs(a.logprobs, b.logprobs)


def check_logprobs(one, other):
    """Compare log-probabilities, whose last bits depend on how many rows a step computes."""
    assert len(one or ()) == len(other or ())
    for mine, its in zip(one or (), other or (), strict=True):
        if mine is None or its is None:  # nothing precedes the first token of a prompt
            assert mine is its
            continue
        assert list(mine) == list(its)
        assert [x.rank for x in mine.values()] == [x.rank for x in its.values()]
        np.testing.assert_allclose(
            [x.logprob for x in mine.values()], [x.logprob for x in its.values()], atol=1e-9
        )


@given(
    mix=st.lists(mixed_params(), min_size=3, max_size=6),
    name=st.sampled_from([*ENGINES, "recompute", "swap"]),
)
@example(mix=[NOTHING_FOLLOWS], name="plain")
@example(mix=MANY[:3], name="static")
@example(mix=MANY[:3], name="small budget")
@example(mix=MANY[:3], name="overlap")
@example(mix=MANY[:3], name="no cache")
@example(mix=MANY, name="recompute")
@example(mix=MANY, name="swap")
@settings(max_examples=max(NUM_MIXES, settings().max_examples // 10))
def check_mix(mix, name):
    common = {"dtype": "float64", "max_model_len": 64, "block_size": 8}
    at_once = bundled(**{**common, **ENGINES[name]})
    one_by_one = bundled(**common, max_forced_run=0)
    params = [SamplingParams(**each) for each in mix]
    before = at_once.engine.stats.num_preemptions
    outputs = answers(at_once, params)
    for output, expected in zip(outputs, answers(one_by_one, params), strict=True):
        check_equal(output, expected)
        num_forced = output.metrics.num_forced_tokens
        assert not expected.metrics.num_forced_tokens
        seen["forced"] += num_forced > 0
        seen["scored"] += num_forced > 0 and output.outputs[0].logprobs is not None
        seen["failed"] += output.error is not None
    seen["preempted"] += at_once.engine.stats.num_preemptions > before
    assert at_once.engine.scheduler.manager.num_used == 0


def test_determined_tokens_taken_at_once_are_those_one_by_one():
    wanted = {"forced": 20, "scored": 8, "preempted": 1}
    check_until_seen(lambda check: check(), check_mix, seen, wanted)
