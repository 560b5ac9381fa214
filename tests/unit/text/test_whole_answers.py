"""Check answers that one grammar describes: reasoning, calls, and a text that follows a schema."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import mie
from mie import LLM, CompletionOutput, RequestOutputKind, SamplingParams
from mie.errors import RequestError
from mie.text.tools.answer_parts import parts_of
from mie.text.tools.definitions import tool_choice_of
from mie.text.tools.formats import HARMONY, AnswerFormat
from mie.text.tools.table import CALLS
from mie.text.tools.written import literals_of

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

USER = [{"role": "user", "content": "How is the weather?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["lake", "mill"]}, "days": {"enum": [1, 2]}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
OTHER: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2, 3]}}}


def tool(name: str, schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


TOOLS = [tool("weather", SCHEMA, strict=True), tool("add", OTHER)]
STRUCTURE = {"json": SCHEMA}
ADD = {"type": "function", "function": {"name": "add"}}

# Templates that begin an answer.
OPENINGS = {"left to the model": "", "open": "<think>\n", "closed": "<think>\n\n</think>\n\n"}
TAGS = {
    "hermes": "<tool_call>",
    "llama3_json": "<|python_tag|>",
    "mistral": "[TOOL_CALLS]",
    "mistral [ARGS]": "[TOOL_CALLS] [ARGS]",
    "granite": "<|tool_call|>",
    "phi4_mini_json": "functools[",
    "hunyuan_a13b": "<tool_calls>",
}


@cache
def bundled(parser: str = "qwen3", **settings: Any) -> LLM:
    return LLM("bundled", num_threads=1, reasoning_parser=parser, **settings)


def template(opening: str, tag: str = "<tool_call>") -> str:
    return (
        "{{ messages[0].content }}{% if tools %}{{ tools[0].function.name }}{% endif %}"
        f"{opening}{{# {tag} #}}"
    )


def answers(
    opening: str = "", *, tag: str = "<tool_call>", llm: LLM | None = None, **asked: Any
) -> list[CompletionOutput]:
    """Return the choices of an answer. A stream must give the same."""
    llm = llm or bundled()
    options = {
        name: asked.pop(name)
        for name in ("tools", "tool_choice", "parallel_tool_calls")
        if name in asked
    }
    prompt = llm.chat_prompt(USER, chat_template=template(opening, tag), **options)
    given = {"temperature": 1000.0, "seed": 1, "max_tokens": 200, "n": 4, **asked}
    [output] = llm.generate([prompt], SamplingParams(**given), use_tqdm=False)
    parts: dict[int, list[str]] = {choice.index: ["", "", ""] for choice in output.outputs}
    delta = SamplingParams(**given, output_kind=RequestOutputKind.DELTA)
    for piece in llm.stream(prompt, delta):
        for choice in piece.outputs:
            found = parts[choice.index]
            found[0] += choice.text
            found[1] += choice.reasoning or ""
            found[2] += "".join(call.arguments for call in choice.tool_calls or ())
    for choice in output.outputs:
        arguments = "".join(call.arguments for call in choice.tool_calls or ())
        assert parts[choice.index] == [choice.text, choice.reasoning or "", arguments]
    return output.outputs


def writing(llm: LLM, text: str) -> dict[str, Any]:
    """Return parameters under which the answer begins with a text."""
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    return {"trace_decode_token_ids": ids, "n": 1}


# Reasoning, and a structure after it.


@pytest.mark.parametrize("opening", OPENINGS)
def test_a_structure_begins_after_the_reasoning(opening: str):
    found = answers(OPENINGS[opening], structured_outputs=STRUCTURE, thinking_token_budget=6, n=8)
    for choice in found:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.text), SCHEMA)
    thoughts = [choice.reasoning for choice in found]
    if opening == "closed":
        assert thoughts == [None] * 8
    if opening == "open":
        assert all(thoughts)


def test_the_model_may_reason_where_the_prompt_leaves_it_to_the_model():
    llm = bundled()
    written = writing(llm, "<think>\nLake, or mill.\n</think>\n\n")
    [choice] = answers(structured_outputs=STRUCTURE, **written)
    assert choice.reasoning == "Lake, or mill."
    jsonschema.validate(json.loads(choice.text), SCHEMA)
    [choice] = answers(structured_outputs=STRUCTURE, **writing(llm, '{"place":"l'))
    assert (choice.reasoning, json.loads(choice.text)["place"]) == ("", "lake")
    with pytest.raises(RequestError, match=r"does not allow trace_decode_token_ids\[1\]"):
        answers(structured_outputs={"choice": ["mill"]}, **writing(llm, "mo"))


def test_without_a_reasoning_parser_a_structure_holds_from_the_first_token():
    for opening in OPENINGS.values():
        for choice in answers(opening, llm=bundled("none"), structured_outputs=STRUCTURE):
            assert choice.reasoning is None
            jsonschema.validate(json.loads(choice.text), SCHEMA)


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": "[0-9]{2}/[a-f]"}, "[0-9]{2}/[a-f]"),
        ({"choice": ["mill", "lake"]}, "mill|lake"),
        ({"grammar": 'start: "a"{2,3} "b"'}, "aa{1,2}b"),
        ({"json_object": True, "disable_any_whitespace": True}, r"\{.*\}"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "so"}}}, "so"),
        ({"structural_tag": {"structures": [], "triggers": []}}, None),
    ],
)
def test_every_kind_of_structure_may_follow_the_reasoning(structure: Any, pattern: str | None):
    asked = {"structured_outputs": structure, "thinking_token_budget": 3, "temperature": 1.0}
    if pattern is None:
        with pytest.raises(RequestError, match=r"tags is empty"):
            answers(OPENINGS["open"], **asked)
        return
    for choice in answers(OPENINGS["open"], **asked):
        assert choice.reasoning
        if choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.text, re.DOTALL)


# Calls beside a structure, and strict calls.


@pytest.mark.parametrize("name", TAGS)
def test_an_answer_is_calls_or_follows_the_structure(name: str):
    found = answers(
        OPENINGS["open"],
        tag=TAGS[name],
        tools=TOOLS,
        structured_outputs=STRUCTURE,
        parallel_tool_calls=False,
        thinking_token_budget=3,
        n=8,
    )
    kinds = set()
    for choice in found:
        if choice.finish_reason != "stop":
            continue
        kinds.add(bool(choice.tool_calls))
        assert choice.reasoning
        if choice.tool_calls:
            assert choice.text == ""
        else:
            jsonschema.validate(json.loads(choice.text), SCHEMA)
        for call in choice.tool_calls or ():
            if call.name == "weather":
                jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert kinds == {True, False}


@pytest.mark.parametrize("name", TAGS)
def test_a_strict_function_gets_arguments_of_its_schema(name: str):
    """The model writes text and an opening tag. The rest is sampled."""
    llm = bundled()
    tag = "functools" if name == "phi4_mini_json" else TAGS[name].split()[0]
    written = writing(llm, f"So. {tag}")
    [choice] = answers(tag=TAGS[name], tools=TOOLS[:1], parallel_tool_calls=False, **written)
    assert (choice.text.strip(), choice.finish_reason) == ("So.", "stop")
    [call] = choice.tool_calls or ()
    assert call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)


ENDS: dict[str, Any] = {"temperature": 1000.0, "max_tokens": 400, "n": 2}


TAGGED = [name for name, form in CALLS.items() if form.triggers and form != HARMONY]
BARE = [name for name, form in CALLS.items() if form.is_open_optional]


@pytest.mark.parametrize("name", BARE)
def test_a_call_without_a_tag_holds_strict_functions(name: str):
    """The answer begins like a call without a tag, or like a text, and the rest is sampled."""
    llm = bundled("none")
    options: dict[str, Any] = {"tools": TOOLS[:1], "parallel_tool_calls": False}
    prompt = {"prompt": "Who?", "answer": format_of(name, **options)}

    def begun(text: str) -> CompletionOutput:
        ids = llm.tokenizer.encode(text, add_special_tokens=False)
        params = SamplingParams(trace_decode_token_ids=ids, seed=2, **{**ENDS, "n": 1})
        [output] = llm.generate([prompt], params, use_tqdm=False)
        return output.outputs[0]

    literals = literals_of(CALLS[name])
    start = f"{literals.begin}weather{literals.middle}"
    found = begun(start)
    assert (found.text, found.finish_reason) == ("", "stop")
    [called] = found.tool_calls or ()
    jsonschema.validate(json.loads(called.arguments), SCHEMA)
    for text in ("[1] So", "(a) So", "weather is So", "[fly So"):
        found = begun(text)
        assert found.text.startswith(text)
        assert not found.tool_calls
    wrong = {"glm4": "weather {", "xlam": ' [ {"name": "fly'}.get(name, f" {start}(days=3")
    if CALLS[name].arguments == "parameters":
        wrong = ' {"name": "fly'
    with pytest.raises(RequestError, match="tools does not allow"):
        begun(wrong)


@pytest.mark.parametrize("name", TAGGED)
def test_every_format_with_tags_holds_strict_functions(name: str):
    """The answer begins with the tags of a call, and the rest is sampled."""
    llm = bundled("none")
    begin = CALLS[name].triggers[0]
    ids = llm.tokenizer.encode(f"So. {begin}", add_special_tokens=False)
    options: dict[str, Any] = {"tools": TOOLS[:1], "parallel_tool_calls": False}
    form = format_of(name, **options)
    params = SamplingParams(trace_decode_token_ids=ids, seed=2, **ENDS)
    prompt = {"prompt": "Who?", "answer": form}
    [output] = llm.generate([prompt], params, use_tqdm=False)
    for choice in output.outputs:
        assert choice.finish_reason == "stop"
        assert choice.text.strip() == "So."
        [called] = choice.tool_calls or ()
        assert called.name == "weather"
        jsonschema.validate(json.loads(called.arguments), SCHEMA)
    wrong = llm.tokenizer.encode(f"So. {begin}?", add_special_tokens=False)
    with pytest.raises(RequestError, match="tools does not allow"):
        llm.generate([prompt], SamplingParams(trace_decode_token_ids=wrong), use_tqdm=False)


def format_of(name: str, **options: Any) -> AnswerFormat:
    """Return the format of answers of a model that writes calls in a certain way."""
    choice = tool_choice_of(options["tools"], None, options["parallel_tool_calls"])
    assert choice is not None
    form = AnswerFormat(calls=CALLS[name], names=choice.names, schemas=choice.schemas, most_calls=1)
    return replace(form, parts=parts_of(form, choice, lambda text: None, ""))


def test_the_arguments_of_other_functions_are_free():
    llm = bundled()
    start = '<tool_call>\n{"name": "add", "arguments": {"b": [1]'
    [choice] = answers(tools=TOOLS, parallel_tool_calls=False, **writing(llm, start))
    calls = choice.tool_calls
    assert calls is None or not calls or json.loads(calls[0].arguments)["b"] == [1]
    for text in ('{"name": "fly"', '{"name": "weather", "arguments": {"days"'):
        with pytest.raises(RequestError, match="does not allow trace_decode_token_ids"):
            answers(tools=TOOLS, **writing(llm, f"So.\n<tool_call>\n{text}"))
    answers(tools=TOOLS[1:], **writing(llm, '<tool_call>\n{"name": "fly"'))


def test_a_reasoning_may_quote_a_call():
    llm = bundled()
    text = '<think>I could write <tool_call>{"name": "fly"}.</think>No.'
    [choice] = answers(tools=TOOLS, **{**writing(llm, text), "max_tokens": 60})
    assert choice.reasoning == 'I could write <tool_call>{"name": "fly"}.'
    assert choice.text.startswith("No.")


# The tools that may be called.


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_allowed_tools_are_called():
    llm = bundled("none")
    for choice in answers(llm=llm, tools=TOOLS, tool_choice=allowed("required", "weather")):
        assert {call.name for call in choice.tool_calls or ()} == {"weather"}
    asked = {"tools": TOOLS, "tool_choice": allowed("auto", "add")}
    start = 'So. <tool_call>\n{"name": "'
    answers(llm=llm, **asked, **writing(llm, f"{start}add"))
    with pytest.raises(RequestError, match="tools does not allow trace_decode_token_ids"):
        answers(llm=llm, **asked, **writing(llm, f"{start}weather"))
    prompts = [llm.chat_prompt(USER, tools=TOOLS, tool_choice=each) for each in (None, "auto")]
    prompts.append(llm.chat_prompt(USER, tools=TOOLS, tool_choice=asked["tool_choice"]))
    assert len({prompt["prompt"] for prompt in prompts}) == 1  # so that the prefix is cached


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (allowed("auto", "fly"), "tool_choice.allowed_tools.tools[0] names 'fly'; the tools are"),
        (allowed("none", "add"), "tool_choice.allowed_tools must have a mode, 'auto' or"),
        (allowed("auto"), "tool_choice.allowed_tools.tools must be a list of functions; got []"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools must have a mode"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}},
            "tool_choice.allowed_tools.tools[0] must name a function",
        ),
    ],
)
def test_a_wrong_choice_of_tools_is_refused_by_its_place(choice: Any, message: str):
    with pytest.raises(RequestError, match=re.escape(message)):
        answers(tools=TOOLS, tool_choice=choice)


NOWHERE = {"properties": {"x": {"$ref": "#/nope"}}}
NEVER = {"type": "object", "properties": {"x": {"not": {}}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("choice", "structure"),
    [("required", None), ("auto", None), ("auto", {"regex": "a+"}), ("auto", {"json": NEVER})],
)
@pytest.mark.parametrize(
    ("schema", "reason"),
    [(NOWHERE, "refers to '#/nope'"), (NEVER, "cannot be followed: Unsatisfiable schema")],
)
def test_a_refusal_names_the_function(schema: Any, reason: str, structure: Any, choice: str):
    tools = [*TOOLS, tool("fly", schema, strict=True)]
    with pytest.raises(RequestError) as error:
        answers(tools=tools, tool_choice=choice, structured_outputs=structure)
    assert str(error.value).startswith(f"tools has a schema that {reason}")
    assert str(error.value).endswith("the parameters of the function 'fly'")


def test_a_refusal_names_the_argument_between_tags():
    tags = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "tags": tags}}
    with pytest.raises(RequestError) as error:
        answers(tag="<function= <parameter=", tools=[tool("fly", schema)], tool_choice="required")
    place = "see # of the argument 'tags' in the parameters of the function 'fly'"
    assert str(error.value).startswith("tools has a schema that uses 'uniqueItems'")
    assert str(error.value).endswith(place)


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        ({"regex": "("}, "regex that cannot be followed: invalid regex at column 1 of '('"),
        ({"json": NEVER}, "json schema that cannot be followed: Unsatisfiable schema"),
        ({"json": NOWHERE}, "json schema that cannot be followed: refers to '#/nope'"),
        ({"grammar": "start: %%"}, "grammar that cannot be followed: line 1, column 9"),
        (
            {"structural_tag": {"format": {"type": "xml"}}},
            "structural_tag that cannot be followed: format.type 'xml' is not supported",
        ),
        (
            {"structural_tag": {"structures": [], "triggers": []}},
            "structural_tag that cannot be followed: structures.tags is empty",
        ),
    ],
)
def test_a_refusal_names_the_part_that_the_caller_gave(structure: Any, message: str):
    for more in ({"tools": TOOLS}, {"tools": TOOLS, "opening": OPENINGS["open"]}):
        with pytest.raises(RequestError) as error:
            answers(**more, structured_outputs=structure)
        assert str(error.value).startswith(f"structured_outputs has a {message}")


# Forced calls after reasoning, and the budget alone.


def test_a_forced_call_follows_the_reasoning():
    asked = {"tools": TOOLS, "tool_choice": ADD, "thinking_token_budget": 3}
    for choice in answers(OPENINGS["open"], **asked):
        assert choice.reasoning
        assert (choice.text, [call.name for call in choice.tool_calls or ()]) == ("", ["add"])


@pytest.mark.parametrize("budget", [0, 5])
def test_a_budget_closes_the_reasoning_of_a_text(budget: int):
    llm = bundled()
    closing = llm.tokenizer.encode("</think>", add_special_tokens=False)
    asked = {"temperature": 1.0, "max_tokens": 40}
    free = answers(OPENINGS["open"], **asked)
    for choice, before in zip(
        answers(OPENINGS["open"], **asked, thinking_token_budget=budget), free, strict=True
    ):
        assert choice.token_ids[:budget] == before.token_ids[:budget]
        assert choice.token_ids[budget : budget + len(closing)] == closing
        assert choice.text
        assert choice.reasoning == llm.tokenizer.decode(choice.token_ids[:budget]).strip()


def test_a_budget_without_known_tags_is_refused():
    params = SamplingParams(thinking_token_budget=5)
    message = "thinking_token_budget needs reasoning between known tags"
    with pytest.raises(RequestError, match=message):
        bundled().generate("Once", params, use_tqdm=False)
    with pytest.raises(RequestError, match=message):
        answers(llm=bundled("none"), thinking_token_budget=5)
    with pytest.raises(RequestError, match="thinking_token_budget needs the format of a chat"):
        bundled().engine.add_request([5], params)


# Harmony.


def test_in_channels_the_analysis_comes_before_the_final_message():
    llm = bundled("auto")
    asked = {"tag": "<|channel|>", "llm": llm, "structured_outputs": STRUCTURE}
    start = "<|start|>assistant"
    analysis = f"<|channel|>analysis<|message|>Hm.<|end|>{start}"
    final = "<|channel|>final<|message|>"
    for text in (analysis + final, final):
        [choice] = answers(start, **asked, **writing(llm, text))
        assert choice.reasoning == ("Hm." if text != final else "")
        jsonschema.validate(json.loads(choice.text), SCHEMA)
    call = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    [choice] = answers(start, tools=TOOLS, **asked, **writing(llm, analysis + call))
    assert choice.reasoning == "Hm."
    jsonschema.validate(json.loads((choice.tool_calls or [])[0].arguments), SCHEMA)


START = "<|start|>assistant"
ANALYSIS_OPEN = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
HARMONY_BEGINNINGS = {
    "a call": CALL,
    "a call after analysis": f"{ANALYSIS_OPEN}Hm.<|end|>{START}{CALL}",
    "a call after a preamble": f"<|channel|>commentary<|message|>Hi.<|end|>{START}{CALL}",
    "a recipient after the role": " to=functions.weather<|channel|>commentary json<|message|>",
}


@pytest.mark.parametrize("name", HARMONY_BEGINNINGS)
def test_in_channels_a_strict_function_gets_arguments_of_its_schema(name: str):
    llm = bundled("auto")
    asked = {"tag": "<|channel|>", "llm": llm, "tools": TOOLS, "parallel_tool_calls": False}
    [choice] = answers(START, **asked, **writing(llm, HARMONY_BEGINNINGS[name]))
    assert choice.finish_reason == "stop"
    [call] = choice.tool_calls or ()
    assert call.name == "weather"
    jsonschema.validate(json.loads(call.arguments), SCHEMA)
    assert choice.reasoning == ("Hm." if "analysis" in name else "")
    assert choice.text == ("Hi." if "preamble" in name else "")


def test_in_channels_only_tools_of_the_request_are_called():
    llm = bundled("auto")
    asked = {"tag": "<|channel|>", "llm": llm, "tools": TOOLS}
    [choice] = answers(START, **asked, **{**writing(llm, f"{FINAL}So"), "max_tokens": 20})
    assert choice.text.startswith("So")
    for text in (CALL.replace("weather", "fly"), f'{CALL}{{"days"'):
        with pytest.raises(RequestError, match="tools does not allow trace_decode_token_ids"):
            answers(START, **asked, **writing(llm, text))
    asked["tool_choice"] = allowed("auto", "add")
    with pytest.raises(RequestError, match="tools does not allow trace_decode_token_ids"):
        answers(START, **asked, **writing(llm, CALL))
    answers(START, **asked, **writing(llm, CALL.replace("weather", "add")))


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS[1:]}, {"structured_outputs": STRUCTURE}])
def test_in_channels_a_budget_ends_the_analysis(more: Any):
    llm = bundled("auto")
    asked = {"tag": "<|channel|>", "llm": llm, "thinking_token_budget": 4, **more}
    closing = llm.tokenizer.encode("<|end|>", add_special_tokens=False)
    written = writing(llm, ANALYSIS_OPEN)
    num_begun = len(written["trace_decode_token_ids"])
    [choice] = answers(START, **asked, **{**written, "max_tokens": 200})
    thought = choice.token_ids[num_begun:]
    assert thought[4 : 4 + len(closing)] == closing
    assert (choice.reasoning or "").strip() == llm.tokenizer.decode(thought[:4]).strip()
    assert llm.tokenizer.decode(choice.token_ids).count("analysis") == 1
    for choice in answers(f"{START}{ANALYSIS_OPEN}Hm", **{**asked, "max_tokens": 100}):
        # A character that the budget would cut is finished first.
        assert "<|end|>" in llm.tokenizer.decode(choice.token_ids[: 4 + 3 + len(closing)])


def with_special_tokens(folder: Path, *texts: str) -> LLM:
    """Return the bundled model with other spellings of its special tokens."""
    directory = folder / "model"
    shutil.copytree(Path(mie.__file__).parent / "assets/tiny", directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        path = directory / name
        text = path.read_text(encoding="utf-8")
        for old, new in zip(("<|system|>", "<|user|>", "<|assistant|>"), texts, strict=False):
            text = text.replace(json.dumps(old), json.dumps(new))
        path.write_text(text, encoding="utf-8")
    return LLM(directory, num_threads=1, reasoning_parser="auto")


def test_reasoning_may_begin_with_a_special_token_and_a_text(tmp_path: Path):
    """Gemma 4 opens its reasoning so."""
    llm = with_special_tokens(tmp_path, "<|channel>", "<channel|>")
    asked = {"llm": llm, "tag": "<|channel>thought <channel|>", "structured_outputs": STRUCTURE}
    [choice] = answers(**asked, **writing(llm, "<|channel>thought\nHm."), thinking_token_budget=9)
    assert choice.reasoning
    assert choice.reasoning.startswith("Hm.")
    jsonschema.validate(json.loads(choice.text), SCHEMA)
    [choice] = answers(**asked, **writing(llm, '{"place":"l'))
    assert (choice.reasoning, json.loads(choice.text)["place"]) == ("", "lake")


def test_in_channels_the_tags_may_be_special_tokens(tmp_path: Path):
    llm = with_special_tokens(tmp_path, "<|channel|>", "<|message|>", "<|constrain|>")
    asked = {"llm": llm, "tag": "<|channel|>", "tools": TOOLS, "parallel_tool_calls": False}
    for text in HARMONY_BEGINNINGS.values():
        [choice] = answers(START, **asked, **writing(llm, text))
        [call] = choice.tool_calls or ()
        jsonschema.validate(json.loads(call.arguments), SCHEMA)
    own = "<|channel|>analysis to=browser.search code<|message|>{}"
    described = f"\n\n## browser\n{START}"
    [choice] = answers(described, **asked, **{**writing(llm, own), "max_tokens": 30})
    assert (choice.reasoning or "").startswith("{}")
    for opening, text in ((START, own), (described, own.replace("browser", "functions"))):
        with pytest.raises(RequestError, match="tools does not allow trace_decode_token_ids"):
            answers(opening, **asked, **writing(llm, text))
