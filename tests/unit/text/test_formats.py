"""Check each format of calls by answers in it, and by the published chat templates.

The answers retell the cases of published parsers, mostly the common cases of vLLM's: one call and
several, values of all types, no arguments, text around calls, quotes, line breaks, other tools, and
calls that are cut or malformed. They were written without code of mie.
"""

import json
import os
import random
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from mie.errors import RequestError
from mie.text.tools.forced import new_parser
from mie.text.tools.formats import HARMONY, AnswerFormat
from mie.text.tools.table import CALLS, REASONING, call_format, reasoning_tags, writes_tools
from scripts.scoreboard.inputs import read_table
from scripts.scoreboard.suites._reference_templates import render

FACTS = json.loads((Path(__file__).parents[2] / "data/tool_answers.json").read_text("utf-8"))
DISTINCT = {form: name for name, form in reversed(CALLS.items()) if form != HARMONY}
BARE = ("pythonic", "xlam", "glm4")
"""Formats in which a call begins the answer, because it has no tag."""

Found = tuple[str, str, list[Any]]


def read(form: AnswerFormat, *pieces: str) -> Found:
    """Read an answer in pieces; return reasoning, text and calls."""
    parser = new_parser(form, "key")
    for piece in pieces:
        parser.add(piece)
    parser.finish()
    calls = [[call.name, json.loads(call.arguments)] for call in parser.calls]
    return parser.reasoning, parser.content, calls


def form_of(name: str) -> AnswerFormat:
    tools, tags = FACTS["tools"], REASONING["qwen3"]
    return AnswerFormat(reasoning=tags, calls=CALLS[name], names=frozenset(tools), schemas=tools)


def facts_of(name: str) -> Iterator[tuple[str, Found]]:
    """Yield answers in a format, and the parts that they have."""
    for text, story in zip(FACTS["answers"][name], FACTS["stories"], strict=True):
        found = (story.get("reasoning", ""), story.get("content", ""), story["calls"])
        is_text = name in BARE and found[1]
        yield text, ("", text, []) if is_text else found
    for text, content, calls in FACTS["more"][name]:
        reasoning = "Hm." if text.startswith("<think>") else ""
        yield text, (reasoning, content, calls)


def test_each_format_has_twenty_facts_or_more():
    assert {CALLS[name] for name in FACTS["answers"]} == {*DISTINCT}
    assert len(DISTINCT) >= 40
    for name in FACTS["answers"]:
        assert len({text for text, _ in facts_of(name)}) >= 20


@pytest.mark.parametrize("name", FACTS["answers"])
def test_answers_are_read(name: str):
    form, numbers = form_of(name), random.Random(5)
    for text, expected in facts_of(name):
        assert read(form, text) == expected, text
        assert read(form, *text) == expected, text
        places = [0, *sorted(numbers.choices(range(len(text)), k=3)), len(text)]
        assert read(form, *(text[a:b] for a, b in pairwise(places))) == expected, text


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTS["answers"])
def test_answers_are_read_however_they_are_cut(name: str):
    form = form_of(name)
    for text, expected in facts_of(name):
        for place in range(1, len(text)):
            assert read(form, text[:place], text[place:]) == expected, (text, place)
        for size in range(2, 40):
            pieces = [text[place : place + size] for place in range(0, len(text), size)]
            assert read(form, *pieces) == expected, (text, size)


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTS["answers"])
def test_a_cut_answer_has_only_calls_of_the_whole_one(name: str):
    form = form_of(name)
    for text, (_, _, calls) in facts_of(name):
        for place in range(len(text)):
            found = read(form, text[:place])[2]
            assert found == calls[: len(found)], (text, place)


# Published chat templates

DATA = Path(
    os.environ.get("MIE_SCOREBOARD_DATA", Path(__file__).parents[3] / "build/scoreboard/data")
)
TEMPLATES = [name for name in read_table() if name.startswith("templates/")]
UNREAD = ("templates/meetkai-functionary-medium-v3.2.jinja",)
SCHEMA = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "where"},
        "days": {"type": "integer", "description": "how many"},
        "sunny": {"type": "boolean", "description": "if it is"},
        "list": {"type": "array", "items": {"type": "integer"}, "description": "numbers"},
        "at": {"type": "object", "description": "more"},
    },
    "required": ["place"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": SCHEMA}}
    for name in ("weather", "again")
]
ASKED = [
    [
        "weather",
        {
            "place": "a 'b' \"c\"\nd <e> é",
            "days": 1,
            "sunny": True,
            "list": [1, 2],
            "at": {"k": "v"},
        },
    ],
    ["again", {"place": "x"}],
]


def calling(calls: list[Any], *, are_objects: bool) -> dict[str, Any]:
    """Return a message with calls. Some templates take arguments as objects, others as text."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": f"abcdefg{place:02}",
                "type": "function",
                "function": {
                    "name": name,
                    "arguments": arguments if are_objects else json.dumps(arguments),
                },
            }
            for place, (name, arguments) in enumerate(calls)
        ],
    }


def written_by(source: str, calls: list[Any], *, are_objects: bool) -> str:
    """Return the calls as a template writes them."""
    user, tools = [{"role": "user", "content": "Where?"}], {"tools": TOOLS, "bos_token": "<s>"}
    tools |= {"eos_token": "</s>"}
    before = render(source, user, add_generation_prompt=True, **tools)
    messages = [*user, calling(calls, are_objects=are_objects)]
    text = render(source, messages, add_generation_prompt=False, **tools)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(text, before, strict=False))
    place = len(list(same))
    # The prompt may end with another tag than the calls begin with.
    return text[place if place == len(before) else text.rfind("<", 0, place + 1) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_that_a_published_template_writes_come_back(name: str):
    path = DATA / name
    if not path.exists():
        pytest.skip("the published templates are not here: set MIE_SCOREBOARD_DATA")
    source = path.read_text("utf-8")
    if not writes_tools(source):
        pytest.skip("the template writes no tools")
    if name in UNREAD:
        with pytest.raises(RequestError, match="have a format that is not known"):
            call_format("auto", source, None)
        return
    form = AnswerFormat(
        reasoning=reasoning_tags("auto", source, None),
        calls=call_format("auto", source, None),
        names=frozenset({"weather", "again"}),
        schemas={"weather": SCHEMA, "again": SCHEMA},
    )
    found, problems = [], []
    for calls in (ASKED, ASKED[:1]):  # some templates write one call only
        for are_objects in (True, False):
            try:
                text = written_by(source, calls, are_objects=are_objects)
            except Exception as error:
                problems.append(str(error))
                continue
            if "weather" in text:
                found.append((read(form, text)[2], calls, text))
    if not found:
        pytest.skip(f"the template writes no calls: {[*problems, 'no error'][0]}")
    assert any(calls == asked for calls, asked, _ in found), found
