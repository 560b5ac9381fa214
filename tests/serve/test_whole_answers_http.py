"""Whole answers over HTTP: structural tags, allowed tools, tools beside a schema, and budgets."""

from __future__ import annotations

import json
import re
from enum import Enum
from typing import Any

import jsonschema
import pytest
from accepted_texts import SQL
from lazy_module import lazy_module
from live_server import live
from pydantic import BaseModel

from mie import AsyncLLM
from mie.serve.config import ServeConfig

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

anthropic, openai = lazy_module("anthropic"), lazy_module("openai")

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER: list[Any] = [{"role": "user", "content": "How is the weather at the mill?"}]
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["lake", "mill"]}},
    "required": ["place"],
}
SUM = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE, "strict": True}},
    {"type": "function", "function": {"name": "add", "parameters": SUM}},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE}}


@pytest.fixture(scope="module")
def thinking():
    """A server of a model with a template that begins the reasoning."""
    engine = AsyncLLM("bundled", reasoning_parser="qwen3", num_blocks=512)
    template = "{{ messages[0].content }}{% if tools %}{{ tools[0].function.name }}{% endif %}"
    config = ServeConfig(chat_template=template + "<think>\n{# <tool_call> #}")
    with live(engine, config) as url:
        yield url
    engine.shutdown()


@pytest.fixture
def reasoner(thinking):
    with openai.OpenAI(base_url=f"{thinking}/v1", api_key="unused") as client:
        yield client


def joined(chunks: list[Any], index: int) -> tuple[str, str, str, Any]:
    """Return the text, the reasoning, the arguments and the reason of a streamed choice."""
    text = reasoning = arguments = ""
    reason = None
    for choice in (each for chunk in chunks for each in chunk.choices if each.index == index):
        text += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning", None) or ""
        arguments += "".join(
            call.function.arguments or "" for call in choice.delta.tool_calls or ()
        )
        reason = choice.finish_reason or reason
    return text, reasoning, arguments, reason


def answers(client: Any, **asked: Any) -> list[Any]:
    """Return the choices of a chat. A stream must have the same."""
    asked = {"model": "bundled", "messages": USER, "seed": 1, "n": 6, **asked}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for choice in whole.choices:
        message = choice.message
        calls = "".join(call.function.arguments for call in message.tool_calls or ())
        reasoning = getattr(message, "reasoning", None) or ""
        expected = message.content or "", reasoning, calls, choice.finish_reason
        assert joined(chunks, choice.index) == expected
    return whole.choices


# Structural tags.

OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=get_weather>", "schema": PLACE, "end": "</function>"},
        {"begin": "<function=add>", "schema": SUM, "end": "</function>"},
    ],
    "triggers": ["<function="],
}
CALL = {
    "type": "tag",
    "begin": "<function=get_weather>",
    "content": {"type": "json_schema", "json_schema": PLACE},
    "end": "</function>",
}
NEWER = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<function="],
        "tags": [CALL],
        "at_least_one": True,
        "stop_after_first": True,
    },
}
FOUND = re.compile(r"<function=get_weather>(.*)</function>")


def test_a_response_format_may_be_a_structural_tag(client):
    for choice in answers(client, response_format=NEWER, temperature=1000, max_tokens=80):
        found = FOUND.fullmatch(choice.message.content)
        assert choice.finish_reason == "stop"
        assert found is not None
        jsonschema.validate(json.loads(found[1]), PLACE)
    for given in (OLDER, {"type": "structural_tag", "format": {"type": "any_text"}}):
        for choice in answers(client, response_format=given, max_tokens=8):
            assert choice.message.content


@pytest.mark.parametrize("written", [json.dumps, dict])
def test_structured_outputs_take_a_structural_tag(client, written: Any):
    given = {"structural_tag": written(NEWER), "disable_additional_properties": True}
    body = {"structured_outputs": given}
    for choice in answers(client, extra_body=body, temperature=1000, max_tokens=80):
        assert FOUND.fullmatch(choice.message.content)


