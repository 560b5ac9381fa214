"""Check custom tools: the input follows a grammar in every format of calls."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
from accepted_texts import accepts
from hypothesis import given
from hypothesis import strategies as st

from mie import LLM, CompletionOutput, SamplingParams
from mie.errors import RequestError
from mie.text.tools.answer_parts import parts_of
from mie.text.tools.definitions import ToolCall, as_functions, input_of, tool_choice_of
from mie.text.tools.formats import AnswerFormat
from mie.text.tools.quoted import quoted_lark
from mie.text.tools.table import CALLS
from mie.text.tools.written import literals_of

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

SUMS = """
start: term (SP ADD SP term){0,2}
term: INT -> number
SP: " "
ADD: "+"
INT: /[0-9]{1,3}/
"""
SAYS = r"""
start: "say " STRING WS "\n"
STRING: "\"" LETTER{1,3} "\""
LETTER: /[^"\\\x00-\x1f]/ | "\\" /["\\n]/
WS: /[ \t]{1,2}/
"""
GRAMMARS = {
    "sums": ("lark", SUMS, r"\d{1,3}( \+ \d{1,3}){0,2}"),
    "says": ("lark", SAYS, r'say "([^"\\\x00-\x1f]|\\["\\n]){1,3}"[ \t]{1,2}\n'),
    "regex": ("regex", '[0-9]{2}/"[a-c]{1,3}', '[0-9]{2}/"[a-c]{1,3}'),
}
DISTINCT = [*{form: name for name, form in reversed(CALLS.items())}.values()]
FEW = ("hermes", "pythonic", "qwen3_coder", "gemma4", "openai")


def custom(syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition}
    return {
        "type": "custom",
        "custom": {"name": "run", "format": {"type": "grammar", "grammar": grammar}},
    }


@cache
def bundled() -> LLM:
    return LLM("bundled", num_threads=1)


def called(form: str, tool: Any, choice: Any, begun: str = "", seed: int = 1) -> CompletionOutput:
    """Return an answer in a format of calls. It may begin with a text."""
    llm = bundled()
    chosen = tool_choice_of([tool], choice, False)
    assert chosen is not None
    answer = AnswerFormat(
        calls=CALLS[form],
        names=chosen.names,
        customs=chosen.customs,
        schemas=chosen.schemas,
        most_calls=1,
    )
    parts = parts_of(answer, chosen, lambda text: None, "<|start|>assistant")
    prompt = {"prompt": "Once", "answer": AnswerFormat(**{**vars(answer), "parts": parts})}
    params = SamplingParams(
        temperature=1000.0,
        seed=seed,
        max_tokens=300,
        trace_decode_token_ids=llm.tokenizer.encode(begun, add_special_tokens=False) or None,
    )
    [output] = llm.generate([prompt], params, use_tqdm=False)
    return output.outputs[0]


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in DISTINCT]
)
def test_the_input_follows_the_grammar_in_every_format(form: str, grammar: str):
    syntax, definition, pattern = GRAMMARS[grammar]
    tool = custom(syntax, definition)
    literals = literals_of(CALLS[form])
    begin = f"{literals.begin}run{literals.middle}"
    for choice, begun in (("required", ""), ("auto", begin)):
        answer = called(form, tool, choice, begun)
        assert answer.finish_reason == "stop"
        [call] = answer.tool_calls or ()
        text = call.input
        if grammar == "says" and CALLS[form].parameters and not CALLS[form].parameters.quotes:
            text = text.rstrip("\n") + "\n"  # a newline before a tag belongs to the tag
        assert re.fullmatch(pattern, text)
        assert call.as_message() == {
            "id": call.id,
            "type": "custom",
            "custom": {"name": "run", "input": call.input},
        }


def test_a_custom_tool_without_a_grammar_takes_any_text():
    tool = {"type": "custom", "custom": {"name": "run", "format": {"type": "text"}}}
    named = {"type": "custom", "custom": {"name": "run"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    for choice in (named, allowed):
        answer = called("hermes", tool, choice)
        [call] = answer.tool_calls or ()
        assert answer.finish_reason in ("stop", "length")
        assert call.input == input_of(call.arguments)


def test_a_template_and_the_history_have_functions():
    llm = bundled()
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments.input }}"
        "{% endfor %};{% endfor %}{{ tools[0].function.name }} "
        "{{ tools[0].function.parameters.properties.input.description }}{# <tool_call> #}"
    )
    call = ToolCall(index=0, id="c", name="run", arguments='{"input": "1 + 2"}', is_custom=True)
    history = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call.as_message()]},
        {"role": "tool", "tool_call_id": "c", "content": "3"},
    ]
    prompt = llm.chat_prompt(history, chat_template=template, tools=[custom("regex", "[0-9]")])
    assert "run 1 + 2;tool: 3;run A text of the regular expression:\n[0-9]" in prompt["prompt"]
    assert as_functions([{"type": "function"}]) == [{"type": "function"}]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "custom"}, "tools[0].custom must be an object; got None"),
        ({"type": "custom", "custom": {"name": "a b"}}, "tools[0].custom.name must be 1 to 128"),
        (custom("ebnf", "x"), "tools[0].custom.format.grammar must have a syntax, 'lark' or"),
        (custom("lark", ""), "tools[0].custom.format.grammar must have a syntax, 'lark' or"),
        (
            {"type": "custom", "custom": {"name": "run", "format": {"type": "json"}}},
            "tools[0].custom.format must have the type 'text' or 'grammar'",
        ),
        (custom("lark", "start: nope"), 'followed: unknown name: "nope"; see the grammar of the'),
        (custom("lark", 'first: "a"'), "no start rule found; see the grammar of the custom tool"),
        (custom("regex", "("), "invalid regex at column 2"),
        (custom("lark", "start: %json {}"), "tools has the custom tool run, which has '%json'"),
        (custom("lark", "start: A\nA: /[^a]+/ & /b+/"), "run, which has '&' in its grammar"),
        (custom("lark", r"start: /a*?\n/"), "run, which has '*?' in its grammar"),
        (custom("lark", 'start[lazy]: "a"'), "run, which has 'start[' in its grammar"),
        (custom("lark", '%ignore /"a*/\nstart: "a"'), "run, which has '%ignore /\"a*/' in its"),
        (custom("lark", "start: S\n%import common.SH_COMMENT -> S"), "has 'common.SH_COMMENT' in"),
    ],
)
def test_a_wrong_tool_is_refused_by_its_place(tool: Any, message: str):
    with pytest.raises(RequestError, match=re.escape(message)):
        bundled().chat(USER, SamplingParams(max_tokens=1), tools=[tool], use_tqdm=False)


USER = [{"role": "user", "content": "Hi."}]


# Pieces of arguments, and texts as JSON.


@given(st.text(st.sampled_from('a"\\\n\t\x01é😀/{}'), max_size=12))
def test_the_input_grows_with_the_arguments(text: str):
    for written in (json.dumps({"input": text}), json.dumps({"input": text}, ensure_ascii=False)):
        before = ""
        for length in range(len(written) + 1):
            found = input_of(written[:length])
            assert found.startswith(before)
            before = found
        assert before == text
    other = '{"query": "a"}'
    assert [input_of(other[:length]) for length in (0, 2, len(other))] == ["", "", other]


PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""A grammar like one that a coding agent sends."""


