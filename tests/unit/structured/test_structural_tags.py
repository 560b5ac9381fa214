"""Check which texts structural tags allow, in both published forms, and which tags are refused.

The facts are those that XGrammar's documentation and tests state.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from mie import LLM, SamplingParams, StructuredOutputsParams
from mie.errors import RequestError
from mie.structured.grammars import Grammars

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

EOS, VOCAB_SIZE = 1, 2048


@cache
def bundled() -> LLM:
    return LLM("bundled", num_threads=1)


def tokenizer() -> Any:
    return bundled().tokenizer


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), VOCAB_SIZE, [EOS])


def start(tag: Any, **options: Any) -> Any:
    return grammars().start(StructuredOutputsParams(structural_tag=json.dumps(tag), **options))


def allows(tag: Any, text: str | list[int], **options: Any) -> bool:
    """Return whether a text, or a list of tokens, is a whole answer."""
    ids = tokenizer().encode(text, add_special_tokens=False) if isinstance(text, str) else text
    return start(tag, **options).validate([*ids, EOS]) == len(ids) + 1


def tag_of(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def token(token_id: int) -> dict[str, Any]:
    return {"type": "token", "token": token_id}


ANY: dict[str, Any] = {"type": "any_text"}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
OSLO = '{"city":"Oslo"}'
JSON = {"type": "json_schema", "json_schema": CITY}
CALLS = [tag_of("<f=a>", text("1"), "</f>"), tag_of("<f=b>", text("2"), "</f>")]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": CALLS}
SEPARATED = {"type": "tags_with_separator", "tags": CALLS, "separator": ","}
DISPATCH = {"type": "dispatch", "rules": [["<a>", text("1")], ["<b>", text("2")]]}

# The format, texts that it allows, and texts that it does not.
FACTS: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a constant": (text("Hello!"), ["Hello!"], ["Hello", "Hello!!", ""]),
    "a schema": (JSON, [OSLO], ['{"city":"Bonn"}', "{}", f"{OSLO}x"]),
    "a pattern": (
        {"type": "regex", "pattern": "[A-Z]{3}/[0-9]{4}"},
        ["ABC/1234"],
        ["AB/1234", "ABC/12345"],
    ),
    "GBNF": ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, ["yes", "no"], ["yesno"]),
    "Lark": ({"type": "grammar", "grammar": 'start: "a"+ "b"'}, ["ab", "aab"], ["b"]),
    "any text": (ANY, ["", "all\nof <it>"], []),
    "any text but": ({**ANY, "excludes": ["<x>", "no"]}, ["a <x", "n o"], ["a <x> b", "snow"]),
    "few characters": ({**ANY, "max_chars": 3}, ["", "äöü"], ["äöüß"]),
    "a sequence": (sequence(text("A: "), JSON), [f"A: {OSLO}"], ["A: ", OSLO]),
    "text and its end": (sequence(ANY, text("!"), text("?")), ["a!?", "!?"], ["a!b!?", "a?"]),
    "an empty sequence": (sequence(), [""], ["a"]),
    "alternatives": (
        {"type": "or", "elements": [text("yes"), JSON, text("yesterday")]},
        ["yes", OSLO],
        ["yesyes", ""],
    ),
    "constants": (
        {"type": "or", "elements": [text("yes"), text("yesterday")]},
        ["yes", "yesterday"],
        ["yester"],
    ),
    "perhaps": ({"type": "optional", "content": text("a")}, ["", "a"], ["aa"]),
    "once or more": ({"type": "plus", "content": text("ab")}, ["ab", "abab"], ["", "aba"]),
    "any number": ({"type": "star", "content": text("ab")}, ["", "ab", "abab"], ["aba"]),
    "two or three": (
        {"type": "repeat", "min": 2, "max": 3, "content": text("a")},
        ["aa", "aaa"],
        ["a", "aaaa"],
    ),
    "two or more": (
        {"type": "repeat", "min": 2, "max": -1, "content": text("a")},
        ["aa", "aaaaaaaa"],
        ["a"],
    ),
    "a tag": (tag_of("<t>", JSON, "</t>"), [f"<t>{OSLO}</t>"], [f"<t>{OSLO}", f"<t>{OSLO}</t>a"]),
    "a tag of text": (tag_of("<t>", ANY, "</t>"), ["<t>a</t>", "<t></t>"], ["<t>", "<t></t>a"]),
    "two ends": (tag_of("<t>", ANY, ["</t>", "!"]), ["<t>a</t>", "<t>a!"], ["<t>a!</t>"]),
    "perhaps an end": (tag_of("<t>", text("a"), ["</t>", ""]), ["<t>a", "<t>a</t>"], ["<t>"]),
    "text with tags": (
        TRIGGERED,
        ["", "none", "<f=a>1</f>", "x <f=a>1</f> <f <f=b>2</f> y"],
        ["<f=", "<f=c>", "x <f=a>2</f>", "<f=a>1"],
    ),
    "a tag at first": (
        {**TRIGGERED, "at_least_one": True},
        ["<f=a>1</f>", "<f=a>1</f> and <f=b>2</f>."],
        ["", "none", "x <f=a>1</f>"],
    ),
    "one tag at most": (
        {**TRIGGERED, "stop_after_first": True},
        ["none", "x <f=a>1</f>"],
        ["<f=a>1</f> x", "<f=a>1</f><f=b>2</f>"],
    ),
    "one tag": (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        ["<f=a>1</f>", "<f=b>2</f>"],
        ["", "x", "x <f=a>1</f>", "<f=a>1</f> x"],
    ),
    "text with tags but": (
        {**TRIGGERED, "excludes": ["no"]},
        ["x <f=a>1</f> y"],
        ["no", "no <f=a>1</f>", "<f=a>1</f> no"],
    ),
    "text with tags in a tag": (
        tag_of("<t>", TRIGGERED, "</t>"),
        ["<t></t>", "<t>x <f=a>1</f> y</t>"],
        ["<t>x <f=c>", "<t><f=a>1</f>", "<t></t>x"],
    ),
    "one tag in a tag": (
        tag_of("<t>", {**TRIGGERED, "stop_after_first": True}, "</t>"),
        ["<t>x</t>", "<t>x <f=a>1</f></t>"],
        ["<t>x <f=a>1</f> y</t>"],
    ),
    "tags between commas": (
        SEPARATED,
        ["", "<f=a>1</f>", "<f=a>1</f>,<f=b>2</f>"],
        ["x", ",", "<f=a>1</f>,", "<f=a>1</f><f=b>2</f>"],
    ),
    "tags between commas, one at least": (
        {**SEPARATED, "at_least_one": True},
        ["<f=a>1</f>"],
        [""],
    ),
    "tags between commas, one at most": (
        {**SEPARATED, "stop_after_first": True},
        ["", "<f=a>1</f>"],
        ["<f=a>1</f>,<f=b>2</f>"],
    ),
    "tags in a row": (
        {**SEPARATED, "separator": ""},
        ["", "<f=a>1</f><f=b>2</f>"],
        ["<f=a>1</f>,<f=b>2</f>"],
    ),
    "dispatch": (DISPATCH, ["", "x<a>1y<b>2", "<a>1<a>1"], ["<a>2", "<b>"]),
    "dispatch once": ({**DISPATCH, "loop": False}, ["x", "x<a>1"], ["x<a>1y"]),
    "thinking": (
        sequence(tag_of("<think>", ANY, "</think>"), TRIGGERED),
        ["<think>\nHm <f=c></think>\n<f=a>1</f>", "<think></think>"],
        ["<f=a>1</f>", "<think>Hm", "<think>Hm</think><f=c>"],
    ),
    "tokens": (sequence(token(300), token(301)), [], ["", "a"]),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_tag_allows_what_its_format_says(name: str):
    form, allowed, others = FACTS[name]
    tag = {"type": "structural_tag", "format": form}
    assert [each for each in allowed if not allows(tag, each)] == []
    assert [each for each in others if allows(tag, each)] == []


def test_the_older_form_has_structures_and_triggers():
    tag = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<f=a>", "schema": CITY, "end": "</f>"},
            {"begin": "<f=b>", "schema": True, "end": "</f>"},
        ],
        "triggers": ["<f="],
    }
    assert allows(tag, f"See <f=a>{OSLO}</f>, and <f=b>[1]</f>.")
    assert allows(tag, "no call")
    assert not allows(tag, "<f=a>{}</f>")
    assert not allows(tag, "<f=c>")
    del tag["type"]
    assert allows(tag, f"<f=a>{OSLO}</f>")


def test_tokens_begin_and_end_regions():
    a, b, c = 300, 301, 302
    between = {"format": tag_of(token(a), {"type": "any_tokens"}, token(b))}
    assert allows(between, [a, 500, c, b])
    assert not allows(between, [a, b, b])
    few = {"format": {"type": "any_tokens", "exclude_tokens": [a], "max_tokens": 2}}
    assert allows(few, [b, c])
    assert not allows(few, [b, c, b])
    assert not allows(few, [a])
    assert allows({"format": {"type": "exclude_token", "exclude_tokens": [a]}}, [b])
    assert not allows({"format": {"type": "exclude_token", "exclude_tokens": [a]}}, [a])
    digit = tokenizer().encode("7", add_special_tokens=False)
    region = {
        "type": "token_triggered_tags",
        "trigger_tokens": [a],
        "tags": [tag_of(token(a), {"type": "regex", "pattern": "[0-9]"}, token(b))],
        "exclude_tokens": [c],
    }
    assert allows({"format": region}, [500, a, *digit, b, 500])
    assert not allows({"format": region}, [c])
    assert not allows({"format": region}, [a, 500])
    pairs = {"type": "token_dispatch", "rules": [[a, token(b)]], "loop": False}
    assert allows({"format": pairs}, [500, a, b])
    assert not allows({"format": pairs}, [a, c])


def test_options_hold_for_every_schema_unless_it_has_its_own():
    tag = {"format": JSON}
    spaced, more = '{"city": "Oslo"}', '{"city":"Oslo","x":1}'
    assert [allows(tag, each) for each in (OSLO, spaced, more)] == [True, False, True]
    closed = {"disable_additional_properties": True}
    assert not allows(tag, more, **closed)
    own = {"format": {**JSON, "disable_any_whitespace": False, **closed}}
    assert [allows(own, each) for each in (OSLO, spaced, more)] == [True, True, False]


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": ({}, "structures must be a list; got None"),
    "no type": ({"format": {}}, "format must be an object with a type; got {}"),
    "another type": (
        {"format": sequence(text("a"), {"type": "xml"})},
        "format.elements[1].type 'xml' is not supported",
    ),
    "another field": ({"format": {**ANY, "min": 1}}, "format.min is not supported in any_text"),
    "a style": (
        {"format": tag_of("a", {**JSON, "style": "qwen_xml"}, "b")},
        "format.content.style 'qwen_xml' is not supported",
    ),
    "no end": (
        {"format": sequence(ANY, JSON)},
        "format.elements[0] has no end (put it into a tag, or before a const_string)",
    ),
    "text again and again": ({"format": {"type": "star", "content": ANY}}, "has no end"),
    "no trigger": (
        {"format": {**TRIGGERED, "triggers": ["<g"]}},
        "format.tags[0].begin must begin with exactly one of the triggers; got '<f=a>'",
    ),
    "two triggers": ({"format": {**TRIGGERED, "triggers": ["<", "<f"]}}, "exactly one of the"),
    "a name of a token": (
        {"format": {"type": "token", "token": "<a>"}},
        "format must be the id of a token; got '<a>'",
    ),
    "a text after tokens": (
        {"format": tag_of("a", {"type": "any_tokens"}, "b")},
        "format.content must end at a token; a text cannot end tokens (write any_text)",
    ),
    "a budget inside": (
        {"format": sequence(tag_of("a", ANY, "b"), tag_of("b", {**ANY, "max_tokens": 3}, "c"))},
        "format.elements[1].content.max_tokens is supported in a tag at the beginning only",
    ),
    "a budget without an end": (
        {"format": tag_of("b", {**ANY, "max_tokens": 3}, "")},
        "format.content.max_tokens is supported in a tag at the beginning only, and with one end",
    ),
    "a budget with two ends": (
        {"format": tag_of("b", {**ANY, "max_tokens": 3}, ["c", "d"])},
        "and with one end",
    ),
    "no range": (
        {"format": {"type": "repeat", "min": 3, "max": 2, "content": ANY}},
        "format needs min, and max, which is -1 or at least min",
    ),
    "a schema": (
        {"format": {"type": "json_schema", "json_schema": {"uniqueItems": True, "type": "array"}}},
        "uniqueItems",
    ),
    "a pattern": ({"format": {"type": "regex", "pattern": "("}}, "invalid regex"),
    "no alternatives": ({"format": {"type": "or", "elements": []}}, "format.elements is empty"),
    "a count": ({"format": {**ANY, "max_chars": -1}}, "format.max_chars must be a count; got -1"),
    "a switch": (
        {"format": {**TRIGGERED, "at_least_one": 1.5}},
        "format.at_least_one must be true or false; got 1.5",
    ),
    "a structure": ({"structures": [{"begin": "a"}]}, "structures[0] must have begin, schema and"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_its_place(name: str):
    tag, message = REFUSED[name]
    with pytest.raises(RequestError, match=re.escape(message)) as error:
        start(tag)
    assert str(error.value).startswith("structured_outputs has a structural_tag that ")


# The number of tokens in a tag at the beginning.


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("budget", [0, 1, 7])
def test_the_tokens_of_a_first_tag_are_limited(budget: int, seed: int):
    llm = bundled()
    thought = {**ANY, "max_tokens": budget}
    tag = {"format": sequence(tag_of("<think>", thought, "</think>"), JSON)}
    params = SamplingParams(
        temperature=1000.0,
        seed=seed,
        max_tokens=200,
        structured_outputs={"structural_tag": tag, "disable_additional_properties": True},
    )
    [output] = llm.generate("Once", params, use_tqdm=False)
    [choice] = output.outputs
    opening, closing = (
        llm.tokenizer.encode(each, add_special_tokens=False) for each in ("<think>", "</think>")
    )
    place = len(opening) + budget
    found = re.fullmatch(r"(?s)<think>(.*)</think>(\{.*\})", choice.text)
    assert found is not None
    assert json.loads(found[2])["city"] in ("Oslo", "Rome")
    ended = llm.tokenizer.decode(choice.token_ids[: place + len(closing)])
    # A character that the budget would cut is finished first.
    assert "</think>" in ended or "\ufffd" in llm.tokenizer.decode(choice.token_ids[:place])