def test_a_wrong_structural_tag_is_refused_by_its_place(server):
    form = {"type": "sequence", "elements": [{"type": "xml"}]}
    for field, given in (
        ("response_format", {"type": "structural_tag", "format": form}),
        ("structured_outputs", {"structural_tag": {"format": form}}),
    ):
        error = server.refused(CHAT, messages=USER, **{field: given})
        assert error["param"] == field
        assert "format.elements[0].type 'xml' is not supported" in error["message"]
    error = server.refused(CHAT, messages=USER, response_format={"type": "structural_tag"})
    assert error["param"].startswith("response_format")


# Tools.


def test_tools_stand_beside_a_schema(client):
    kinds = set()
    for choice in answers(
        client,
        tools=TOOLS,
        response_format=FORMAT,
        parallel_tool_calls=False,
        temperature=1000,
        n=8,
        max_tokens=100,
    ):
        message = choice.message
        kinds.add(choice.finish_reason)
        if message.tool_calls:
            [call] = message.tool_calls
            schema = {"weather": PLACE, "add": SUM}[call.function.name]
            jsonschema.validate(json.loads(call.function.arguments), schema)
        else:
            jsonschema.validate(json.loads(message.content), PLACE)
    assert kinds == {"stop", "tool_calls"}


def test_a_schema_beside_a_forced_call_is_refused(server):
    asked = {"messages": USER, "tools": TOOLS, "response_format": FORMAT}
    error = server.refused(CHAT, **asked, tool_choice="required")
    assert error["param"] == "response_format"
    assert "a call that is forced exclude each other" in error["message"]


def test_only_allowed_tools_are_called(client, server):
    add = {"type": "function", "function": {"name": "add"}}
    allowed: dict[str, Any] = {"mode": "required", "tools": [add]}
    chosen = {"type": "allowed_tools", "allowed_tools": allowed}
    found = answers(
        client, tools=TOOLS, tool_choice=chosen, parallel_tool_calls=False, max_tokens=60
    )
    for choice in found:
        assert [call.function.name for call in choice.message.tool_calls] == ["add"]
    flat = {"type": "allowed_tools", "mode": "required"}
    response = client.responses.create(
        model="bundled",
        input=USER,
        tools=[{"type": "function", **tool["function"]} for tool in TOOLS],
        tool_choice={**flat, "tools": [{"type": "function", "name": "add"}]},
        parallel_tool_calls=False,
    )
    assert [(item.type, item.name) for item in response.output] == [("function_call", "add")]
    allowed["tools"] = [{"type": "function", "function": {"name": "fly"}}]
    error = server.refused(CHAT, messages=USER, tools=TOOLS, tool_choice=chosen)
    assert "tool_choice.allowed_tools.tools[0] names 'fly'" in error["message"]
    allowed["mode"] = "none"
    error = server.refused(CHAT, messages=USER, tools=TOOLS, tool_choice=chosen)
    assert error["param"].startswith("tool_choice")


def test_a_strict_function_leaves_text_free(client):
    """The texts are those without tools that restrict nothing, but for special tokens."""
    asked = {"temperature": 0, "n": 1, "max_tokens": 12}
    [strict] = answers(client, tools=TOOLS, **asked)
    loose = [{**tool, "function": {**tool["function"], "strict": False}} for tool in TOOLS]
    [free] = answers(client, tools=loose, **asked)
    assert strict.message.content == free.message.content


# Custom tools.