def test_a_patch_is_written_as_json():
    for text in (
        '*** Begin Patch\n*** Add File: a.py\n+print("hi\\n")\n+\n*** End Patch\n',
        "*** Begin Patch\n*** Update File: b\n@@ def f():\n-\told\n+new\n*** End Patch",
    ):
        for cut in (text, text.replace("*** End", "** End")):
            written = json.dumps(cut, ensure_ascii=False)[1:-1]
            expected = cut == text
            assert (accepts(PATCH, cut), accepts(quoted_lark(PATCH), written)) == (expected,) * 2


LARKS = [
    SUMS,
    SAYS,
    r"start: /[^x]+/",
    r'start: "ab" /[^"\n]*/ "\""',
    r"start: /a.b/",
    r"start: /(?s:.)b|[\x00-\x20\/]/",
    r'start: "A\n"i "b"?',
    'start: W "b"\n%import common.WS -> W',
    '%ignore /[ \\n]+/\nstart: "a" "\\"b" // "\n',
    r'start: /\w+\s*"(\\.|[^"\\])*"/',
    'start: "a".."c"+\n',
    'start: _A B\n_A: "a" C\nC: "\\n" | /\\t/\nB: /[b-c]/',
    r"start: /(?i:a\n)b|\x{61}\u0022|[\]\\]/",
]


@pytest.mark.parametrize("place", range(len(LARKS)))
def test_a_quoted_grammar_has_the_same_texts(place: int):
    lark = LARKS[place]
    quoted = quoted_lark(lark)

    @given(st.text(st.sampled_from('aAbB1 "\\\n\t\x01+/]xé'), max_size=6))
    def check(text: str):
        assert accepts(lark, text) == accepts(quoted, json.dumps(text, ensure_ascii=False)[1:-1])

    check()
    for text in ("1 + 12", 'say "a"\t\n', "a\nb", 'ab"', "\nb", "a\n", ' "b', 'a "\\""', '"'):
        written = json.dumps(text, ensure_ascii=False)[1:-1]
        assert accepts(lark, text) == accepts(quoted, written), text
