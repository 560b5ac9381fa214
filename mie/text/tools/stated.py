"""State tools and calls in words, for a chat template that does not write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mie.text.tools.definitions import ToolChoice
from mie.text.tools.formats import CallFormat
from mie.text.tools.written import written

HEADING = "You can call these functions. Each line describes one as JSON:"
"""The line that begins the statement."""
_EXAMPLE = ("NAME", '{"PARAMETER": "VALUE"}')


def with_tools_stated(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    choice: ToolChoice | None,
    form: CallFormat,
    *,
    has_system: bool,
) -> list[dict[str, Any]]:
    """Return messages of text only: the tools, the calls so far and their results are in words.

    A system message states the tools and the format ``form`` of calls, as in llama.cpp. If the
    template has no system message (``has_system``), the first message of the user states them.
    Calls become the assistant's text, and results become messages of the user. The contents of
    ``messages`` must be text.
    """
    stated: list[dict[str, Any]] = []
    for message in messages:
        message = dict(message)
        if message["role"] == "assistant":
            message["content"] = _with_calls(message, form)
            message.pop("tool_calls", None)
        elif message["role"] == "tool":
            message = {"role": "user", "content": _result(message)}
            if stated and stated[-1].get("is_result"):  # templates want roles to alternate
                stated[-1]["content"] += "\n" + message["content"]
                continue
            message["is_result"] = True
        elif message["role"] == "user" and stated and stated[-1].pop("is_result", False):
            stated[-1]["content"] += f"\n\n{message['content']}"
            continue
        stated.append(message)
    for message in stated:
        message.pop("is_result", None)
    if choice is None or not tools:
        return stated
    return _opened_with(_statement(tools, choice, form), stated, has_system=has_system)


def _opened_with(
    text: str, messages: list[dict[str, Any]], *, has_system: bool
) -> list[dict[str, Any]]:
    if messages[0]["role"] == "system":
        place = 0
    elif has_system:
        return [{"role": "system", "content": text}, *messages]
    else:
        place = next((i for i, each in enumerate(messages) if each["role"] == "user"), -1)
        if place < 0:
            return [{"role": "user", "content": text}, *messages]
    first = messages[place]
    parts = [first["content"], text] if first["role"] == "system" else [text, first["content"]]
    joined = {**first, "content": "\n\n".join(part for part in parts if part)}
    return [*messages[:place], joined, *messages[place + 1 :]]


def _statement(tools: Sequence[Mapping[str, Any]], choice: ToolChoice, form: CallFormat) -> str:
    functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    names = " or ".join(tool.name for tool in choice.tools)
    rule = "Call a function only if it helps. Otherwise answer in plain words."
    if choice.is_forced:
        rule = f"Answer with a call of {names} and nothing else."
    arguments = ", with the arguments as a JSON object" if form.parameters is None else ""
    return "\n".join(
        [
            HEADING,
            *functions,
            f"Write a call in exactly this form{arguments}:",
            written([_EXAMPLE], form),
            rule,
        ]
    )


def _with_calls(message: Mapping[str, Any], form: CallFormat) -> str:
    """Return the text of an assistant's message with the calls behind it."""
    calls = [
        (call["function"].get("name", ""), _as_text(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    parts = [message.get("content") or "", written(calls, form) if calls else ""]
    return "\n".join(part for part in parts if part)


def _result(message: Mapping[str, Any]) -> str:
    """Return the result of a call as a text of the user."""
    name, text = message.get("name"), _as_text(message.get("content"))
    if name:
        text = f"{name}: {text}"
    return f"<tool_response>\n{text}\n</tool_response>"


def _as_text(value: Any) -> str:
    """Return a text unchanged, such as the arguments of a call that was cut, and others as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
