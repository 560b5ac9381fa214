"""Check that outputs of random schemas validate, for any preference of the model.

The bundled model samples at the highest temperature, so nearly every allowed token is as likely as
any other. `jsonschema` validates independently of the library that computes the masks.
"""

import json
import re
from collections import Counter
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mie import LLM, SamplingParams, StructuredOutputsParams

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")
jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")

NUM_BATCHES, BATCH = 40, 8

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
    strings(),
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
def bundled():
    return LLM("bundled", num_threads=1)


@given(batch=st.lists(schemas, min_size=BATCH, max_size=BATCH), seed=st.integers(0, 99))
@settings(max_examples=max(NUM_BATCHES, settings().max_examples // 10))
def check_batch(batch, seed):
    params = [
        SamplingParams(
            temperature=1000.0,
            seed=seed,
            max_tokens=300,
            structured_outputs=StructuredOutputsParams(
                json=schema, disable_any_whitespace=bool(i % 4)
            ),
        )
        for i, schema in enumerate(batch)
    ]
    for i, output in enumerate(bundled().generate(["Once"] * BATCH, params, use_tqdm=False)):
        [choice] = output.outputs
        seen["outputs"] += 1
        if choice.finish_reason == "length":  # a number's digits, or whitespace, need not end
            seen["cut"] += 1
            continue
        value = json.loads(choice.text)
        jsonschema.validate(value, batch[i], format_checker=jsonschema.FormatChecker())
        if i % 4:
            outside_strings = re.sub(r'"(?:[^"\\]|\\.)*"', "", choice.text)
            assert not re.search(r"\s", outside_strings)
        for kind in ("object", "array", "anyOf", "pattern", "number", "enum"):
            seen[kind] += f'"{kind}"' in json.dumps(batch[i])


@pytest.mark.timeout(0)
def test_outputs_of_random_schemas_validate():
    seen.clear()
    check_batch()
    assert seen["outputs"] >= 300, seen
    assert seen["cut"] <= seen["outputs"] // 10, seen
    for kind in ("object", "array", "anyOf", "pattern", "number", "enum"):
        assert seen[kind] >= 10, seen
