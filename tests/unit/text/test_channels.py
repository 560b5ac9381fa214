"""Check how harmony's messages are read: examples of openai/harmony and llama.cpp, and any text."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mie.text.chat import ChatTemplates
from mie.text.template_files import TemplateFiles
from mie.text.tools.channels import unfinished_header
from mie.text.tools.forced import new_parser
from mie.text.tools.formats import ANALYSIS, FINAL, HARMONY, AnswerFormat

TOOLS = frozenset({"get_weather", "edit"})
FORM = AnswerFormat(reasoning=ANALYSIS, calls=HARMONY, names=TOOLS)


def read(form: AnswerFormat, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]], int]:
    parser = new_parser(form, "key")
    for piece in pieces:
        parser.add(piece)
    parser.finish()
    calls = [(call.name, json.loads(call.arguments)) for call in parser.calls]
    return parser.reasoning, parser.content, calls, parser.num_unparsed


def reply(channel: str, text: str) -> str:
    return f"<|start|>assistant<|channel|>{channel}<|message|>{text}"


THOUGHT = "<|channel|>analysis<|message|>I'm\nthinking<|end|>"
WEATHER = '{"location": "San Francisco"}'
CALL = ("get_weather", {"location": "San Francisco"})
PYTHON = "<|channel|>commentary to=python <|constrain|>code<|message|>print(1)"
ANSWERS: dict[str, tuple[str, tuple[str, str, list[Any], int]]] = {
    "an answer": (
        '<|channel|>analysis<|message|>User asks: "2 + 2?" Simple.<|end|>'
        "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
        ('User asks: "2 + 2?" Simple.', "2 + 2 = 4.", [], 0),
    ),
    "only an answer": ("<|channel|>final<|message|>Hi,\nyou ", ("", "Hi,\nyou ", [], 0)),
    "a preamble": ("<|channel|>commentary<|message|>Hi!", ("", "Hi!", [], 0)),
    "a cut thought": ("<|channel|>analysis<|message|>I'm\nth", ("I'm\nth", "", [], 0)),
    "a cut header": (THOUGHT + "<|start|>assistant<|channel|>fi", ("I'm\nthinking", "", [], 0)),
    "a call": (
        f"{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{WEATHER}<|call|>",
        ("I'm\nthinking", "", [CALL], 0),
    ),
    "a call whose role has the recipient": (
        f"{THOUGHT}<|start|>assistant to=functions.get_weather<|channel|>commentary json"
        f"<|message|>{WEATHER}",
        ("I'm\nthinking", "", [CALL], 0),
    ),
    "a call at once": (
        f" to=functions.get_weather<|channel|>analysis <|constrain|>json<|message|>{WEATHER}",
        ("", "", [CALL], 0),
    ),
    "a call in the analysis": (
        f"<|channel|>analysis to=functions.get_weather<|message|>{WEATHER}<|call|>",
        ("", "", [CALL], 0),
    ),
    "a plan and two calls": (
        THOUGHT
        + reply("commentary", "**Action plan**:\n1. Edit<|end|>")
        + reply("commentary to=functions.edit<|constrain|>json", "{}<|call|>")
        + reply("commentary to=functions.get_weather", f"{WEATHER}<|end|>")
        + reply("final", "Done."),
        ("I'm\nthinking", "**Action plan**:\n1. Edit\nDone.", [("edit", {}), CALL], 0),
    ),
    "two thoughts": (THOUGHT + reply("analysis", "More."), ("I'm\nthinking\nMore.", "", [], 0)),
    "a stray channel": (
        "<|channel|>commentary to=assistant" + THOUGHT + reply("final", "Hi"),
        ("I'm\nthinking", "Hi", [], 0),
    ),
    "braces in text": (
        '<|channel|>commentary to=functions.edit <|constrain|>json<|message|>{"old": "if (a < b) {'
        '"}<|call|>',
        ("", "", [("edit", {"old": "if (a < b) {"})], 0),
    ),
    "JSON as the answer": (
        THOUGHT + reply("final <|constrain|>json", '{"amount": 123.45}'),
        ("I'm\nthinking", '{"amount": 123.45}', [], 0),
    ),
    "a built-in tool in the analysis": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        ("print(1)", "", [], 0),
    ),
    "an unknown tool": (f"{PYTHON}<|call|>", ("", f"{PYTHON}<|call|>", [], 1)),
    "a cut call": (
        '<|channel|>commentary to=functions.edit<|message|>{"old',
        ("", '<|channel|>commentary to=functions.edit<|message|>{"old', [], 1),
    ),
    "arguments that are no object": (
        "<|channel|>commentary to=functions.edit<|message|>[NaN]<|call|>",
        ("", "<|channel|>commentary to=functions.edit<|message|>[NaN]<|call|>", [], 1),
    ),
    "no header": ("  Hi <|start", ("", "  Hi <|start", [], 0)),
    "words like a header": ("to=1", ("", "to=1", [], 0)),
    "a long header": ("<|channel|>" + "x" * 300, ("", "<|channel|>" + "x" * 300, [], 0)),
}


@pytest.mark.parametrize(("text", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_answers_are_read_however_they_are_cut(text: str, expected: Any):
    assert read(FORM, [text]) == expected
    assert read(FORM, list(text)) == expected
    for cut in range(1, len(text)):
        assert read(FORM, [text[:cut], text[cut:]]) == expected


FRAGMENTS = [
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    *("<|return|>", "assistant", "analysis", "final", "commentary", " to=functions.edit", "json"),
    *("to=python", '{"a": 1}', "{}", "{", "<|", "<", " ", "\n", "text", "é🦊", "x" * 130),
    *(
        "<|channel|>analysis<|message|>",
        FINAL,
        "<|channel|>commentary to=functions.edit<|message|>",
    ),
]


@settings(max_examples=80)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=14),
    cuts=st.lists(st.integers(0, 600)),
    reasoning=st.sampled_from([ANALYSIS, None]),
    more=st.booleans(),
)
def test_how_messages_are_cut_changes_nothing_and_calls_are_those_of_tools(
    fragments: list[str], cuts: list[int], reasoning: Any, more: bool
):
    form = AnswerFormat(
        reasoning=reasoning, calls=HARMONY, names=TOOLS, most_calls=None if more else 1
    )
    text = "".join(fragments)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    found = read(form, [text])
    assert read(form, [text[a:b] for a, b in pairwise(places)]) == found
    assert read(form, list(text)) == found
    assert all(name == "edit" and isinstance(value, dict) for name, value in found[2])
    assert more or len(found[2]) <= 1


def test_analysis_stays_text_without_a_parser_of_reasoning():
    form = AnswerFormat(calls=HARMONY, names=TOOLS)
    assert read(form, [THOUGHT + reply("final", "Hi")]) == ("", f"{THOUGHT}\nHi", [], 0)


def test_at_most_one_call_without_parallel_calls():
    call = reply("commentary to=functions.edit", "{}<|end|>")
    form = AnswerFormat(reasoning=ANALYSIS, calls=HARMONY, names=TOOLS, most_calls=1)
    assert read(form, [call + call]) == ("", call, [("edit", {})], 1)


@pytest.mark.parametrize(
    ("prompt", "header"),
    [
        ("<|start|>user<|message|>Hi<|end|><|start|>assistant", ""),
        (f"<|start|>assistant{FINAL}Hi<|return|>", ""),
        (f"<|start|>assistant{FINAL}a<|end|><|start|>user<|message|>b<|end|>", ""),
        (f"<|start|>assistant{FINAL}Hello, wor", FINAL),
        (f"<|start|>assistant{ANALYSIS.open}", ANALYSIS.open),
    ],
)
def test_an_answer_continues_the_message_that_the_prompt_ends_in(prompt: str, header: str):
    assert unfinished_header(prompt) == header
    form = AnswerFormat(reasoning=ANALYSIS, begins_with=header)
    text = "ld!<|end|>" + reply("final", "So.")
    reasoning, content, _, _ = read(form, [text])
    assert (reasoning, content) == (("ld!", "So.") if header == ANALYSIS.open else ("", "ld!\nSo."))


TEMPLATE = """\
{%- macro message(header, text, end="<|end|>") -%}
    {{- "<|start|>" + header + "<|message|>" + text + end -}}
{%- endmacro -%}
{{- message("system", "Date: " + strftime_now("%Y")|length|string + " " + reasoning_effort) -}}
{%- for each in messages -%}
    {%- if each.role == "user" -%}
        {{- message("user", each.content) -}}
    {%- elif each.role == "tool" -%}
        {{- message("functions.edit to=assistant<|channel|>commentary", each.content|tojson) -}}
    {%- elif "tool_calls" in each -%}
        {%- if "content" in each and ("x" in each.content or each.thinking) -%}
            {{- raise_exception("both") -}}
        {%- endif -%}
        {%- set later = namespace(found=false) -%}
        {%- for other in messages[loop.index:] if other.role == "assistant" -%}
            {%- set later.found = "tool_calls" not in other -%}
        {%- endfor -%}
        {%- if each.thinking and not later.found -%}
            {{- message("assistant<|channel|>analysis", each.thinking) -}}
        {%- endif -%}
        {%- set call = each.tool_calls[0].function -%}
        {%- set header = "assistant to=functions." + call.name + "<|channel|>commentary json" -%}
        {{- message(header, call.arguments|tojson, "<|call|>") -}}
    {%- else -%}
        {{- message("assistant<|channel|>final", each.content) -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}{#- tools -#}
"""
"""The parts of gpt-oss' template that conversations meet, in the order of that template."""


def test_a_conversation_goes_back_into_the_prompt_as_the_template_takes_it():
    """The analysis before a call is there until an answer ends the turn."""
    chats = ChatTemplates(TemplateFiles(Path()))
    answer = f"{THOUGHT}{reply('commentary', 'I edit.<|end|>')}" + reply(
        "commentary to=functions.edit", '{"a": 1}<|call|>'
    )
    parser = new_parser(FORM, "key")
    parser.add(answer)
    asked = {"role": "user", "content": "Hi"}
    calls = [call.as_message() for call in parser.calls]
    called = {"role": "assistant", "content": parser.content, "reasoning": parser.reasoning}
    result = {"role": "tool", "content": "ok", "tool_call_id": calls[0]["id"]}
    turn = [asked, {**called, "tool_calls": calls}, result]
    start = "<|start|>system<|message|>Date: 4 high<|end|><|start|>user<|message|>Hi<|end|>"
    call = (
        '<|start|>assistant to=functions.edit<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    )
    end = '<|start|>functions.edit to=assistant<|channel|>commentary<|message|>"ok"<|end|>'
    more: dict[str, Any] = {
        "chat_template": TEMPLATE,
        "chat_template_kwargs": {"reasoning_effort": "high"},
    }
    assert chats.render(turn, **more) == (
        f"{start}<|start|>assistant{THOUGHT}{call}{end}<|start|>assistant"
    )
    final = {"role": "assistant", "content": "Done.", "reasoning": "Well."}
    assert chats.render([*turn, final, asked], **more).startswith(
        f"{start}{call}{end}{reply('final', 'Done.')}<|end|><|start|>user"
    )
    without = {"role": "assistant", "content": None, "tool_calls": calls}
    assert chats.render([asked, without], **more) == f"{start}{call}<|start|>assistant"
    chats.close()