SUMS = 'start: INT (PLUS INT){0,2}\nINT: /[0-9]{1,3}/\nPLUS: " + "\n'
LARK: dict[str, Any] = {"syntax": "lark", "definition": SUMS}
SAYS = r"say \"[a-c]{1,3}\n"
REGEX: dict[str, Any] = {"syntax": "regex", "definition": SAYS}
CUSTOM: list[Any] = [
    {"name": "sum", "description": "Add numbers.", "format": {"type": "grammar", "grammar": LARK}},
    {"name": "say", "format": {"type": "grammar", "grammar": REGEX}},
]
FLAT: list[Any] = [
    {"type": "custom", "name": "sum", "format": {"type": "grammar", **LARK}},
    {"type": "custom", "name": "say", "format": {"type": "grammar", **REGEX}},
]
INPUTS = {"sum": r"\d{1,3}( \+ \d{1,3}){0,2}", "say": SAYS}


def test_a_chat_calls_custom_tools_whole_and_streamed(client):
    asked: dict[str, Any] = {
        "model": "bundled",
        "messages": USER,
        "tools": [{"type": "custom", "custom": each} for each in CUSTOM] + TOOLS,
        "tool_choice": "required",
        "temperature": 1000,
        "max_tokens": 200,
        "n": 6,
    }
    whole = client.chat.completions.create(**asked, seed=2, parallel_tool_calls=False)
    stream = client.chat.completions.create(**asked, seed=2, parallel_tool_calls=False, stream=True)
    streamed: dict[int, list[str]] = {index: ["", "", ""] for index in range(6)}
    for choice in (each for chunk in stream for each in chunk.choices):
        for call in choice.delta.tool_calls or ():
            custom = getattr(call, "custom", None) or {}
            of = streamed[choice.index]
            of[0] = call.type or of[0]
            of[1] += custom.get("name", "") if custom else (call.function.name or "")
            of[2] += custom.get("input", "") if custom else (call.function.arguments or "")
    kinds = set()
    for choice in whole.choices:
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        kinds.add(call.type)
        if call.type == "custom":
            assert re.fullmatch(INPUTS[call.custom.name], call.custom.input)
            found = [call.type, call.custom.name, call.custom.input]
        else:
            found = [call.type, call.function.name, call.function.arguments]
        assert streamed[choice.index] == found
    assert kinds == {"custom", "function"}
    call = next(each for each in whole.choices if each.message.tool_calls[0].type == "custom")
    history = [
        *USER,
        call.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.message.tool_calls[0].id, "content": "3"},
    ]
    again = client.chat.completions.create(**{**asked, "messages": history, "n": 1})
    assert again.choices[0].message.tool_calls


def test_a_response_calls_custom_tools_whole_and_streamed(client):
    asked: dict[str, Any] = {
        "model": "bundled",
        "input": USER,
        "tools": FLAT,
        "tool_choice": {"type": "custom", "name": "sum"},
        "max_output_tokens": 200,
        "extra_body": {"seed": 4},
    }
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    [item] = whole.output
    assert (item.type, item.name) == ("custom_tool_call", "sum")
    assert re.fullmatch(INPUTS["sum"], item.input)
    [done] = [each.input for each in events if each.type.endswith("custom_tool_call_input.done")]
    deltas = [each.delta for each in events if each.type.endswith("custom_tool_call_input.delta")]
    assert done == item.input == "".join(deltas)
    assert events[-1].response.output[0].input == item.input
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "3"}
    history = [*USER, item.model_dump(exclude_none=True), result]
    again = client.responses.create(**{**asked, "input": history})
    assert again.output[0].type == "custom_tool_call"


def test_a_response_has_a_maximum_number_of_calls(server):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"input": USER, "tools": tools, "tool_choice": "required", "temperature": 2}
    for most in (1, 2):
        found = server.ask(RESPONSES, **asked, seed=3, max_tool_calls=most, max_output_tokens=300)
        assert found["max_tool_calls"] == most
        assert 1 <= len(found["output"]) <= most
    error = server.refused(RESPONSES, **asked, max_tool_calls=0)
    assert error["param"] == "max_tool_calls"


