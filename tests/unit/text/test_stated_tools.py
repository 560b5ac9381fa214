"""Tools with chat templates that do not write them: a message states them, and calls are text."""

import json
from functools import cache
from typing import Any

import jsonschema
import pytest

from mie import LLM, SamplingParams
from mie.text.tools.table import CALLS
from mie.text.tools.written import written

pytest.importorskip("llguidance", reason="the extra 'structured' is not installed")

TURN = "<{{ m.role }}>{{ m.content }}\n"
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + TURN + "{% endfor %}<assistant>"
)
TEMPLATES = {
    "every role": "{% for m in messages %}" + TURN + "{% endfor %}<assistant>",
    "no system message": "{% if messages[0].role == 'system' %}{{ raise_exception('System role not "
    "supported') }}{% endif %}" + ALTERNATES,
    "system messages left out": "{% for m in messages if m.role != 'system' %}"
    + TURN
    + "{% endfor %}<assistant>",
    "contents in parts": "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{{ part.text }}{% endfor %}\n{% endfor %}<assistant>",
    "contents concatenated": "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}"
    "{% endfor %}<assistant>",
}
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": ["lake", "mill"]}},
    "required": ["place"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The sky now.", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "stop"}},
]
USER = {"role": "user", "content": "How is the weather?"}


def call(name: str, arguments: Any, id: str = "call_1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


HISTORIES: dict[str, list[dict[str, Any]]] = {
    "a question": [USER],
    "a result": [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call("weather", '{"place": "mill"}')],
        },
        {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "sunny"},
    ],
    "two results and a question": [
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [call("weather", {"place": "mill"}), call("stop", {}, "call_2")],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": {"sky": "sunny"}},
        {"role": "tool", "tool_call_id": "call_2", "content": [{"type": "text", "text": "done"}]},
        {"role": "user", "content": "Thanks."},
    ],
}


@cache
def bundled(parser: str = "auto") -> LLM:
    return LLM("bundled", num_threads=1, tool_call_parser=parser)


def prompt(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"tools": TOOLS, **options}
    return str(bundled().chat_prompt(messages, chat_template=template, **options)["prompt"])


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_the_prompt_has_tools_calls_and_results(kind: str, history: str, choice: str) -> None:
    messages = HISTORIES[history]
    text = prompt(TEMPLATES[kind], messages, tool_choice=choice)
    for tool in TOOLS:
        assert json.dumps(tool["function"]) in text
    assert "<tool_call>\n" in text
    assert ("and nothing else" in text) == (choice == "required")
    for message in messages:
        for each in message.get("tool_calls", ()):
            assert f'{{"name": "{each["function"]["name"]}", "arguments": {{' in text
    if len(messages) > 1:
        assert '"arguments": {"place": "mill"}}' in text
        assert "sunny" in text
    assert text.count("How is the weather?") == 1
    assert "None" not in text


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_system_message_of_the_request_stays_before_the_statement(kind: str) -> None:
    if kind in ("no system message", "system messages left out"):
        return
    for role in ("system", "developer"):  # templates that lack developers get a system message
        text = prompt(TEMPLATES[kind], [{"role": role, "content": "Be brief."}, USER])
        assert text.index("<system>Be brief.") < text.index("You can call these functions")
        assert text.count("<system>") == 1


@pytest.mark.parametrize("kind", TEMPLATES)
def test_calls_of_a_history_are_text_where_no_tool_may_be_called(kind: str) -> None:
    for options in ({"tools": None}, {"tool_choice": "none"}):
        text = prompt(TEMPLATES[kind], HISTORIES["a result"], **options)
        assert '{"name": "weather", "arguments": {"place": "mill"}}' in text
        assert "sunny" in text
        assert "You can call" not in text


@pytest.mark.parametrize(
    "parser", ["hermes", "mistral", "apertus", "kimi_k2", "qwen3_coder", "lfm2"]
)
def test_the_statement_shows_the_format_in_which_calls_are_read(parser: str) -> None:
    llm, form = bundled(parser), CALLS[parser]
    messages = HISTORIES["a result"]
    options: dict[str, Any] = {"tools": TOOLS, "chat_template": TEMPLATES["every role"]}
    asked = llm.chat_prompt(messages, **options)
    text = written([("weather", '{"place": "mill"}')], form)
    assert text in asked["prompt"]
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    params = SamplingParams(trace_decode_token_ids=ids, max_tokens=len(ids))
    [output] = llm.generate([asked], params, use_tqdm=False)
    [found] = output.outputs[0].tool_calls or ()
    assert (found.name, json.loads(found.arguments)) == ("weather", {"place": "mill"})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_call_that_must_come_is_valid(kind: str, seed: int) -> None:
    params = SamplingParams(temperature=1.5, seed=seed, max_tokens=300)
    choice = {"type": "function", "function": {"name": "weather"}}
    [output] = bundled().chat(
        [USER],
        params,
        use_tqdm=False,
        tools=TOOLS,
        tool_choice=choice,
        chat_template=TEMPLATES[kind],
    )
    [found] = output.outputs[0].tool_calls or ()
    assert found.name == "weather"
    jsonschema.validate(json.loads(found.arguments), SCHEMA)
