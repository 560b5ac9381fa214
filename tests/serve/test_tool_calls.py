"""Calls of tools over HTTP: their shapes, whole and streamed, in three dialects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lazy_module import lazy_module
from live_server import live
from pydantic import BaseModel, Field
from scripted_answers import answering

from mie import AsyncLLM, CompletionOutput
from mie.serve.config import ServeConfig
from mie.serve.parts import Parts
from mie.text.tools.definitions import ToolCall

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

anthropic, openai = lazy_module("anthropic"), lazy_module("openai")

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
USER: list[Any] = [{"role": "user", "content": "Who lives at the mill?"}]
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["lake", "mill"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["place", "days"],
}
SUM = {
    "type": "object",
    "properties": {name: {"type": "integer", "minimum": 0, "maximum": 99} for name in "ab"},
    "required": ["a", "b"],
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "add", "parameters": SUM, "description": "Add."}},
]
ADD = {"type": "function", "function": {"name": "add"}}
BODY: dict[str, Any] = {"messages": USER, "tools": TOOLS, "max_tokens": 120, "seed": 3}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'


def of_chat(answer: dict[str, Any]) -> tuple[dict[str, Any], str]:
    [choice] = answer["choices"]
    return choice["message"], choice["finish_reason"]


def metric(server: Any, name: str) -> float:
    lines = server.get("/metrics").text.splitlines()
    [line] = [each for each in lines if each.startswith(f"{name}_total")]
    return float(line.rpartition(" ")[2])


# Chats.


@pytest.mark.parametrize("seed", [1, 2])
def test_a_named_function_is_called_once(server, seed):
    asked = {**BODY, "seed": seed, "temperature": 5, "n": 3}
    for choice in server.ask(CHAT, **asked, tool_choice=ADD)["choices"]:
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]).keys() == {"a", "b"}
        assert choice["finish_reason"] == "tool_calls"


def test_a_stream_has_openais_deltas(server):
    asked = {**BODY, "tool_choice": ADD}
    [expected] = of_chat(server.ask(CHAT, **asked))[0]["tool_calls"]
    chunks = server.stream(CHAT, **asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    [begun], *pieces = [delta["tool_calls"] for delta in deltas[1:-1]]
    assert begun.pop("id").startswith("call_")
    assert begun == {"index": 0, "type": "function", "function": {"name": "add", "arguments": ""}}
    for [piece] in pieces:
        assert piece.keys() == {"index", "function"}
        assert piece["function"].keys() == {"arguments"}
    assert pieces
    joined = "".join(piece["function"]["arguments"] for [piece] in pieces)
    assert joined == expected["function"]["arguments"]


def test_without_a_choice_the_model_may_answer_with_text(server):
    asked = {**BODY, "max_tokens": 8}
    message, reason = of_chat(server.ask(CHAT, **asked))
    assert message["content"]
    assert "tool_calls" not in message
    assert reason in ("stop", "length")
    plain = server.ask(CHAT, **{**asked, "tools": None})
    none = server.ask(CHAT, **asked, tool_choice="none")
    assert none["choices"] == plain["choices"]


def test_calls_that_the_model_writes_are_read(server):
    before = metric(server, "mie:tool_calls")
    with answering(server.engine, f"I add.\n\n{CALL}\n{CALL}"):
        whole = server.ask(CHAT, **BODY)
        chunks = server.stream(CHAT, **BODY)
        one = server.ask(CHAT, **BODY, parallel_tool_calls=False)
    message, reason = of_chat(whole)
    assert (message["content"], reason) == ("I add.", "tool_calls")
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "add", "arguments": '{"a": 1, "b": 2}'}] * 2
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
    streamed = [each for delta in deltas for each in delta.get("tool_calls", ())]
    assert [each["index"] for each in streamed] == [0, 0, 1, 1]
    assert metric(server, "mie:tool_calls") == before + 5
    message, _ = of_chat(one)
    assert len(message["tool_calls"]) == 1
    assert message["content"] == f"I add.\n{CALL}"


def test_what_is_no_call_stays_text_and_is_counted(server):
    before = metric(server, "mie:tool_calls_unparsed")
    text = 'See <tool_call>{"name": "fly", "arguments": {}}</tool_call>.'
    with answering(server.engine, text):
        message, reason = of_chat(server.ask(CHAT, **BODY))
        chunks = server.stream(CHAT, **BODY)
    assert (message["content"], reason) == (text, "stop")
    assert "tool_calls" not in message
    contents = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(contents) == text
    assert metric(server, "mie:tool_calls_unparsed") == before + 2


def test_an_answer_that_is_cut_has_a_call_that_is_cut(server):
    asked = {**BODY, "tool_choice": ADD}
    [whole] = of_chat(server.ask(CHAT, **asked))[0]["tool_calls"]
    asked["max_tokens"] = 34
    message, reason = of_chat(server.ask(CHAT, **asked))
    assert reason == "length"
    [cut] = message["tool_calls"]
    assert whole["function"]["arguments"].startswith(cut["function"]["arguments"])
    assert cut["function"]["arguments"] != whole["function"]["arguments"]


def test_a_call_that_a_stop_string_cuts_is_no_call(server):
    """A client that sees "tool_calls" reads the arguments, and runs the tool with them."""
    asked = {**BODY, "tool_choice": ADD}
    [call] = of_chat(server.ask(CHAT, **asked))[0]["tool_calls"]
    whole = call["function"]["arguments"]
    for stop, reason in ((whole[:-2], "stop"), (whole[-2:], "stop"), ("never", "tool_calls")):
        message, found = of_chat(server.ask(CHAT, **asked, stop=stop))
        assert found == reason
        chunks = server.stream(CHAT, **asked, stop=stop)
        assert chunks[-1]["choices"][0]["finish_reason"] == reason
        for cut in message.get("tool_calls", ()):
            assert (cut["function"]["arguments"] == whole) == (reason == "tool_calls")


def test_a_whole_call_before_a_stop_string_is_a_call(server):
    with answering(server.engine, f"{CALL}\nEND and more"):
        message, reason = of_chat(server.ask(CHAT, **BODY, stop="END"))
        chunks = server.stream(CHAT, **BODY, stop="END")
    assert (len(message["tool_calls"]), reason) == (1, "tool_calls")
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_rest_of_a_call_that_comes_with_text_is_the_same_call():
    """A slow reader gets outputs merged: here, the rest of a call with the text after it."""

    def call(arguments: str) -> ToolCall:
        return ToolCall(index=0, id="call_1", name="add", arguments=arguments)

    parts = Parts()
    events = [
        *parts.add(CompletionOutput(index=0, tool_calls=[call('{"a": ')])),
        *parts.add(CompletionOutput(index=0, text="Done.", tool_calls=[call("1}")])),
        *parts.end(),
    ]
    assert [(event.what, event.part.kind, event.text) for event in events] == [
        ("begin", "call", ""),
        ("grow", "call", '{"a": '),
        ("grow", "call", "1}"),
        ("end", "call", ""),
        ("begin", "text", ""),
        ("grow", "text", "Done."),
        ("end", "text", ""),
    ]


def test_log_probabilities_are_those_of_all_tokens(server):
    asked = {**BODY, "tool_choice": ADD, "logprobs": True, "return_token_ids": True}
    choice = server.ask(CHAT, **asked)["choices"][0]
    chunks = server.stream(CHAT, **asked)
    streamed = [
        each
        for chunk in chunks
        for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == choice["logprobs"]["content"]
    ids = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    assert ids == choice["token_ids"]


def test_a_prompt_has_the_tools_and_their_results(server):
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    found = server.ask("/apply-template", messages=messages, tools=TOOLS)["prompt"]
    assert found == (
        "<|bos|><|system|>You may call: weather add<|user|>Who lives at the mill?<|assistant|>"
        '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|eos|><|user|>42<|assistant|>'
    )
    counted = server.ask("/tokenize", messages=messages, tools=TOOLS)["count"]
    answer = server.ask(CHAT, **{**BODY, "messages": messages, "max_tokens": 1})
    assert answer["usage"]["prompt_tokens"] == counted


def test_a_template_that_writes_neither_tools_nor_messages_refuses_them(server):
    template = "{{ messages[0]['role'] }}"
    with live(server.engine, ServeConfig(chat_template=template)) as url:
        answer = server.client.post(f"{url}{CHAT}", json=BODY)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "tools")
    assert "tools are written neither by this model's chat template, nor in" in error["message"]


def test_a_message_states_the_tools_where_the_template_has_none(server):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    history = [
        *BODY["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    with live(server.engine, ServeConfig(chat_template=template)) as url:
        for messages in (BODY["messages"], history):
            for choice in ("auto", "required", {"type": "function", "function": {"name": "add"}}):
                body = {**BODY, "messages": messages, "tool_choice": choice}
                answer = server.client.post(f"{url}{CHAT}", json=body)
                assert answer.status_code == 200, answer.text
                calls = answer.json()["choices"][0]["message"].get("tool_calls")
                assert choice == "auto" or calls


# Clients.


class Weather(BaseModel):
    """Tell the weather."""

    place: str = Field(pattern="^(lake|mill)$")


class Add(BaseModel):
    """Add two numbers."""

    a: int = Field(ge=0, le=99)
    b: int = Field(ge=0, le=99)


FUNCTIONS = {"Weather": lambda place: f"Rain at the {place}.", "Add": lambda a, b: str(a + b)}


def test_openais_loop_calls_two_tools(client):
    tools = [openai.pydantic_function_tool(each) for each in (Weather, Add)]
    messages = [*USER]
    called = set()
    for name in FUNCTIONS:
        completion = client.chat.completions.parse(
            model="bundled",
            messages=messages,
            tools=tools,
            tool_choice={"type": "function", "function": {"name": name}},
            max_tokens=120,
        )
        message = completion.choices[0].message
        assert completion.choices[0].finish_reason == "tool_calls"
        messages.append(message)
        for call in message.tool_calls:
            arguments = call.function.parsed_arguments
            assert isinstance(arguments, (Weather, Add))
            called.add(call.function.name)
            result = FUNCTIONS[call.function.name](**arguments.model_dump())
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert called == {"Weather", "Add"}
    final = client.chat.completions.create(
        model="bundled", messages=messages, tools=tools, max_tokens=8, temperature=0
    )
    assert final.choices[0].message.content
    assert final.choices[0].message.tool_calls is None


OF_RESPONSES: list[Any] = [{"type": "function", **each["function"]} for each in TOOLS]


def test_openais_loop_of_responses(client):
    first = client.responses.create(
        model="bundled",
        input=USER,
        tools=OF_RESPONSES,
        tool_choice={"type": "function", "name": "add"},
    )
    [call] = first.output
    assert (call.type, call.name, call.status) == ("function_call", "add", "completed")
    arguments = json.loads(call.arguments)
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": str(arguments["a"] + arguments["b"]),
    }
    second = client.responses.create(
        model="bundled",
        input=[*USER, call.model_dump(), result],
        tools=OF_RESPONSES,
        max_output_tokens=8,
        extra_body={"seed": 1},
    )
    assert second.output_text
    assert [tool.name for tool in second.tools] == ["weather", "add"]


def test_a_streamed_response_has_the_events_of_its_items(client, server):
    with answering(server.engine, f"I add.\n{CALL}\n{CALL}"):
        events = list(
            client.responses.create(model="bundled", input=USER, tools=OF_RESPONSES, stream=True)
        )
    kinds = [event.type.removeprefix("response.") for event in events]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    text = kinds.index("output_text.done")
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[text : text + 3] == ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[text + 3 :] == [*call, *call, "completed"]
    response = events[-1].response
    assert [item.type for item in response.output] == ["message", *["function_call"] * 2]
    assert response.output_text == "I add."
    assert len({item.id for item in response.output}) == 3
    assert [event.sequence_number for event in events] == [*range(len(events))]


# Anthropic's.

OF_ANTHROPIC: list[Any] = [
    {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
    for each in TOOLS
]


def test_anthropics_loop_calls_two_tools(claude):
    asked: dict[str, Any] = {"model": "bundled", "max_tokens": 120, "tools": OF_ANTHROPIC}
    messages = [*USER]
    for name in ("weather", "add"):
        message = claude.messages.create(
            **asked, messages=messages, tool_choice={"type": "tool", "name": name}
        )
        assert message.stop_reason == "tool_use"
        [block] = message.content
        assert (block.type, block.name) == ("tool_use", name)
        assert isinstance(block.input, dict)
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "42"}
        messages.append({"role": "assistant", "content": message.content})
        messages.append({"role": "user", "content": [result]})
    final = claude.messages.create(**{**asked, "max_tokens": 8}, messages=messages)
    assert [block.type for block in final.content] == ["text"]
    counted = claude.messages.count_tokens(model="bundled", tools=OF_ANTHROPIC, messages=messages)
    usage = final.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_any_and_none_and_one_call(claude):
    asked: dict[str, Any] = {
        "model": "bundled",
        "max_tokens": 200,
        "messages": USER,
        "tools": OF_ANTHROPIC,
    }
    some = claude.messages.create(**asked, tool_choice={"type": "any"})
    assert {block.type for block in some.content} == {"tool_use"}
    one = claude.messages.create(
        **asked, tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    assert len(one.content) == 1
    none = claude.messages.create(**{**asked, "max_tokens": 8}, tool_choice={"type": "none"})
    assert [block.type for block in none.content] == ["text"]


def test_a_streamed_message_has_blocks_one_after_another(claude, server):
    asked: dict[str, Any] = {
        "model": "bundled",
        "max_tokens": 200,
        "messages": USER,
        "tools": OF_ANTHROPIC,
    }
    with answering(server.engine, f"I add.\n{CALL}\n{CALL}"):
        whole = claude.messages.create(**asked)
        events = list(claude.messages.create(**asked, stream=True))
        with claude.messages.stream(**asked) as stream:
            final = stream.get_final_message()
    assert [block.type for block in whole.content] == ["text", "tool_use", "tool_use"]
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert final.content[1].input == whole.content[1].input == {"a": 1, "b": 2}
    assert final.stop_reason == whole.stop_reason == "tool_use"
    kinds = [event.type.removeprefix("content_block_") for event in events]
    texts = [kind for kind in kinds if kind != "delta"]
    assert texts == ["message_start", *["start", "stop"] * 3, "message_delta", "message_stop"]
    begun = [event for event in events if event.type == "content_block_start"]
    assert [event.index for event in begun] == [0, 1, 2]
    assert begun[1].content_block.input == {}
    pieces = [
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.index == 1
    ]
    assert json.loads("".join(pieces)) == {"a": 1, "b": 2}


def test_a_call_that_is_cut_is_no_block(claude):
    message = claude.messages.create(
        model="bundled",
        max_tokens=34,
        messages=USER,
        tools=OF_ANTHROPIC,
        tool_choice={"type": "tool", "name": "add"},
    )
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["text"]


# Reasoning.

THOUGHT = "<think>\nHm, \n so.\n</think>\n\nThe otter."


@pytest.fixture(scope="module")
def thinking():
    engine = AsyncLLM("bundled", reasoning_parser="qwen3", num_blocks=512)
    with live(engine) as url:
        yield engine, url
    engine.shutdown()


def test_reasoning_is_beside_the_answer_of_a_chat(thinking):
    engine, url = thinking
    with answering(engine, THOUGHT), openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        asked: dict[str, Any] = {"model": "bundled", "messages": USER}
        whole = client.chat.completions.create(**asked).choices[0]
        chunks = list(client.chat.completions.create(**asked, stream=True))
        without = client.chat.completions.create(**asked, extra_body={"include_reasoning": False})
    assert whole.message.content == "The otter."
    assert whole.message.reasoning == "Hm, \n so."  # type: ignore[attr-defined]
    assert whole.finish_reason == "stop"
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == "Hm, \n so."
    assert "".join(delta.content or "" for delta in deltas) == "The otter."
    assert not hasattr(without.choices[0].message, "reasoning")


def test_reasoning_is_an_item_of_a_response(thinking):
    engine, url = thinking
    with answering(engine, THOUGHT), openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        whole = client.responses.create(model="bundled", input=USER)
        events = list(client.responses.create(model="bundled", input=USER, stream=True))
        again = client.responses.create(
            model="bundled", input=[*USER, *(item.model_dump() for item in whole.output), *USER]
        )
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == "Hm, \n so."
    assert whole.output_text == again.output_text == "The otter."
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Hm, \n so."


def test_reasoning_is_a_block_of_a_message(thinking):
    engine, url = thinking
    with answering(engine, THOUGHT), anthropic.Anthropic(base_url=url, api_key="x") as client:
        asked: dict[str, Any] = {"model": "bundled", "max_tokens": 99, "messages": USER}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        turns = [*USER, {"role": "assistant", "content": whole.content}, *USER]
        client.messages.create(**{**asked, "messages": turns})
    for message in (whole, final):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == "Hm, \n so."
        assert message.content[1].text == "The otter."


def test_a_schema_follows_the_reasoning(thinking):
    """At a high temperature, some of the answers begin with the tag."""
    _, url = thinking
    with openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        asked: dict[str, Any] = {
            "model": "bundled",
            "messages": USER,
            "seed": 1,
            "n": 8,
            "temperature": 1000,
            "extra_body": {
                "structured_outputs": {"choice": ["lake", "mill"]},
                "thinking_token_budget": 4,
            },
        }
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
    thoughts = [choice.message.reasoning for choice in whole.choices]
    assert any(thoughts)
    for choice in whole.choices:
        deltas = [
            each.delta for chunk in chunks for each in chunk.choices if each.index == choice.index
        ]
        assert choice.message.content in ("lake", "mill")
        assert choice.finish_reason == "stop"
        assert "".join(delta.content or "" for delta in deltas) == choice.message.content
        reasoning = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
        assert reasoning == (choice.message.reasoning or "")