def test_a_wrong_custom_tool_is_refused_by_its_field(server):
    wrong = {"type": "custom", "custom": {"name": "f", "format": {"type": "grammar"}}}
    error = server.refused(CHAT, messages=USER, tools=[wrong])
    assert error["message"].startswith("tools.0.custom.format.grammar is missing")
    wrong["custom"]["format"] = {
        "type": "grammar",
        "grammar": {"syntax": "lark", "definition": "start: nope"},
    }
    error = server.refused(CHAT, messages=USER, tools=[wrong])
    assert error["param"] == "tools"
    assert "see the grammar of the custom tool 'f'" in error["message"]


# Reasoning.


def test_a_schema_follows_the_reasoning(reasoner):
    body = {"thinking_token_budget": 5}
    for choice in answers(reasoner, response_format=FORMAT, extra_body=body):
        assert choice.message.reasoning
        jsonschema.validate(json.loads(choice.message.content), PLACE)
        assert choice.finish_reason == "stop"


def test_a_parsed_model_follows_the_reasoning(reasoner):
    class Weather(BaseModel):
        """A place."""

        place: Enum("Place", {"lake": "lake", "mill": "mill"})  # type: ignore[valid-type]

    completion = reasoner.chat.completions.parse(
        model="bundled",
        messages=USER,
        response_format=Weather,
        extra_body={"thinking_token_budget": 5},
    )
    message = completion.choices[0].message
    assert message.parsed.place.value in ("lake", "mill")
    assert message.reasoning


def test_a_message_has_a_budget_for_its_thinking(thinking):
    with anthropic.Anthropic(base_url=thinking, api_key="unused") as client:
        asked: dict[str, Any] = {
            "model": "bundled",
            "max_tokens": 60,
            "messages": USER,
            "thinking": {"type": "enabled", "budget_tokens": 5},
            "output_config": {"format": {"type": "json_schema", "schema": PLACE}},
        }
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking", "text"]
        jsonschema.validate(json.loads(message.content[1].text), PLACE)
        assert message.stop_reason == "end_turn"


def test_a_budget_without_tags_is_refused_or_named(server):
    error = server.refused(CHAT, messages=USER, thinking_token_budget=5)
    assert "thinking_token_budget needs reasoning between known tags" in error["message"]
    error = server.refused("/v1/completions", prompt="a", thinking_token_budget=5)
    assert "thinking_token_budget needs reasoning between known tags" in error["message"]
    thinking = {"type": "enabled", "budget_tokens": 5}
    answer = server.post(MESSAGES, messages=USER, max_tokens=4, thinking=thinking)
    assert "thinking.budget_tokens" in answer.headers["x-mie-ignored"]


# What vLLM's guide shows, with another model.


class CarType(str, Enum):
    """Kinds of cars."""

    sedan = "sedan"
    suv = "SUV"
    coupe = "Coupe"


class Car(BaseModel):
    """A car."""

    brand: str
    car_type: CarType


def test_the_examples_of_vllms_guide_run(client):
    def ask(given: dict[str, Any], **more: Any) -> str:
        asked = {"model": client.models.list().data[0].id, "messages": USER, "max_tokens": 60}
        completion = client.chat.completions.create(
            **asked, seed=3, extra_body={"structured_outputs": given}, **more
        )
        return completion.choices[0].message.content

    assert ask({"choice": ["positive", "negative"]}) in ("positive", "negative")
    mail = ask({"regex": r"[a-z]{1,9}@[a-z]{1,9}\.com\n"}, stop=["\n"])
    assert re.fullmatch(r"[a-z]+@[a-z]+\.com", mail)
    text = ask({"grammar": SQL})
    assert re.fullmatch(r"SELECT col_\d  from table_\d  where col_\d = \d ", text)
    completion = client.chat.completions.create(
        model="bundled",
        messages=USER,
        seed=3,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "car", "schema": Car.model_json_schema()},
        },
    )
    content = completion.choices[0].message.content
    if completion.choices[0].finish_reason == "stop":
        Car.model_validate_json(content)
    else:
        assert content.startswith('{"brand":"')
