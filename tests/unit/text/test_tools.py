"""Check how answers are read: calls of tools, reasoning, and text that only looks like them."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.checkpoint.families import FAMILIES
from mie.config.engine_args import EngineArgs
from mie.config.params.structured import StructuredOutputsParams
from mie.config.settings import settings_of
from mie.errors import RequestError
from mie.text.tools.answer_parts import parts_of
from mie.text.tools.definitions import MOST_TOOLS, tool_choice_of
from mie.text.tools.families import FAMILY_FORMATS
from mie.text.tools.forced import new_parser
from mie.text.tools.formats import ANALYSIS, HARMONY, AnswerFormat, CallFormat
from mie.text.tools.response_template import calls_in
from mie.text.tools.table import CALLS, HERMES, REASONING, call_format, reasoning_tags
from mie.text.tools.written import written

GOLDEN = json.loads((Path(__file__).parents[2] / "data/answers.json").read_text("utf-8"))
TOOLS = frozenset({"weather", "add"})
THINK = REASONING["qwen3"]
DISTINCT = [*{form: name for name, form in reversed(CALLS.items())}.values()]
"""The names of formats that differ from each other."""
GRAMMAR = StructuredOutputsParams(grammar='start: "x"')  # only its presence matters to a parser


def read(form: AnswerFormat, pieces: list[str]) -> Any:
    """Read an answer piece by piece; return reasoning, text, calls and rejected calls."""
    parser = new_parser(form, "key")
    for piece in pieces:
        parser.add(piece)
    parser.finish()
    calls = [(call.index, call.id, call.name, call.arguments) for call in parser.calls]
    return parser.reasoning, parser.content, calls, parser.num_unparsed


def form_of(calls: CallFormat, **more: Any) -> AnswerFormat:
    return AnswerFormat(reasoning=THINK, calls=calls, names=TOOLS, **more)


def named(found: Any) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for _, _, name, arguments in found[2]]


# Transformers reads the same.


@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=[f"{c['format']} {i}" for i, c in enumerate(GOLDEN["cases"])]
)
def test_answers_are_read_as_transformers_reads_them(case: dict[str, Any]):
    calls = CALLS.get(case["format"]) or calls_in(GOLDEN["templates"][case["format"]])
    reasoning, content, found, num_unparsed = read(form_of(calls), list(case["text"]))
    message = case["message"]
    assert reasoning == message.get("thinking", "")
    assert content.strip() == message.get("content", "")
    expected = [call["function"] for call in message.get("tool_calls", ())]
    assert named((0, 0, found)) == [(each["name"], each["arguments"]) for each in expected]
    assert num_unparsed == 0
    assert len({call_id for _, call_id, _, _ in found}) == len(found)


# Pieces.

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|python_tag|>", "<tool", "_call>", "[TOOL", " ", "\n", ";", "; ", "text", "é🦊", "\\", '"'),
    *("{", "}", "[", "]", '{"name": "add", "arguments": {"a": 1}}', '{"a": "}"}', "add", "weather"),
    *('{"name": "nope", "arguments": {}}', '{"name": "add", "parameters": {}}', "[]", "{}", "NaN"),
]


def answers_of(name: str) -> st.SearchStrategy[str]:
    """Return answers of pieces that mean something in a format."""
    form, calls = CALLS[name], [("add", '{"a": "b"}'), ("weather", "{}")]
    if form == HARMONY:  # headers are never text; test_channels.py has them
        return st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join)
    whole = written(calls, form)
    own = [*form.tags, form.begin, form.open, form.name_close, form.close, form.end, whole]
    own += [whole[:place] for place in range(5, len(whole), 7)]
    pieces = st.sampled_from([each for each in own if each]) | st.sampled_from(FRAGMENTS)
    return st.lists(pieces | st.text(max_size=3), max_size=12).map("".join)


@given(
    name=st.sampled_from(DISTINCT),
    data=st.data(),
    cuts=st.lists(st.integers(0, 400)),
    begins=st.booleans(),
    more=st.booleans(),
    lacks=st.booleans(),
)
def test_how_an_answer_is_cut_changes_nothing(name, data, cuts, begins, more, lacks):
    form = form_of(
        CALLS[name],
        begins_with="<think>" * begins,
        most_calls=None if more else 1,
        may_lack_open=lacks,
    )
    check_cuts(form, data.draw(answers_of(name)), cuts)


def check_cuts(form: AnswerFormat, text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(places)]
    whole = read(form, [text])
    assert read(form, pieces) == whole
    assert read(form, list(text)) == whole


@pytest.mark.parametrize(
    ("text", "cuts", "lacks"),
    [("<think>a</think> <tool_call>{", [3, 20], False), ("a</think> <think>b", [3], True)],
)
def test_cuts_that_were_wrong_once(text: str, cuts: list[int], lacks: bool):
    check_cuts(form_of(HERMES, may_lack_open=lacks), text, cuts)


def test_a_closing_tag_inside_a_call_without_tags_ends_nothing():
    text = '{"name": "add", "parameters": {"a": "</think>"}}'
    form = form_of(CALLS["llama3_json"], may_lack_open=True)
    check_cuts(form, text, [30])
    assert named(read(form, [text])) == [("add", {"a": "</think>"})]


@given(name=st.sampled_from(DISTINCT), data=st.data())
def test_no_call_is_invented_and_no_text_is_lost(name: str, data: st.DataObject):
    form = AnswerFormat(calls=CALLS[name], names=TOOLS)
    text = data.draw(answers_of(name))
    _, content, calls, _ = found = read(form, [text])
    for tool, arguments in named(found):
        assert tool in TOOLS
        assert isinstance(arguments, dict)
        assert tool in text
    if not calls:
        assert content == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


# Text that is no call.

NOT_CALLS = {
    "no JSON": "x",
    "no tool of the request": '{"name": "nope", "arguments": {}}',
    "no name": '{"arguments": {}}',
    "a name that is no text": '{"name": ["add"], "arguments": {}}',
    "no arguments": '{"name": "add"}',
    "arguments that are text": '{"name": "add", "arguments": "{}"}',
    "a number that is too large": '{"name": "add", "arguments": {"a": 1e999}}',
    "a number that JSON lacks": '{"name": "add", "arguments": {"a": NaN}}',
    "an empty list": "[]",
    "a list with something else": '[{"name": "add", "arguments": {}}, 1]',
    "deep nesting": "[" * 100_000 + "]" * 100_000,
    "a huge number": '{"name": "add", "arguments": {"a": ' + "1" * 5000 + "}}",
    "the end": '{"name": "add", "argu',
}


@pytest.mark.parametrize("text", NOT_CALLS.values(), ids=NOT_CALLS)
def test_what_is_no_call_stays_text_and_is_counted(text: str):
    answer = f"See: <tool_call>{text}"
    assert read(form_of(HERMES), [answer]) == ("", answer, [], 1)
    closed = f"{answer}</tool_call>"
    assert read(form_of(HERMES), [closed]) == ("", closed, [], 1)


def test_a_call_without_its_closing_tag_is_one_only_at_the_end():
    call = '<tool_call>{"name": "add", "arguments": {}}'
    assert len(read(form_of(HERMES), [call])[2]) == 1
    assert len(read(form_of(HERMES), [f"{call} </tool_"])[2]) == 1
    for rest in ("\nSo.", "<tool_call>", "</tool>"):
        assert read(form_of(HERMES), [call + rest])[2] == []


def test_at_most_one_call_without_parallel_calls():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    _, content, calls, num_unparsed = read(form_of(HERMES, most_calls=1), [call + call])
    assert (content, len(calls), num_unparsed) == (call, 1, 1)
    pair = '[TOOL_CALLS][{"name": "add", "arguments": {}}, {"name": "add", "arguments": {}}]'
    assert read(form_of(CALLS["mistral"], most_calls=1), [pair])[2] == []


def test_calls_beyond_a_maximum_are_text():
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    _, content, calls, num_unparsed = read(form_of(HERMES, most_calls=2), [call * 3])
    assert (content, len(calls), num_unparsed) == (call, 2, 1)


def test_a_closing_tag_inside_an_argument_ends_nothing():
    text = '<tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>'
    assert named(read(form_of(HERMES), [text])) == [("add", {"a": "</tool_call>"})]


OPENINGS = ["", " ", "\n", "<think>", "\n<think>\n", "<think><think>", "<think>\n\n<think>"]


@pytest.mark.parametrize("calls", [None, HERMES, CALLS["llama3_json"]])
@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_reasoning_may_lack_its_opening_tag_or_have_it_twice(calls, begins, opening, size):
    form = AnswerFormat(
        reasoning=THINK,
        calls=calls,
        names=TOOLS,
        begins_with="<think>" * begins,
        may_lack_open=not begins,
    )
    text = f"{opening}Hm, a <b> tag.\n</think>\n\nSo </b>."
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    assert read(form, pieces) == ("Hm, a <b> tag.", "So </b>.", [], 0)
    again = f"{opening}One.</think>\n<think>Two.</think>So."
    assert read(form, [again])[:2] == ("One.\nTwo.", "So.")


@pytest.mark.parametrize(
    "text",
    [
        "So.",
        "I write <think>x</think>.",
        'So. <tool_call>{"name": "add", "arguments": {"a": "</think>"}}</tool_call>',
        "<think>a</think>So </think>.",
        "So </thin",
    ],
)
def test_a_closing_tag_elsewhere_moves_no_text(text: str):
    lacking = form_of(HERMES, may_lack_open=True)
    assert read(lacking, [text]) == read(form_of(HERMES), [text])
    assert read(lacking, list(text)) == read(lacking, [text])


@pytest.mark.parametrize(
    "value",
    [
        *("[" * 9_000 + "]" * 9_000, '"\\' * 9_000, "'\\" * 9_000, "1" * 9_000),
        *('<escape>"' * 3_000, "{'a':" * 3_000 + "}" * 3_000, "1e999", "NaN", "[NaN]"),
    ],
    ids=lambda value: value[:6],
)
def test_hostile_values_stay_text(value: str):
    schema = {"properties": {"a": {"type": ["array", "string", "number"]}}}
    for name in ("qwen3_coder", "glm45"):
        form = form_of(CALLS[name], schemas={"add": schema})
        text = written([("add", json.dumps({"a": value}))], CALLS[name])
        [(_, arguments)] = named(read(form, [text]))
        assert arguments == {"a": value}
    for name in ("pythonic", "functiongemma"):
        written_call = written([("add", "{}")], CALLS[name])
        middle = "a=" if name == "pythonic" else "a:"
        place = written_call.index("add") + 4
        text = written_call[:place] + middle + value + written_call[place:]
        assert read(form_of(CALLS[name]), [text])[1:3] == (text, [])


def test_reasoning_is_at_the_beginning_or_nowhere():
    late = "I write <think>x</think>."
    assert read(form_of(HERMES), [late])[:2] == ("", late)
    cut = read(form_of(HERMES), ["<think>Hm", " ... "])
    assert cut[:2] == ("Hm ...", "")
    begun = form_of(HERMES, begins_with="<think>")
    assert read(begun, ["Hm.</thi", "nk>\n\nSo."])[:2] == ("Hm.", "So.")


# Answers that a grammar writes.


@given(
    name=st.sampled_from([each for each in DISTINCT if CALLS[each].is_streamed]),
    calls=st.lists(
        st.tuples(st.sampled_from(sorted(TOOLS)), st.dictionaries(st.text(), VALUES)),
        min_size=1,
        max_size=3,
    ),
    cut=st.integers(0, 300),
)
def test_forced_calls_are_read_while_they_come_and_as_free_ones(name: str, calls: Any, cut: int):
    text = written([(tool, json.dumps(arguments)) for tool, arguments in calls], CALLS[name])
    forced = form_of(CALLS[name], structured_outputs=GRAMMAR)
    found = read(forced, [text])
    assert named(found) == calls
    assert read(forced, list(text)) == found
    assert read(forced, [text[:cut], text[cut:]]) == found
    assert named(read(form_of(CALLS[name]), [text])) == calls
    begun = read(forced, [text[:cut]])[2]  # an answer that was cut
    for (_, _, tool, arguments), (_, _, whole, all_arguments) in zip(begun, found[2], strict=False):
        assert tool == whole
        assert all_arguments.startswith(arguments)


TYPES = {
    "text": st.text(),
    "count": st.integers(),
    "share": st.floats(allow_nan=False, allow_infinity=False),
    "flag": st.booleans(),
    "list": st.lists(VALUES, max_size=3),
    "thing": st.dictionaries(st.text(st.characters(categories=["L"])), VALUES),
    "may": st.none() | st.integers(),
}
NAMES = dict(
    zip(TYPES, ["string", "integer", "number", "boolean", "array", "object"], strict=False)
)
SCHEMA = {
    "type": "object",
    "properties": {
        **{key: {"type": name} for key, name in NAMES.items()},
        "may": {"$ref": "#/$defs/may"},
    },
    "$defs": {"may": {"anyOf": [{"type": "integer"}, {"const": None}]}},
}


@given(
    name=st.sampled_from([each for each in DISTINCT if not CALLS[each].is_streamed]),
    calls=st.lists(
        st.tuples(st.sampled_from(sorted(TOOLS)), st.fixed_dictionaries({}, optional=dict(TYPES))),
        min_size=1,
        max_size=3,
    ),
)
def test_calls_between_tags_come_back_with_their_types(name: str, calls: Any):
    text = written([(tool, json.dumps(arguments)) for tool, arguments in calls], CALLS[name])
    for more in ({}, {"structured_outputs": GRAMMAR}):
        form = form_of(CALLS[name], schemas=dict.fromkeys(TOOLS, SCHEMA), **more)
        found = read(form, [text])
        assert named(found) == calls
        assert found[1] == ""
        assert read(form, list(text)) == found


def tool(name: str = "add", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


# The parameters.


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "no list": (("add",), "tools must be a list of functions; got 'add'"),
    "many": (([tool()] * 1025,), f"tools must have 1 to {MOST_TOOLS} entries; got 1025"),
    "no object": (([1],), "tools[0] must be {'type': 'function'"),
    "no function": (([{"type": "function"}],), "tools[0].function must be an object; got None"),
    "a bad name": (([tool('a"b')],), "tools[0].function.name must be 1 to 128"),
    "the same name": (([tool(), tool()],), "tools has the name add 2 times"),
    "no schema": (([tool(parameters=[])],), "tools[0].function.parameters must be the JSON"),
    "a list": (([tool(parameters={"type": "array"})],), "tools[0].function.parameters must be"),
    "a choice alone": ((None, "auto"), "tool_choice needs tools; got 'auto' without them"),
    "another choice": (([tool()], "any"), "tool_choice must be 'none', 'auto', 'required', {"),
    "no named tool": (
        ([tool()], {"type": "function", "function": {"name": "b"}}),
        "tool_choice names 'b'; the tools are add",
    ),
    "a number": (([tool()], None, 1), "parallel_tool_calls must be True or False; got 1"),
    "no call": (([tool()], None, None, 0), "max_tool_calls must be an integer of at least 1; got"),
    "a switch": (([tool()], None, None, True), "max_tool_calls must be an integer of at least 1"),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_malformed_parameters_are_refused_by_name(given: Any, message: str):
    with pytest.raises(RequestError, match=re.escape(message)):
        tool_choice_of(*given)


# Which format a model has.


TEMPLATE = GOLDEN["templates"]["hermes"]


@pytest.mark.parametrize(
    ("parser", "template", "declared", "expected"),
    [
        ("auto", "{{ tools }} <tool_call>", None, HERMES),
        ("auto", "{{ tools }} <|python_tag|>", None, CALLS["llama3_json"]),
        ("auto", '{{ tools }} <|start_header_id|> "parameters": ', None, CALLS["llama3_json"]),
        ("auto", "{{ tools }} [TOOL_CALLS]", None, CALLS["mistral"]),
        ("auto", "{{ tools }} [TOOL_CALLS] [ARGS]", None, CALLS["mistral_v11"]),
        ("mistral", "{{ tools }} [ARGS]", None, CALLS["mistral_v11"]),
        ("hermes", "{{ tools }}", TEMPLATE, HERMES),
        ("auto", "{{ tools }} [TOOL_CALLS]", TEMPLATE, calls_in(TEMPLATE)),
        ("hf", "{{ tools }}", TEMPLATE, calls_in(TEMPLATE)),
        ("auto", "{{ tools }} <tool_call>", {"fields": {}}, HERMES),
        ("auto", "{{ tools }} respond with <|tool_call|> and a list", None, CALLS["granite"]),
        ("auto", "{{ tools }} as functools[…]", None, CALLS["phi4_mini_json"]),
        ("auto", "{{ tools }} <tool_calls>[…]</tool_calls>", None, CALLS["hunyuan_a13b"]),
        ("auto", "{{ tools }} <|channel|>", None, HARMONY),
        ("auto", "{{ messages }}", None, HERMES),  # which a system message states
        ("mistral", "{{ messages }}", None, CALLS["mistral"]),
    ],
)
def test_the_format_of_calls(parser: str, template: str, declared: Any, expected: CallFormat):
    assert call_format(parser, template, declared) == expected


@pytest.mark.parametrize(
    ("parser", "template", "declared", "message"),
    [
        (
            "auto",
            "{{ tools }}",
            None,
            "calls have a format that is not known (set tool_call_parser",
        ),
        ("hf", "{{ tools }}", None, "there is none in tokenizer_config.json"),
        ("hf", "{{ tools }}", {"fields": {}}, "response_template has no field tool_calls"),
    ],
)
def test_a_format_that_is_not_known_is_refused(parser, template, declared, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        call_format(parser, template, declared)


def test_a_family_has_its_format_unless_the_template_shows_another():
    phi, glm = FAMILY_FORMATS["Phi3ForCausalLM"], FAMILY_FORMATS["Glm4ForCausalLM"]
    assert call_format("auto", "<|tool|>{{ tools }}", None, phi) == CALLS["phi4_mini_json"]
    assert call_format("auto", "{{ tools }} <tool_call>", None, phi) == HERMES
    assert call_format("auto", "{{ messages }}", None, phi) == CALLS["phi4_mini_json"]
    assert call_format("auto", "{{ messages }}", None, glm) == CALLS["glm4"]
    assert call_format("auto", "{{ tools }}", TEMPLATE, phi) == calls_in(TEMPLATE)
    assert call_format("auto", "{{ tools }} <tool_call>", None, glm) == HERMES
    assert call_format("auto", "{{ tools }}", None, glm) == CALLS["glm4"]
    assert reasoning_tags("auto", "", None, phi) is None
    olmo = FAMILY_FORMATS["Olmo3ForCausalLM"]
    assert reasoning_tags("auto", "<think>", None, olmo) == THINK
    assert reasoning_tags("none", "<think>", None, olmo) is None


def test_the_table_of_families_has_names_that_exist():
    assert FAMILY_FORMATS.keys() <= FAMILIES.keys()
    for family in FAMILY_FORMATS.values():
        assert family.calls is None or family.calls in CALLS
        assert family.reasoning is None or family.reasoning in REASONING
    choices = {name: {*row.choices} for name, _, row in settings_of(EngineArgs)}
    assert choices["tool_call_parser"] == {*CALLS, "auto", "hf", "none"}
    assert choices["reasoning_parser"] == {*REASONING, "auto", "hf", "none"}


@pytest.mark.parametrize(
    ("parser", "template", "declared", "expected"),
    [
        ("none", "</think>", TEMPLATE, None),
        ("qwen3", "", None, THINK),
        ("auto", "content.split('</think>')", None, THINK),
        ("auto", "[THINK][/THINK]", None, REASONING["mistral"]),
        ("auto", "{{ messages }}", None, None),
        ("auto", "'Here is my response:'", None, REASONING["granite"]),
        ("auto", "</seed:think>", None, REASONING["seed_oss"]),
        ("auto", "<|channel|>", None, ANALYSIS),
        ("auto", "<|END_THINKING|>", None, REASONING["cohere_command3"]),
        ("auto", "'<|channel>thought' '<channel|>'", None, REASONING["gemma4"]),
        ("auto", "<|inner_suffix|>", None, REASONING["apertus"]),
        ("auto", "[BEGIN FINAL RESPONSE]", None, REASONING["apriel"]),
        ("auto", "<|end|>", None, None),
        ("auto", "", TEMPLATE, THINK),
        ("hf", "", TEMPLATE, THINK),
        ("auto", "</think>", {"fields": {"thinking": {"open_pattern": "x"}}}, THINK),
        ("auto", "</think>", {"fields": {}}, None),
        ("auto", "'</think>' '<answer>'", None, REASONING["hunyuan_a13b"]),
    ],
)
def test_the_tags_of_reasoning(parser: str, template: str, declared: Any, expected: Any):
    assert reasoning_tags(parser, template, declared) == expected


@pytest.mark.parametrize("name", [name for name, tags in REASONING.items() if tags != ANALYSIS])
def test_reasoning_between_the_tags_of_each_parser(name: str):
    tags = REASONING[name]
    form = AnswerFormat(reasoning=tags)
    text = f"{tags.open}\nHm, a < b.\n{tags.close}\n\nSo."
    for pieces in ([text], list(text), [text[:7], text[7:]]):
        assert read(form, pieces) == ("Hm, a < b.", "So.", [], 0)
    cut = text[: text.index("b.")]
    assert read(form, [cut])[:2] == ("Hm, a <", "")
    begun = AnswerFormat(reasoning=tags, begins_with=tags.open)
    assert read(begun, [f"Hm.{tags.close}So."])[:2] == ("Hm.", "So.")


HUNYUAN = AnswerFormat(
    reasoning=REASONING["hunyuan_a13b"],
    may_lack_open=True,
    calls=CALLS["hunyuan_a13b"],
    names=frozenset({"f"}),
)
CALL_OF_F = '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nHm.\n</think>\n<answer>\nSo <b>.\n</answer>", ("Hm.", "So <b>.", 0)),
        ("<think>Hm.</think><answer>So.</answer>", ("Hm.", "So.", 0)),
        ("Hm.\n</think>\n<answer>\nSo.\n</answer>\n", ("Hm.", "So.", 0)),
        ("<answer>\nSo.\n</answer>", ("", "So.", 0)),
        ("<think>Hm.</think>\n<answer>\nSo, and so", ("Hm.", "So, and so", 0)),
        ("So: <answer> and </answer>.", ("", "So: <answer> and </answer>.", 0)),
        ("<answer>One</answer>, </answer>", ("", "One\n, </answer>", 0)),
        (f"<think>Hm.</think><answer>So.{CALL_OF_F}</answer>", ("Hm.", "So.", 1)),
        (f"<think>Hm.</think>\n{CALL_OF_F}", ("Hm.", "", 1)),
    ],
)
def test_the_tags_around_a_text_are_left_out(text: str, expected: tuple[str, str, int]):
    cuts = [[text], list(text), *([text[:place], text[place:]] for place in range(1, len(text)))]
    for pieces in cuts:
        reasoning, content, calls, _ = read(HUNYUAN, pieces)
        assert (reasoning, content, len(calls)) == expected


def test_tags_that_may_be_special_tokens_stay_in_the_text():
    assert "<|channel>" in AnswerFormat(reasoning=REASONING["gemma4"]).tags
    dsml = CALLS["deepseek_v32"].tags
    assert "｜DSML｜" in dsml
    assert {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"} <= {*CALLS["glm45"].tags}
    assert {"<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"} <= {*CALLS["deepseek_v3"].tags}
    assert '<|"|>' in CALLS["gemma4"].tags


@pytest.mark.parametrize(
    ("name", "special", "expected"),
    [
        ("deepseek_v32", "｜DSML｜", 'string=\\"true\\">" /[^<｜]{0,3}/ "</" <[7]> "parameter>'),
        ("glm45", "</arg_value>", "/[^<｜]{0,3}/ <[7]>"),
        ("kimi_k2", "<|tool_call_begin|>", '<[7]> "functions."'),
        ("functiongemma", "<escape>", '"a:" <[7]> /[^<｜]{0,3}/ <[7]>'),
    ],
)
def test_grammars_name_special_tokens_by_their_ids(name: str, special: str, expected: str):
    parameters = {"properties": {"a": {"type": "string", "maxLength": 3}}, "required": ["a"]}
    assert expected in forced_grammar(name, parameters, {special: 7})


def forced_grammar(name: str, parameters: Any, special: dict[str, int]) -> str:
    """Return the grammar of forced calls of one tool, as JSON has it."""
    choice = tool_choice_of([tool(parameters=parameters)], "required")
    form = AnswerFormat(calls=CALLS[name], names=choice.names)
    parts = parts_of(form, choice, special.get, "")
    assert parts.calls is not None
    return str(parts.calls()["grammar"])


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"anyOf": [{}]}, "anyOf in the parameters of add"),
        ({"required": ["b"]}, "b, which is required and has no schema, in the parameters of add"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "pattern of a in the param"),
        ({"properties": {"a>": {"type": "string"}}}, "the name a> in the parameters of add"),
    ],
)
def test_a_schema_that_tags_cannot_hold_to_is_refused_by_name(schema: Any, message: str):
    with pytest.raises(RequestError, match=re.escape(message)):
        forced_grammar("qwen3_coder", schema, {})
    assert "%json" in forced_grammar("hermes", schema, {})


def changed(**tool_calls: Any) -> dict[str, Any]:
    fields = {"tool_calls": {**TEMPLATE["fields"]["tool_calls"], **tool_calls}}
    return {**TEMPLATE, "fields": fields}


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "no object": ([], "response_template: []"),
    "a version": ({"version": 2}, "version 2"),
    "a key": ({"more": 1}, "more"),
    "a pattern": (changed(open_pattern="x"), "fields.tool_calls.open_pattern"),
    "XML": (changed(content="xml-inline"), "fields.tool_calls.content: 'xml-inline'"),
    "options of JSON": (
        changed(content_args={"unquoted_keys": True}),
        "fields.tool_calls.content_args: {'unquoted_keys': True}",
    ),
    "another shape": (changed(transform={"a": "{content}"}), "fields.tool_calls.transform: {'a'"),
}


@pytest.mark.parametrize(("template", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_other_keys_of_a_response_template_are_refused_by_name(template: Any, message: str):
    with pytest.raises(RequestError, match=re.escape(f"is not supported: {message}")):
        calls_in(template)
