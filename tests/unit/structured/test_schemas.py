"""Check which values a JSON schema allows: keywords, formats, numbers and closed objects."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import itertools
import json
import pathlib
import random
import re
import uuid
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal

import jsonschema_rs
import numpy as np
import pytest
from pydantic import UUID4, BaseModel, Field, IPvAnyAddress, SecretStr, TypeAdapter
from pydantic import StringConstraints as Text

from mie import LLM, StructuredOutputsParams
from mie.errors import RequestError
from mie.structured.grammars import Grammars

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

EOS, VOCAB_SIZE = 1, 2048


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), VOCAB_SIZE, [EOS])


@cache
def tokenizer() -> Any:
    return LLM("bundled", backend="numpy", num_threads=1).tokenizer


@cache
def spelled() -> list[str]:
    """Return the text of each token."""
    return [tokenizer().decode([i], skip_special_tokens=False) for i in range(VOCAB_SIZE)]


@cache
def ending() -> Any:
    """Return which tokens can end a text of JSON, or a part of one."""
    return np.array([i == EOS or text[:1] in ('"', "}", "]") for i, text in enumerate(spelled())])


def start(schema: Any, **more: Any) -> Any:
    return grammars().start(StructuredOutputsParams(json=schema, **more))


def allows(schema: Any, value: Any, **more: Any) -> bool:
    """Return whether a value, or a text of JSON, is a whole answer."""
    compact = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    text = value if isinstance(value, str) else compact
    ids = [*tokenizer().encode(text, add_special_tokens=False), EOS]
    return bool(start(schema, **more).validate(ids) == len(ids))


def all_allowed(schema: Any, values: list[Any]) -> list[bool]:
    """Return which values are whole answers."""
    matcher = start(schema)
    found = []
    for value in values:
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        ids = [*tokenizer().encode(text, add_special_tokens=False), EOS]
        found.append(matcher.validate(ids) == len(ids))
    return found


def refusal(schema: Any, **more: Any) -> str:
    try:
        start(schema, **more)
    except RequestError as error:
        return str(error)
    return ""


def random_texts(schema: Any, count: int, **more: Any) -> Iterator[str]:
    """Return texts that the masks allow, at random; those that do not end soon are left out."""
    rng = random.Random(json.dumps(schema))
    for _ in range(count):
        matcher = start(schema, **more)
        ids: list[int] = []
        for number in range(120):
            bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[:VOCAB_SIZE])
            ends = allowed[ending()[allowed]]
            likes = ends if len(ends) and rng.random() < number / 60 else allowed
            token = int(rng.choice(likes))
            if token == EOS:
                yield tokenizer().decode(ids)
                break
            ids.append(token)
            matcher.accept(token)


NESTS = {
    "itself": (lambda schema: schema, lambda value: value),
    "a property": (
        lambda schema: {"type": "object", "properties": {"p": schema}, "required": ["p"]},
        lambda value: {"p": value},
    ),
    "an alternative of items": (
        lambda schema: {"type": "array", "items": {"anyOf": [{"type": "null"}, schema]}},
        lambda value: [None, value],
    ),
    "a reference": (
        lambda schema: {"$defs": {"a/b": schema}, "allOf": [{"$ref": "#/$defs/a~1b"}]},
        lambda value: value,
    ),
}

# Numbers.

BIG = [
    *(sign * (2**53 + more) for sign in (-1, 1) for more in (-1, 0, 1)),
    *(10**17, 2**63 - 1, 2**63, -(2**63), 10**400),
]
HOLDS = {
    "const": lambda value, given: value == given,
    "enum": lambda value, given: value == given,
    "minimum": lambda value, given: value >= given,
    "maximum": lambda value, given: value <= given,
    "exclusiveMinimum": lambda value, given: value > given,
    "exclusiveMaximum": lambda value, given: value < given,
}


@pytest.mark.parametrize("keyword", HOLDS)
def test_large_integers_are_exact_or_refused_by_name(keyword: str):
    exact = 0
    types = (True,) if keyword in ("const", "enum") else (True, False)
    for number, (given, is_integer) in enumerate(itertools.product(BIG, types)):
        schema = {keyword: [7, given] if keyword == "enum" else given}
        if keyword not in ("const", "enum"):
            schema["type"] = "integer" if is_integer else "number"
        elif keyword == "enum" and number % 2:
            schema = {"enum": [[{"id": given}]]}
        wrap, within = list(NESTS.values())[number % len(NESTS)]
        message = refusal(wrap(schema))
        if message:
            assert "which llguidance would change" in message or "cannot be read" in message
            assert "imum" in message or keyword in message
            assert abs(given) >= 2**53 - 1
            continue
        exact += 1
        is_inside = isinstance(schema.get("enum", [0])[0], list)
        values = [given + more for more in (-1, 0, 1)]
        written = [within([{"id": value}] if is_inside else value) for value in values]
        expected = [HOLDS[keyword](value, given) for value in values]
        assert all_allowed(wrap(schema), written) == expected, schema
    assert exact >= 5


def test_numbers_of_annotations_and_floats_beyond_the_limit_are_no_reason_to_refuse():
    assert allows({"type": "integer", "default": 2**70, "examples": [10**400]}, 5)
    float32 = {"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4e38}
    assert allows(float32, 1.5)
    assert "llguidance would change" in refusal({"type": "number", "minimum": 3.4e38})
    assert "llguidance would change" in refusal({"const": 9007199254740994.0 * 1e60})
    assert "least common multiple" in refusal(
        {"allOf": [{"multipleOf": 65536}, {"type": "integer", "multipleOf": 65537}]}
    )
    assert allows({"type": "string", "maxLength": 2**64}, '"a"')


# Keywords without effect.

TEXT = {"type": "string"}
WITHOUT_EFFECT: list[tuple[dict[str, Any], dict[str, Any], list[Any]]] = [
    ({"type": "array", "items": TEXT}, more, [[], ["a", "a"]])
    for more in (
        {"uniqueItems": False},
        {"minContains": 2},
        {"maxContains": 0},
        {"contains": {"type": "integer"}, "minContains": 0},
        {"unevaluatedItems": False},
        {"propertyNames": {"pattern": "^a"}},
        {"minItems": 0},
        {"additionalItems": False},
    )
]
WITHOUT_EFFECT += [
    ({"type": "object", "additionalProperties": {"type": "integer"}}, more, [{}, {"b": 1}])
    for more in (
        {"propertyNames": {"type": "string"}},
        {"propertyNames": True},
        {"propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": {"title": "A name"}}},
        {"unevaluatedProperties": True},
        {"unevaluatedProperties": False},
        {"dependentRequired": {}},
        {"dependentRequired": {"b": []}},
        {"dependentSchemas": {"b": True}},
        {"dependencies": {"b": {}}},
        {"minProperties": 0},
        {"uniqueItems": True},
    )
]
WITHOUT_EFFECT += [
    (TEXT, more, ['""', '"a"'])
    for more in (
        {"if": {"minLength": 3}},
        {"if": {"minLength": 3}, "then": True},
        {"then": False},
        {"else": False},
        {"not": False},
        {"contentEncoding": "base64", "contentMediaType": "text/plain", "contentSchema": False},
        {"$schema": "https://example.org/my-own-draft"},
        {"$dynamicAnchor": "x", "$anchor": "y", "$recursiveAnchor": True},
        {"uniqueItems": True, "multipleOf": 3, "contains": {"type": "null"}},
        {"format": "a format that nobody knows"},
        {"discriminator": {"propertyName": "a"}, "nullable": False, "x-mine": {"not": {}}},
    )
]


@pytest.mark.parametrize("number", range(len(WITHOUT_EFFECT)))
def test_a_keyword_without_effect_changes_nothing(number: int):
    schema, more, values = WITHOUT_EFFECT[number]
    wrap, within = list(NESTS.values())[number % 3]
    if "$defs" in more:
        wrap, within = NESTS["itself"]
    assert refusal(wrap({**schema, **more})) == ""
    for value in values:
        given = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(within(given), separators=(",", ":"))
        assert allows(wrap(schema), text)
        assert allows(wrap({**schema, **more}), text)


def test_a_keyword_with_effect_that_is_not_supported_is_refused_by_name():
    for more in (
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "string"}, "maxContains": 2},
        {"type": "array", "unevaluatedItems": False, "prefixItems": [{}]},
        {"not": {"type": "integer"}},
        {"not": {"multipleOf": 2}},
        {"type": "object", "propertyNames": {"format": "email"}},
    ):
        name = next(each for each in more if each not in ("type", "prefixItems"))
        for wrap, _ in NESTS.values():
            assert f"uses '{name}'" in refusal(wrap(more)), more


def test_names_of_properties_are_restricted_by_lists_patterns_and_lengths():
    numbers = {"type": "object", "additionalProperties": {"type": "integer"}}
    listed = {**numbers, "propertyNames": {"enum": ["a", "b"]}}
    pattern = {**numbers, "propertyNames": {"type": "string", "pattern": "^k[0-9]$"}}
    length = {**numbers, "propertyNames": {"minLength": 2, "maxLength": 3}}
    for schema, good, bad in ((listed, "b", "c"), (pattern, "k1", "k"), (length, "éé", "a")):
        assert allows(schema, {good: 1})
        assert not allows(schema, {bad: 1})
        assert not allows(schema, {good: "x"})


def test_what_depends_on_a_required_property_holds():
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": TEXT},
        "required": ["a"],
        "dependentRequired": {"a": ["b"]},
        "dependentSchemas": {"a": {"properties": {"b": {"maximum": 5}}}},
    }
    for options in ({}, {"disable_additional_properties": True}):
        assert allows(schema, {"a": 1, "b": 2}, **options)
        assert not allows(schema, {"a": 1}, **options)
        assert not allows(schema, {"a": 1, "b": 7}, **options)


def test_patterns_with_look_ahead_at_their_beginning_hold():
    schema = {"type": "string", "pattern": r"^(?=.*[A-Z])(?=[^)]*\d)(?=(a|[A-Z])).{3,5}$"}
    for text, is_good in (
        ("A1b", True),
        ("ab1", False),
        ("Abc", False),
        ("a1B", True),
        ("A1", False),
    ):
        assert (
            allows(schema, json.dumps(text)) == is_good == bool(re.search(schema["pattern"], text))
        )
    assert "look-ahead" in refusal({"type": "string", "pattern": "a(?=b)"})


def test_properties_that_match_a_pattern_follow_both_schemas():
    schema = {
        "type": "object",
        "properties": {"x_a": {"type": "string"}, "b": {"type": "integer"}},
        "patternProperties": {"^x_": {"minLength": 3}},
        "required": ["x_a"],
    }
    for value, is_good in (({"x_a": "abc"}, True), ({"x_a": "ab"}, False)):
        for closed in (False, True):
            assert allows(schema, value, disable_additional_properties=closed) == is_good
    clash = {**schema, "patternProperties": {"^x_": {"type": "integer"}}}
    assert "required property 'x_a' is unsatisfiable" in refusal(clash)


def test_keywords_beside_a_reference_count_since_draft_2019():
    schema = {"properties": {"a": {"$ref": "#/$defs/x", "maximum": 5}}, "$defs": {"x": {}}}
    for draft, is_allowed in (("draft-07", True), ("draft-04", True), ("2019-09", False)):
        old = draft.startswith("draft-0")
        uri = f"http://json-schema.org/{draft}/schema#"
        uri = uri if old else f"https://json-schema.org/draft/{draft}/schema"
        assert allows({"$schema": uri, **schema}, {"a": 7}) == is_allowed
    assert not allows(schema, {"a": 7})


# Formats.

STANDARD_FORMATS: dict[str, tuple[list[str], list[str]]] = {
    "uri-reference": (["", "./a", "/x/y.z", "//h:80/p?q#f", "http://a/b"], ["://", "a b", "%zz"]),
    "iri": (
        ["https://example.com", "http://例え.jp/é?q#x", "urn:a:b"],
        ["not-an-iri", "http://a b"],
    ),
    "iri-reference": (["é/x", "#é", "http://é"], ["://", "\\x"]),
    "uri-template": (["http://x/{a}", "{+p}/h{?x,y*,z:3}", ""], ["{", "x/{", "{a b}", "}"]),
    "json-pointer": (["", "/a/b~1c", "/é"], ["a", "/~2"]),
    "relative-json-pointer": (["0", "1/a", "12#"], ["", "-1", "01"]),
    "regex": (
        ["", "^[a-zA-Z0-9_]{3,16}$", r"^\s*(it|(a|b))\([^']+", "(?:x(y)?)+|z*"],
        ["*", "\\", "(", "a**", "[", "[z-a]", "{1", "a{3,1}"],
    ),
    "idn-hostname": (["example.com"], ["-a-"]),
    "idn-email": (["a.b@example.com"], ["x"]),
}


def test_the_formats_of_the_standard_are_enforced():
    for name, (good, bad) in STANDARD_FORMATS.items():
        schema = {"type": "string", "format": name}
        check = jsonschema_rs.validator_for(schema, validate_formats=True).is_valid
        assert all_allowed(schema, [*good, *bad]) == [check(each) for each in [*good, *bad]]
        assert all(map(check, good)), name


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    friend: Pet | None = None


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
Dog.model_rebuild()


class Owner(BaseModel):
    pet: Pet
    colour: Colour


TYPES: list[Any] = [
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
    *(uuid.UUID, UUID4, IPvAnyAddress, ipaddress.IPv4Address, ipaddress.IPv6Network),
    *(
        pathlib.Path,
        SecretStr,
        bytes,
        dict[Colour, int],
        dict[uuid.UUID, int],
        frozenset[str],
        set[Colour],
    ),
    *(dict[Annotated[str, Text(min_length=2)], int], dict[datetime.date, bool], Owner),
    Annotated[set[int], Field(max_length=1)],
    Annotated[str, Text(pattern="^[^/]+/[^/]+$", max_length=100)],
]


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_pydantic_reads_what_the_schema_of_its_type_allows(kind: Any):
    adapter = TypeAdapter(kind)
    schema = adapter.json_schema()
    found = list(random_texts(schema, 8, disable_additional_properties=True))
    assert len(found) >= 3
    for text in found:
        adapter.validate_json(text)


ZOD: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "email": (
        {
            "format": "email",
            "pattern": r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
            r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        },
        ["a.b@c.de", "a@b-c.d.efg"],
        [".a@c.de", "a..b@c.de", "a.@c.de", "a@c", "a'@c.de"],
    ),
    "duration": (
        {
            "format": "duration",
            "pattern": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
            r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
        },
        ["P3W", "P1Y2M", "PT5M", "P1DT2H"],
        ["P", "PT", "P1YT", "P1W2D"],
    ),
    "hostname": (
        {
            "format": "hostname",
            "pattern": r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
            r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$",
        },
        ["a.b", "x-y.org"],
        ["-a", ""],
    ),
    "emoji": (
        {
            "format": "emoji",
            "pattern": r"^(?=[\s\S]*[\p{Extended_Pictographic}\p{Regional_Indicator}\u20E3])"
            r"[\p{Extended_Pictographic}\p{Emoji_Component}]+$",
        },
        ["😀"],
        ["1", "a"],
    ),
    "starts_with": ({"format": "starts_with", "pattern": "^ab.*"}, ["abc"], ["b"]),
    "date": ({"format": "date"}, ["2024-02-29", "1999-12-31"], ["2023-02-29", "0000-01-01"]),
    "datetime": (
        {"format": "date-time"},
        ["2024-02-29T23:59:59Z", "2023-01-01T00:00:00.5+01:00"],
        ["2023-01-01T00:00:60Z", "2023-01-01t00:00:00Z", "2023-01-01T00:00:00z"],
    ),
    "time": ({"pattern": r"^(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d)?$"}, ["12:30"], ["24:00"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ZOD)
def test_zods_formats_hold(name: str):
    keywords, good, bad = ZOD[name]
    for text in (*good, *bad):
        assert allows({"type": "string", **keywords}, json.dumps(text, ensure_ascii=False)) == (
            text in good
        ), text


def test_zods_records_unions_and_tuples_are_followed():
    record = {"type": "object", "propertyNames": TEXT, "additionalProperties": {"type": "number"}}
    whole = {"$schema": "https://json-schema.org/draft/2020-12/schema", "anyOf": [
        TEXT, {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "propertyNames": TEXT, "additionalProperties": {"$ref": "#"}},
    ]}  # fmt: skip
    assert allows(record, {"a": 1.5, "b": 2})
    assert allows(whole, {"a": ["b", {"c": "d"}]})
    assert not allows(whole, {"a": 1})
    assert "json schema" in refusal({"not": {}})
    pair = {"type": "array", "items": [TEXT, {"type": "number"}], "additionalItems": False}
    assert allows({**pair, "minItems": 2, "maxItems": 2}, ["a", 1])


# Closed objects.


def named(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"} for name in names}, **more}


def test_closed_objects_may_have_the_properties_of_all_schemas_beside_each_other():
    definitions = {"base": named("base", required=["base"]), "tree": named("leaf")}
    definitions["tree"]["properties"]["next"] = {"$ref": "#/$defs/tree"}
    beside = {
        "alone": ({}, {}),
        "all": ({"allOf": [named("x"), {"$ref": "#/$defs/base"}]}, {"x": 2, "base": 1}),
        "any": ({"anyOf": [named("x", required=["x"]), named("y")]}, {"y": 1}),
        "one": ({"oneOf": [named("x", required=["x"]), named("y", required=["y"])]}, {"x": 1}),
        "reference": ({"$ref": "#/$defs/base"}, {"base": 3}),
        "recursive": ({"$ref": "#/$defs/tree"}, {"leaf": 1, "next": {"leaf": 2}}),
        "requirements": ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {}),
        "required": ({"required": ["r"]}, {"r": "?"}),
    }
    for keyword, (more, values) in beside.items():
        schema = {"$defs": definitions, **named("a", "b"), **more}
        good = {"a": 1, "b": 2, **values}
        assert allows(schema, good, disable_additional_properties=True), keyword
        open_too = {**good, "zz": 1}
        assert not allows(schema, open_too, disable_additional_properties=True), keyword
        if keyword == "one":  # two open alternatives can both hold
            assert "cannot be told apart" in refusal(schema)
            continue
        assert allows(schema, open_too), keyword
        said = {**schema, "additionalProperties": True}
        assert allows(said, open_too, disable_additional_properties=True), keyword
    inner = {"leaf": 1, "next": {"leaf": 2, "a": 3}}
    schema = {"$defs": definitions, **named("a"), "$ref": "#/$defs/tree"}
    assert not allows(schema, {"a": 1, **inner}, disable_additional_properties=True)
    one = {"$defs": definitions, **named("a"), **beside["one"][0]}
    assert not allows(one, {"a": 1, "x": 1, "y": 1}, disable_additional_properties=True)


def test_an_object_without_unevaluated_properties_is_closed():
    schema = {"allOf": [named("a")], **named("b"), "unevaluatedProperties": False}
    assert allows(schema, {"a": 1, "b": 2})
    assert not allows(schema, {"a": 1, "b": 2, "c": 3})
    mixed = {"anyOf": [named("a"), named("c")], **named("b"), "unevaluatedProperties": False}
    assert "uses 'unevaluatedProperties'" in refusal(mixed)


SLOW_SEEDS = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 12)]


@pytest.mark.parametrize("seed", [*range(4), *SLOW_SEEDS])
def test_outputs_of_closed_random_schemas_validate_and_have_only_named_properties(seed: int):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    rng = random.Random(seed)

    def schema(depth: int) -> dict[str, Any]:
        made = named(*rng.sample("abcdef", rng.randint(0, 2)))
        if made["properties"] and rng.random() < 0.5:
            made["required"] = [next(iter(made["properties"]))]
        if depth and rng.random() < 0.5:
            made["properties"]["p"] = schema(depth - 1)
        for keyword in rng.sample(["allOf", "anyOf", "$ref"], rng.randint(0, 2)) if depth else ():
            one = f"#/$defs/{rng.choice('st')}"
            many = [schema(depth - 1) for _ in range(rng.randint(1, 2))]
            made[keyword] = one if keyword == "$ref" else many
        return made

    whole = {**schema(2), "$defs": {"s": schema(0), "t": schema(0)}}
    found = [
        json.loads(text) for text in random_texts(whole, 4, disable_additional_properties=True)
    ]
    assert found
    for value in found:
        jsonschema.validate(value, whole)
        left = [value]
        for each in left:
            assert {*each} <= {*"abcdefp"}
            left += [inner for inner in each.values() if isinstance(inner, dict)]


# References and hostile schemas.


def test_references_by_pointer_anchor_and_identifier_are_followed():
    for schema in (
        {"$defs": {"x": {"$anchor": "here", "type": "integer"}}, "$ref": "#here"},
        {"$id": "https://example.org/s", "$defs": {"x": {"type": "integer"}}, "$ref": "s#/$defs/x"},
        {"$defs": {"x": {"$id": "urn:x", "type": "integer"}}, "$ref": "urn:x"},
        {"components": {"a b": [{"type": "integer"}]}, "$ref": "#/components/a%20b/0"},
        {"$recursiveRef": "#/$defs/x", "$defs": {"x": {"type": "integer"}}},
    ):
        assert allows(schema, 7), schema
        assert not allows(schema, '"a"'), schema
    for reference in ("#/$defs/y", "#there", "https://example.org/x", "http://[", 7):
        assert "refers to" in (message := refusal({"$ref": reference})) or "$ref" in message


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": []},
        {"anyOf": {}},
        {"items": 3},
        {"type": "string", "pattern": 3},
        {"format": ["email"]},
        {"minLength": -1},
        {"minItems": "2"},
        {"type": "integer", "minimum": "x"},
        {"multipleOf": 0},
        {"allOf": [[]]},
        {"oneOf": [["x"]]},
        {"propertyNames": {"enum": 5}, "type": "object"},
    ],
    ids=str,
)
def test_malformed_schemas_are_refused(schema: dict[str, Any]):
    assert "structured_outputs has a json schema that" in refusal(schema)


# Places of errors.

PLACES: list[tuple[Any, str]] = [
    (False, "no value is left; see #"),
    ({"properties": {"a": {"items": {"unevaluatedItems": False}}}}, "; see #/properties/a/items"),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"not": {"pattern": "a"}}}}, "; see #/[$]defs/a~1b"),
    ({"anyOf": [TEXT, {"const": 2**64}]}, "has const .*; see #/anyOf/1"),
    ({"items": {"allOf": [{"uniqueItems": True}]}}, "uses 'uniqueItems' .*; see #/items/allOf/0"),
    ({"properties": {"a": 3}}, "must be an object or a boolean; see #$"),
    ({"properties": {"a": {"oneOf": [TEXT, {"pattern": "a"}]}}}, "oneOf .*; see #/properties/a"),
    ({"items": {"$ref": "#/definitions/x"}, "minItems": 1, "definitions": {"x": {
        "type": "object", "required": ["b"], "properties": {"b": {"enum": []}}}}},
        "required property 'b' is unsatisfiable; see #/definitions/x"),
    ({"patternProperties": {"^a/b": {"type": "thing"}}}, "see #/patternProperties/.a~1b"),
    ({"properties": {"a": {"pattern": "a(b"}}}, "regex at column 2 of 'a.b': .*; see #/prop"),
    ({"properties": {"a" * 500: {"not": {"pattern": "a"}}}}, "; see #/properties/a{187}…$"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(PLACES)))
def test_a_refusal_has_the_place_in_the_schema(number: int):
    schema, message = PLACES[number]
    assert re.search(message, refusal(schema)), refusal(schema)


def test_a_list_contains_an_item_among_the_first_in_each_draft():
    for draft in ("draft-07/schema#", "draft/2019-09/schema", "draft/2020-12/schema", "my-own"):
        schema = {
            "$schema": f"https://json-schema.org/{draft}",
            "type": "array",
            "items": {"type": ["integer", "null"]},
            "contains": {"type": "integer"},
        }
        assert allows(schema, [None] * 7 + [1, None])
        assert not allows(schema, [None, None])
        assert not allows(schema, [])
        assert not allows(schema, [1, "a"])


def test_a_boolean_is_a_schema():
    for schema in (True, "true"):
        assert allows(schema, {"a": [1]})
        assert allows(schema, "null")


def test_errors_of_grammars_and_expressions_have_places():
    def refused(**description: str) -> str:
        with pytest.raises(RequestError) as caught:
            grammars().start(StructuredOutputsParams(**description))  # type: ignore[arg-type]
        return str(caught.value)

    assert "line 1, column 8: unknown name" in refused(grammar="start: x")
    below = 'start: %json {\n "type": "null"\n} b\nb: x'
    assert "line 4, column 4: unknown name" in refused(grammar=below)
    assert "line 2, column 4: invalid regex at column 2 of" in refused(grammar="start: A\nA: /a(b/")
    schema = 'start: "a" x\nx: %json {"items": {"not": {"pattern": "a"}}}'
    assert "; see #/items of the JSON schema at line 2, column 10" in refused(grammar=schema)
    expression = refused(regex="ab{3,1}")
    assert "invalid regex at column 3 of 'ab{3,1}': invalid repetition" in expression
    assert "line" not in expression
