"""Every answer of mie is accepted in the next turn of the same conversation, however it was cut."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_server import live
from scripted_answers import answering

from mie import LLM, AsyncLLM, SamplingParams
from mie.serve.config import ServeConfig

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

USER: Any = {"role": "user", "content": "Who lives at the mill?"}
PLACE = {
    "type": "object",
    "properties": {"place": {"enum": ["lake", "mill"]}, "why": {"type": "string", "maxLength": 6}},
    "required": ["place", "why"],
}
FUNCTION = {"name": "weather", "parameters": PLACE}
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "mill", "why": "é\\"🦦"}}</tool_call>'
ANSWERS = {
    "a text": "The otter.",
    "nothing": " ",
    "reasoning": "<think>Hm, so.</think>The otter.",
    "reasoning only": "<think>Hm, so.</think>",
    "reasoning without an end": "<think>Hm",
    "a call": CALL,
    "two calls": CALL + CALL,
    "a text and a call": f"I look.{CALL}",
    "reasoning and a call": f"<think>Hm.</think>I look.{CALL}",
    "half a call": CALL[:40],
}


def chat(answer: dict[str, Any]) -> list[Any]:
    return [choice["message"] for choice in answer["choices"][:1]]


def last_choice(answer: dict[str, Any]) -> list[Any]:
    return [answer["choices"][-1]["message"]]


def responses(answer: dict[str, Any]) -> list[Any]:
    return answer["output"]


def messages(answer: dict[str, Any]) -> list[Any]:
    return [{"role": "assistant", "content": answer["content"]}]


def ollama(answer: dict[str, Any]) -> list[Any]:
    return [answer["message"]]


ROUTES: dict[str, tuple[str, str, Callable[[Any], list[Any]], dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", "max_tokens", chat, {}),
    "choices": ("/v1/chat/completions", "max_tokens", last_choice, {"n": 2}),
    "responses": ("/v1/responses", "max_output_tokens", responses, {}),
    "messages": ("/v1/messages", "max_tokens", messages, {}),
    "ollama": ("/api/chat", "num_predict", ollama, {"stream": False}),
}
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": FUNCTION}],
    "responses": [{"type": "function", **FUNCTION}],
    "messages": [{"name": "weather", "input_schema": PLACE}],
}
TOOLS |= {"choices": TOOLS["chat"], "ollama": TOOLS["chat"]}
FORCED: dict[str, Any] = {
    "chat": "required",
    "choices": "required",
    "responses": "required",
    "messages": {"type": "any"},
}


def asked(route: str, history: list[Any], length: int, **more: Any) -> tuple[str, dict[str, Any]]:
    """A request of a route that goes on from a conversation."""
    path, limit, _, own = ROUTES[route]
    turns = "input" if route == "responses" else "messages"
    body: dict[str, Any] = {turns: history, "tools": TOOLS[route], **own, **more}
    if route == "ollama":
        return path, {**body, "options": {limit: length, "seed": 3}}
    return path, {**body, limit: length, "seed": 3}


def next_turn(client: Any, url: str, route: str, length: int, **more: Any) -> list[Any]:
    """Ask, send the answer back with a further question, and return the answer's messages."""

    def ask(history: list[Any], length: int, **more: Any) -> Any:
        path, body = asked(route, history, length, **more)
        answer = client.post(f"{url}{path}", json=body)
        assert answer.status_code == 200, (history, answer.text)
        return answer

    said = ROUTES[route][2](ask([USER], length, **more).json())
    again = ask([USER, *said, USER], 1)
    assert "x-mie-ignored" not in again.headers, again.headers["x-mie-ignored"]
    return said


@pytest.fixture(scope="module")
def thinker() -> Iterator[AsyncLLM]:
    engine = AsyncLLM("bundled", reasoning_parser="qwen3", num_blocks=512)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def url(thinker: AsyncLLM) -> Iterator[str]:
    with live(thinker, ServeConfig()) as url:
        yield url


@pytest.mark.parametrize("route", ROUTES)
def test_every_kind_of_answer_is_accepted_in_the_next_turn(
    server: Any, thinker: AsyncLLM, url: str, route: str
):
    for name, text in ANSWERS.items():
        with answering(thinker, text):
            assert next_turn(server.client, url, route, 100), name


@pytest.mark.parametrize("route", FORCED)
def test_a_call_that_was_cut_anywhere_is_accepted_in_the_next_turn(server: Any, route: str):
    def arguments(said: list[Any]) -> str:
        """The arguments of the last call; a message of Anthropic's has no cut call."""
        last = said[-1]
        calls = last.get("tool_calls") or [{"function": last}]
        return calls[-1]["function"].get("arguments") or ""

    found = set()
    for length in (1, *range(22, 50, 3 if route == "choices" else 1)):
        said = next_turn(server.client, server.url, route, length, tool_choice=FORCED[route])
        found.add(arguments(said))
    if route != "messages":
        assert "" in found
        assert len([each for each in found if each and not each.endswith("}")]) > 2, found


def events_of(answer: Any) -> Iterator[Any]:
    """The data of a stream's events."""
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def joined_chat(answer: Any) -> list[Any]:
    """The message of a stream of chunks, as OpenAI's clients join it."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for chunk in events_of(answer):
        delta = chunk["choices"][0]["delta"]
        message["content"] += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if len(calls) <= call["index"]:
                calls.append(call)
            else:
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return [message]


def joined_messages(answer: Any) -> list[Any]:
    """The message of a stream of events, as Anthropic's clients join it; a cut input is empty."""
    blocks: list[Any] = []
    texts: list[str] = []
    for event in events_of(answer):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            texts[-1] += event["delta"].get("text") or event["delta"].get("partial_json") or ""
    for block, text in zip(blocks, texts, strict=True):
        if block["type"] == "text":
            block["text"] = text
        else:
            block["input"] = json.loads(text) if text.endswith("}") else {}
    return [{"role": "assistant", "content": blocks}]


@pytest.mark.parametrize(("route", "join"), [("chat", joined_chat), ("messages", joined_messages)])
def test_a_stream_that_was_cut_is_accepted_in_the_next_turn(server: Any, route: str, join: Any):
    num_calls = 0
    for length in range(24, 50, 2):
        path, body = asked(route, [USER], length, tool_choice=FORCED[route], stream=True)
        said = join(server.post(path, **body))
        num_calls += "tool" in json.dumps(said)
        path, body = asked(route, [USER, *said, USER], 1)
        answer = server.post(path, **body)
        assert answer.status_code == 200, (said, answer.text)
    assert num_calls > 5


def test_the_template_gets_the_text_of_a_call_that_was_cut(server: Any, llm: LLM):
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% set a = c.function.arguments %}{{ a if a is string else a | tojson }}"
        "{% endfor %}{{ m.content or '' }}{% endfor %}"
    )
    whole = json.dumps({"place": "mill", "why": 'é"🦦\\'})
    with live(server.engine, ServeConfig(chat_template=template)) as url:
        for length in range(1, len(whole) + 1):
            call = {"function": {"name": "weather", "arguments": whole[:length]}}
            said = {"role": "assistant", "content": None, "tool_calls": [call]}
            answer = server.client.post(f"{url}/apply-template", json={"messages": [said]})
            assert answer.status_code == 200, answer.text
            if length < len(whole):
                assert answer.json()["prompt"] == whole[:length]
            else:
                assert json.loads(answer.json()["prompt"]) == json.loads(whole)
    cut = {"function": {"name": "weather", "arguments": whole[:9]}}
    said = {"role": "assistant", "content": None, "tool_calls": [cut]}
    [output] = llm.chat([USER, said, USER], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.outputs
