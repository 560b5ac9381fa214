"""Structured outputs in every dialect: schemas, choices, and log-probabilities."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES: list[Any] = [{"role": "user", "content": "Tell me a story about Mia the otter."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "animal": {"enum": ["fox", "otter", "owl"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["animal", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
BODY: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Once upon a time", "max_tokens": 60, "seed": 1, "temperature": 5},
    CHAT: {"messages": MESSAGES, "max_tokens": 60, "seed": 1, "temperature": 5},
}
BOTH = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])


class Record(BaseModel):
    """A record of a story."""

    name: Literal["Mia", "Tom", "Nora"]
    animal: Literal["fox", "otter", "owl"]
    age: int = Field(ge=1, le=99)


def text_of(choice: dict[str, Any]) -> str:
    found = choice.get("text")
    return choice["message"]["content"] if found is None else found


ONE = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
HI: list[Any] = [{"role": "user", "content": "hi"}]
STRICT: dict[str, Any] = {
    COMPLETIONS: lambda own: {
        "prompt": "hi",
        "max_tokens": 16,
        "response_format": {"type": "json_schema", "json_schema": {"name": "one", **own}},
    },
    CHAT: lambda own: {
        "messages": HI,
        "max_tokens": 16,
        "response_format": {"type": "json_schema", "json_schema": {"name": "one", **own}},
    },
    RESPONSES: lambda own: {
        "input": "hi",
        "max_output_tokens": 16,
        "text": {"format": {"type": "json_schema", "name": "one", **own}},
    },
    "/v1/messages": lambda own: {
        "messages": HI,
        "max_tokens": 16,
        "output_config": {"format": {"type": "json_schema", **own}},
    },
}


def text_of_any(answer: dict[str, Any]) -> str:
    if "choices" in answer:
        return text_of(answer["choices"][0])
    whole = answer["output"][0] if "output" in answer else answer
    return whole["content"][0]["text"]


@pytest.mark.parametrize("path", STRICT)
def test_objects_are_closed_unless_strict_is_false(server, path):
    """After the property that the schema names, a greedy model invents another where it may."""
    for strict in ({}, {"strict": None}, {"strict": True}):
        body = STRICT[path]({"schema": ONE, **strict})
        assert text_of_any(server.ask(path, **body, temperature=0)) == '{"a":1}', strict
        said = STRICT[path]({"schema": {**ONE, "additionalProperties": True}, **strict})
        assert text_of_any(server.ask(path, **said, temperature=0)).startswith('{"a":1,'), strict
    body = STRICT[path]({"schema": ONE, "strict": False})
    assert text_of_any(server.ask(path, **body, temperature=0)).startswith('{"a":1,')


@pytest.mark.parametrize("strict", [{}, {"strict": True}, {"strict": False}], ids=str)
def test_forced_calls_follow_the_closed_schema_whether_strict_or_not(server, strict):
    tool = {"name": "one", "parameters": ONE, **strict}
    chat = {"messages": MESSAGES, "max_tokens": 40, "temperature": 0, "tool_choice": "required"}
    answer = server.ask(CHAT, **chat, tools=[{"type": "function", "function": tool}])
    [call] = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a":1}'
    own = {"input": "hi", "max_output_tokens": 40, "temperature": 0, "tool_choice": "required"}
    [call] = server.ask(RESPONSES, **own, tools=[{"type": "function", **tool}])["output"]
    assert call["arguments"] == '{"a":1}'
    tool = {"name": "one", "input_schema": ONE, **strict}
    chat = {
        "messages": MESSAGES,
        "max_tokens": 40,
        "temperature": 0,
        "tool_choice": {"type": "any"},
    }
    [block] = server.ask("/v1/messages", **chat, tools=[tool])["content"]
    assert block["input"] == {"a": 1}


@BOTH
def test_every_choice_is_json_that_the_schema_accepts(server, path):
    answer = server.ask(path, **BODY[path], n=3, response_format=FORMAT)
    for choice in answer["choices"]:
        value = json.loads(text_of(choice))
        assert value.keys() == {"animal", "age"}
        assert value["animal"] in ("fox", "otter", "owl")
        assert choice["finish_reason"] == "stop"
    chunks = server.stream(path, **BODY[path], n=3, response_format=FORMAT)
    for index, choice in enumerate(answer["choices"]):
        own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        pieces = [each.get("text") or each.get("delta", {}).get("content", "") for each in own]
        assert "".join(pieces) == text_of(choice)


@BOTH
def test_an_object_of_a_schema_as_llama_cpp_asks_for_it(server, path):
    asked = {"type": "json_object", "schema": dict(SCHEMA)}
    answer = server.post(path, **BODY[path], response_format=asked)
    assert "x-mie-ignored" not in answer.headers
    value = json.loads(text_of(answer.json()["choices"][0]))
    assert value.keys() == {"animal", "age"}
    del asked["schema"]["type"]  # an object is meant all the same
    [choice] = server.ask(path, **BODY[path], response_format=asked)["choices"]
    assert json.loads(text_of(choice)).keys() == {"animal", "age"}


@BOTH
def test_vllms_field(server, path):
    for given, texts in (
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[ab]c"}, {"ac", "bc"}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
        ({"json": {"const": {"a": [1, 2]}}}, {'{"a":[1,2]}'}),
    ):
        answer = server.ask(path, **BODY[path], structured_outputs=given)
        assert text_of(answer["choices"][0]) in texts


def test_openais_parse_gives_the_model_of_a_chat(client):
    completion = client.chat.completions.parse(
        model="bundled", messages=MESSAGES, response_format=Record, max_tokens=100
    )
    message = completion.choices[0].message
    assert isinstance(message.parsed, Record)
    assert message.content == message.parsed.model_dump_json()
    with client.chat.completions.stream(
        model="bundled", messages=MESSAGES, response_format=Record, max_tokens=100
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Record)


def test_openais_parse_gives_the_model_of_a_response(client):
    response = client.responses.parse(model="bundled", input=MESSAGES, text_format=Record)
    assert isinstance(response.output_parsed, Record)
    assert response.text.format.type == "json_schema"


def test_a_schema_of_anthropics_field_holds(claude):
    message = claude.messages.create(
        model="bundled",
        max_tokens=100,
        messages=MESSAGES,
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
    )
    assert json.loads(message.content[0].text).keys() == {"animal", "age"}
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        (150, "it nests more than 124 levels deep, which is the limit"),
        (5000, "the body nests more than 200 levels of objects and lists, which is the limit"),
    ],
)
def test_a_deep_schema_is_refused_by_its_depth(server, depth, message):
    schema = '{"items":' * depth + "{}" + "}" * depth
    body = f'{{"prompt": "a", "structured_outputs": {{"json": {schema}}}}}'
    headers = {"content-type": "application/json"}
    answer = server.client.post(COMPLETIONS, content=body, headers=headers)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
