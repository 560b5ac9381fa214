"""Check negations, conditions and exclusive alternatives of JSON schemas against jsonschema."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from mie import LLM, StructuredOutputsParams
from mie.errors import RequestError
from mie.structured.grammars import Grammars

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

EOS = 1
OBJECTS = [{}, *({"a": x} for x in (1, 3, "a", True)), *({"b": x} for x in (0, "b"))]
OBJECTS += [{"a": x, "b": y} for x in (1, 2, "a") for y in (1, "b")]
VALUES: list[Any] = [None, True, False, -1, 0, 1, 2, 3, 1.5, 2.5, "", "a", "b", "ab", "abc", "x/y"]
VALUES += [[], [1], ["a"], [1, 2], ["b", "a"], *OBJECTS]
A, B = {"a": {}, "b": {}}, {"type": "object", "properties": {"a": {}, "b": {}}}
SCHEMAS: list[dict[str, Any]] = [
    {"not": {"type": "string"}},
    {"not": {"type": ["object", "null", "number"]}},
    {"type": "integer", "not": {"type": "integer", "minimum": 2}},
    {"not": {"const": "ab"}},
    {"not": {"enum": ["a", "ab", 1, 2.5, None, True]}},
    {"type": "integer", "not": {"enum": [0, 1, 3]}},
    {"not": {"enum": [True, False, {}, []]}},
    {"type": "number", "not": {"anyOf": [{"exclusiveMinimum": 1.5}, {"maximum": 0}]}},
    {"type": "string", "not": {"minLength": 1, "maxLength": 2}},
    {"type": "array", "not": {"minItems": 2}},
    {**B, "not": {"required": ["a"]}},
    {**B, "not": {"required": ["a", "b"]}},
    {**B, "not": {"properties": {"a": {"type": "number"}}, "required": ["a"]}},
    {"not": {"not": {"type": "string", "minLength": 2}}},
    {"not": {"oneOf": [{"minimum": 1}, {"maximum": 2}]}},
    {"not": {"allOf": [{"type": "string"}, {"maxLength": 1}]}},
    {"not": {"if": {"type": "string"}, "then": {"minLength": 2}, "else": {"type": "array"}}},
    {**B, "not": {"dependentRequired": {"a": ["b"]}}},
    {**B, "not": {"dependentSchemas": {"a": {"required": ["b"]}}}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {**B, "if": {"properties": {"a": {"const": 1}}}, "then": {"required": ["b"]}},
    {"if": {"enum": ["a", 1]}, "else": {"type": "object"}},
    {"properties": A, "dependentRequired": {"a": ["b"]}},
    {"properties": A, "dependentSchemas": {"a": {"properties": {"b": {"type": "integer"}}}}},
    {"properties": A, "dependencies": {"b": ["a"]}, "$comment": "draft 7"},
    {"required": ["b"], "properties": A, "dependentRequired": {"b": ["a"]}},
    {**B, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]},
    {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 1}, {"const": 1}]},
    {"oneOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 2}]},
    {"type": "string", "oneOf": [{"pattern": "^a"}, {"pattern": "^x/"}]},
    {"type": "string", "oneOf": [{"maxLength": 1}, {"minLength": 1}]},
    {"oneOf": [{**B, "required": ["a"], "additionalProperties": False}, {**B, "required": ["c"]}]},
    {"oneOf": [{"type": "string", "pattern": "^[0-9x]+(/[a-z])?$"}, {"enum": ["ab", "b"]}]},
    {"oneOf": [{"type": "string", "pattern": "^\\w/\\w"}, {"type": "string", "maxLength": 0}]},
    {"type": "string", "oneOf": [{"pattern": "^x/"}, {"pattern": "^a\\."}, {"pattern": "^x\\."}]},
    {"type": "array", "oneOf": [{"items": {"type": "string"}}, {"items": {"type": "integer"}}]},
    {"contains": {"type": "integer"}},
    {"type": "array", "contains": {"const": 2}, "maxItems": 2, "items": {"type": "integer"}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "contains": {"enum": ["a", 2]}},
    {"anyOf": [{"type": "string"}, {"type": "object"}], "oneOf": [{"minLength": 2}, {"const": {}}]},
]


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(LLM("bundled", backend="numpy", num_threads=1).tokenizer, 2048, [EOS])


def accepted(
    grammars: Grammars, schemas: list[Any], values: list[Any] = VALUES
) -> list[list[bool]]:
    """Return which values each schema accepts. One grammar has all schemas."""
    names = [f"s{index}" for index in range(len(schemas))]
    together = {
        "type": "object",
        "properties": dict(zip(names, schemas, strict=True)),
        "additionalProperties": False,
    }
    matcher = grammars.start(StructuredOutputsParams(json=together))
    tokenizer = LLM("bundled", backend="numpy", num_threads=1).tokenizer

    def allows(value: Any) -> bool:
        text = json.dumps(value, separators=(",", ":"))
        ids = [*tokenizer.encode(text, add_special_tokens=False), EOS]
        return matcher.validate(ids) == len(ids)

    # Properties that a schema does not name may come in any order, and named ones in its own.
    turned = [dict(reversed(each.items())) if isinstance(each, dict) else each for each in values]
    return [
        [allows({name: x}) or allows({name: y}) for x, y in zip(values, turned, strict=True)]
        for name in names
    ]


def valid(schema: Any, values: list[Any] = VALUES) -> list[bool]:
    draft = jsonschema.Draft7Validator if "$comment" in schema else jsonschema.Draft202012Validator
    return [draft(schema).is_valid(value) for value in values]


def test_negations_conditions_and_alternatives_accept_exactly_the_valid_values(grammars) -> None:
    for schema, found in zip(SCHEMAS, accepted(grammars, SCHEMAS), strict=True):
        assert found == valid(schema), schema


CLOSED = {"type": "object", "additionalProperties": False}
NARROWED: list[dict[str, Any]] = [
    {"oneOf": [{**CLOSED, "properties": {"a": {"const": x}, "b": {"items": {}}}} for x in (1, 3)]},
    {"oneOf": [{"properties": {"a": {"enum": [x]}, "b": {"items": {}}}} for x in (1, 3, "a")]},
    {"oneOf": [{"type": "string"}, *({"type": "object", "allOf": [{"properties": {"a": {"const": x},
        "b": {"pattern": "b"}}}]} for x in (1, 3))]},
]  # fmt: skip


def test_objects_have_the_property_by_which_alternatives_differ(grammars) -> None:
    for schema, found in zip(NARROWED, accepted(grammars, NARROWED), strict=True):
        for value, is_found, is_valid in zip(VALUES, found, valid(schema), strict=True):
            has_property = isinstance(value, str) or (isinstance(value, dict) and "a" in value)
            assert is_found == (is_valid and has_property), (schema, value)
        assert any(found)


RANGES = [
    {"exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    {"exclusiveMinimum": 0, "maximum": 0.25},
    {"exclusiveMinimum": 0, "maximum": 1},
    {"exclusiveMinimum": 0.5, "exclusiveMaximum": 1},
    {"exclusiveMinimum": -0.5, "exclusiveMaximum": 0},
    {"exclusiveMinimum": 1, "maximum": 2.5},
    {"minimum": -2.5, "exclusiveMaximum": -1},
]
WIDENED = [
    {"exclusiveMinimum": 1, "exclusiveMaximum": 1.5},
    {"minimum": -2.5, "exclusiveMaximum": -2},
]


def test_ends_of_ranges_between_two_integers_are_left_out(grammars) -> None:
    schemas = [{"type": "number", **each} for each in RANGES]
    numbers = [-2.5, -2, -1, -0.25, 0, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5]
    for schema, found in zip(schemas, accepted(grammars, schemas, numbers), strict=True):
        assert found == valid(schema, numbers), schema
    for each in WIDENED:
        with pytest.raises(RequestError, match="in a range that llguidance would widen"):
            grammars.start(StructuredOutputsParams(json={"type": "number", **each}))


def test_classes_leave_out_the_quotes_and_backslashes_that_they_exclude(grammars) -> None:
    texts = ["\\", '"', "a", "b", "\n", "[", "&", "]", "-", "ab"]
    patterns = [r"^[^\\]$", r'^[^"]$', r'^[^\\"ab]$', r"^[\x01-!a]$", r"^[^-a]$"]
    schemas = [{"type": "string", "pattern": each} for each in patterns]
    for schema, found in zip(schemas, accepted(grammars, schemas, texts), strict=True):
        assert found == valid(schema, texts), schema
    sets = {"type": "string", "pattern": "^[[a&&b]$"}  # no intersection of sets, as in ECMA-262
    assert accepted(grammars, [sets], ["[", "&", "a", "b", "c"]) == [[True] * 4 + [False]]
    names = {"type": "object", "patternProperties": {r'^[^"]$': {}}, "additionalProperties": False}
    values = [{"a": 1}, {'"': 1}, {"\\": 1}]
    assert accepted(grammars, [names], values) == [[True, False, True]]


NUM_RANDOM = 60, 20  # in a slow test, and in the one of each run


def random_schema(rng: random.Random, depth: int) -> Any:
    """Return a schema of `VALUES` with random keywords."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(
            [
                {"type": rng.choice(["string", "number", "boolean", "null", "object", "array"])},
                {
                    "enum": rng.sample(
                        [0, 1, 3, 2.5, "", "a", "ab", True, None], rng.randrange(1, 5)
                    )
                },
                {rng.choice(["minimum", "exclusiveMaximum"]): rng.randrange(3)},
                {rng.choice(["minLength", "maxLength", "minItems"]): rng.randrange(3)},
                {"required": rng.sample(["a", "b", "c"], rng.randrange(1, 3))},
                True,
            ]
        )

    def inner() -> Any:
        return random_schema(rng, depth - 1)

    kind = rng.randrange(7)
    if kind == 0:
        return {"not": inner()}
    if kind == 1:
        return {rng.choice(["anyOf", "allOf"]): [inner(), inner()]}
    if kind == 2:
        return {"oneOf": [inner() for _ in range(rng.randrange(2, 4))]}
    if kind == 3:
        return {"if": inner(), "then": inner(), "else": inner()}
    if kind == 4:
        return {"type": "object", "dependentSchemas": {"a": inner()}}
    names = rng.sample(["a", "b"], rng.randrange(1, 3))
    closed = {"additionalProperties": False} if kind == 5 else {}
    return {"type": "object", "properties": {name: inner() for name in names}, **closed}


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in range(1, 9))]
)
def test_random_schemas_accept_exactly_the_valid_values(grammars, seed: int) -> None:
    rng = random.Random(seed)
    schemas = [
        each
        for each in (random_schema(rng, 3) for _ in range(NUM_RANDOM[seed == 0]))
        if each is not True
    ]
    followed = []
    for schema in schemas:
        try:
            grammars.start(StructuredOutputsParams(json=schema))
        except RequestError:
            continue
        followed.append(schema)
    assert len(followed) > len(schemas) / 2
    for schema, found in zip(followed, accepted(grammars, followed), strict=True):
        assert found == valid(schema), schema
