"""Check lists with different items: what they allow, that they can end, and their refusals."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Field

from mie import LLM, SamplingParams, StructuredOutputsParams
from mie.errors import RequestError
from mie.structured.grammars import Grammars

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

EOS, VOCAB_SIZE = 1, 2048
TEXT: dict[str, Any] = {"type": "string"}


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), VOCAB_SIZE, [EOS])


@cache
def llm() -> LLM:
    return LLM("bundled", backend="numpy", num_threads=1)


def tokenizer() -> Any:
    return llm().tokenizer


@cache
def spelled() -> list[str]:
    """Return the text of each token."""
    return [tokenizer().decode([i], skip_special_tokens=False) for i in range(VOCAB_SIZE)]


def start(schema: Any, **more: Any) -> Any:
    return grammars().start(StructuredOutputsParams(json=schema, **more))


def different(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True, **more}


def allows(schema: Any, text: str, **more: Any) -> bool:
    """Return whether a text is a whole answer, by masks and by `validate`."""
    ids = [*tokenizer().encode(text, add_special_tokens=False), EOS]
    matcher = start(schema, **more)
    is_valid = bool(matcher.validate(ids) == len(ids))
    for token in ids:
        has = bool(matcher.mask()[token // 8] >> token % 8 & 1)
        assert matcher.allows(token) == has
        if not has:
            break
        matcher.accept(token)
    else:
        assert is_valid
        return True
    assert not is_valid
    return False


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
SCHEMAS: list[Any] = [
    different(TEXT),
    different({**TEXT, "minLength": 1}, minItems=2, maxItems=5),
    different({"enum": ["a", "ab", "b", 1, 12, True, None]}),
    different({"enum": ["red", "green", "blue"]}, minItems=3),
    different({"type": "boolean"}),
    different(OBJECT),
    different({"anyOf": [{"$ref": "#/$defs/text"}, OBJECT]}) | {"$defs": {"text": TEXT}},
    {"anyOf": [{"type": "null"}, different(TEXT)]},
    {"type": "object", "additionalProperties": {"type": "null"}, "minProperties": 2},
    {"oneOf": [TEXT, different({"enum": ["x", "y"]})]},
    {
        "type": "object",
        "properties": {"t": {"allOf": [{"$ref": "#/$defs/tags"}]}},
        "additionalProperties": different({"enum": ["a", "b"]}),
        "required": ["t"],
        "$defs": {"tags": different(TEXT, minItems=1)},
    },
    {
        "type": "array",
        "items": {"$ref": "#/$defs/node"},
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"tags": different(TEXT), "more": {"$ref": "#"}},
                "additionalProperties": False,
            }
        },
    },
]


@pytest.mark.parametrize("number", range(len(SCHEMAS)))
@pytest.mark.parametrize("is_compact", [True, False])
def test_random_outputs_have_different_items_and_end(number: int, is_compact: bool):
    """Tokens that came before are preferred, so that items are nearly repeated."""
    schema = SCHEMAS[number]
    rng = random.Random(number)
    whole = 0
    for _ in range(3):
        matcher = start(schema, disable_any_whitespace=is_compact)
        ids: list[int] = []
        while len(ids) < 60:
            mask = np.frombuffer(matcher.mask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:VOCAB_SIZE])
            assert len(allowed), tokenizer().decode(ids)
            if len(ids) % 7 == 0:
                for token in rng.sample(range(VOCAB_SIZE), 20) + ids:
                    assert matcher.allows(token) == (token in allowed)
                    assert matcher.validate([token]) == (token in allowed)
            liked = [token for token in allowed if token in ids and rng.random() < 0.7]
            if len(ids) > 20:
                liked = [token for token in allowed if spelled()[token][:1] in ('"', "}", "]")]
            token = int(rng.choice(liked or list(allowed)))
            if EOS in allowed and (token == EOS or rng.random() < 0.5):
                jsonschema.validate(json.loads(tokenizer().decode(ids)), schema)
                whole += 1
                break
            ids.append(token)
            matcher.accept(token)
            if rng.random() < 0.2:
                matcher.rollback(1)
                matcher.accept(token)
    assert whole


def test_an_item_is_repeated_in_no_spelling():
    texts = different(TEXT)
    assert allows(texts, '["a","\\n","b"]')
    assert not allows(texts, '["\\n","b","\\u000a"]')
    assert not allows(texts, '["é","a","é"]')
    assert allows(texts, '["a","ab","abc"]')
    assert allows(texts, '["","a"]')
    assert not allows(texts, '["","a",""]')
    objects = different(OBJECT)
    assert allows(objects, '[{"a":1},{"a":10},{}]')
    assert not allows(objects, '[{"a":1},{},{"a":1}]')
    assert not allows(objects, '[{"a":1,"b":[2,{"c":1.0}]},{"a":1,"b":[2.0,{"c":1}]}]')
    assert allows(objects, '[{"a":1,"b":[1]},{"a":1,"b":[true]}]')
    spaced = {"disable_any_whitespace": False}
    assert allows(objects, '[ {"a": 1} , { } ]', **spaced)
    assert not allows(objects, '[ {"a": 1} , {"a" :1 } ]', **spaced)


def test_an_item_that_nests_too_deep_ends_the_output_by_name():
    matcher = start(different(OBJECT))
    text = '[{"b":' + "[" * 1500 + "]" * 1500
    for token in tokenizer().encode(text, add_special_tokens=False):
        matcher.accept(token)
    with pytest.raises(RequestError, match="nests too deep to be compared"):
        matcher.mask()


def test_a_pattern_of_whitespace_is_refused_beside_different_items():
    with pytest.raises(RequestError, match="beside whitespace_pattern"):
        start(different(TEXT), whitespace_pattern="[ ]*")


def test_a_list_of_listed_values_ends_after_the_last():
    schema = different({"enum": [1, 12, "a"]})
    assert allows(schema, '[12,1,"a"]')
    assert allows(schema, "[1,12]")
    assert not allows(schema, "[1,1]")
    matcher = start(schema)
    for token in tokenizer().encode('[12,1,"a"', add_special_tokens=False):
        matcher.accept(token)
    bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
    found = {tokenizer().decode([int(each)]) for each in np.flatnonzero(bits)}
    assert found == {"]"}


def test_lists_beside_are_free():
    schema = {
        "type": "object",
        "properties": {"a": different(TEXT), "b": {"type": "array", "items": TEXT}},
        "required": ["a", "b"],
    }
    assert allows(schema, '{"a":["x","y"],"b":["x","x"]}')
    assert allows(schema, '{"a":[],"b":[],"c":["x","x"]}')
    assert not allows(schema, '{"a":["x","x"],"b":[]}')


def test_names_of_an_object_that_must_have_several_differ():
    numbers = {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 2}
    assert allows(numbers, '{"a":1,"b":1}')
    assert not allows(numbers, '{"a":1}')
    assert not allows(numbers, '{"a":1,"a":2}')
    assert not allows(numbers, '{"a":1,"b":2,"\\u0061":2}')
    assert allows(numbers, '{"a":1,"aa":2,"aaa":3}')
    named = {"properties": {"x": {"additionalProperties": True, "minProperties": 3}}}
    assert allows(named, '{"x":{"a":"a","b":"a","c":{}},"y":{"a":1}}')
    assert not allows(named, '{"x":{"a":"a","b":"a","a":{}}}')
    required = {"required": ["a", "b"], "minProperties": 2, "type": "object"}
    assert allows(required, '{"a":1,"b":2}')
    for more in ({"propertyNames": {"maxLength": 1}}, {"patternProperties": {"^a": True}}):
        with pytest.raises(RequestError, match=r"has minProperties 2 of names .*; see #"):
            start({**numbers, **more})


REFUSED: list[Any] = [
    {"type": "array", "uniqueItems": True},
    different({**TEXT, "maxLength": 3}),
    different({**TEXT, "pattern": "^(a|b)$"}),
    different({**TEXT, "format": "date"}),
    different({"type": "integer"}),
    different({"type": ["string", "null"]}),
    different({"enum": [[1], [2]]}),
    different({"enum": [1.5, 2]}),
    different({**OBJECT, "additionalProperties": False}),
    different({**OBJECT, "maxProperties": 2}),
    different({"oneOf": [TEXT, {**TEXT, "minLength": 3}]}),
    different(TEXT, prefixItems=[TEXT]),
    {"anyOf": [different(TEXT), {"type": "array", "items": {"enum": ["a", "b"]}}]},
    {"allOf": [different({"enum": [1, 2]}), {"minItems": 3}]},
    {"not": {"not": {"items": {"maxLength": 2}}}, **different(TEXT)},
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_lists_that_might_have_no_other_item_are_refused(number: int):
    with pytest.raises(RequestError, match="'uniqueItems'"):
        start(REFUSED[number])


def test_too_many_items_of_a_list_are_refused_with_both_numbers():
    with pytest.raises(RequestError, match="minItems 3 and 'uniqueItems' of 2 values"):
        start(different({"enum": ["a", "b"]}, minItems=3))


def test_closed_objects_cannot_differ_without_end():
    with pytest.raises(RequestError, match="'uniqueItems'"):
        start(different(OBJECT), disable_additional_properties=True)


class Walk(BaseModel):
    seen: Annotated[set[Literal["fox", "otter", "owl", "hare"]], Field(min_length=3)]
    flags: set[bool]


def test_a_model_writes_sets_of_pydantic():
    schema = Walk.model_json_schema()
    params = SamplingParams(
        max_tokens=80,
        temperature=1.0,
        seed=3,
        n=2,
        structured_outputs=StructuredOutputsParams(json=schema, disable_additional_properties=True),
    )
    for each in llm().generate(["Once", "The owl"], params):
        for output in each.outputs:
            jsonschema.validate(json.loads(output.text), schema)
            assert len(Walk.model_validate_json(output.text).seen) >= 3
