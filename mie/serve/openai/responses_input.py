"""What the body of ``POST /v1/responses`` says in the words of chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mie.errors import shown
from mie.params.structured import StructuredOutputsParams
from mie.serve.errors import invalid, unsupported
from mie.serve.openai import structure
from mie.serve.openai.responses_protocol import ResponsesRequest

_MESSAGE_KEYS = {"type", "role", "content", "id", "status", "phase"}
"""What a message may have; the last three are those of an answer that is sent again."""
_CALL_KEYS = {"type", "id", "call_id", "name", "arguments", "status"}
_OUTPUT_KEYS = {"type", "id", "call_id", "output", "status"}
_REASONING_KEYS = {"type", "id", "summary", "content", "status"}
_TOOL_KEYS = {"type", "name", "description", "parameters", "strict"}


def format_of(body: ResponsesRequest) -> StructuredOutputsParams | None:
    """Return what the answer must be, or None for text.

    Raises:
        ApiError: ``text`` is malformed or not supported.
    """
    given = body.text
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise invalid(f"text must be an object; got {shown(given)}", "text")
    for key, value in given.items():
        if key != "format" and not (key == "verbosity" and value in (None, "medium")):
            raise unsupported("text", f"leave {key} out; got {shown(value)}")
    form = given.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        schema = {key: value for key, value in form.items() if key != "type"}
        return structure.schema_of(schema, "text.format", "text")
    return structure.format_of(form, "text")


def tools_of(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    """Return the tools as a chat has them; None if there are none.

    Raises:
        ApiError: one is no function.
    """
    if not isinstance(body.tools, list | None):
        raise invalid(f"tools must be a list of functions; got {shown(body.tools)}", "tools")
    tools = []
    for index, tool in enumerate(body.tools or ()):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind != "function":
            message = f"tools[{index}] must have the type 'function'; got {shown(kind)}"
            raise invalid(message, "tools", code="unsupported_parameter")
        _only(tool, _TOOL_KEYS, f"tools.{index}")
        tools.append({"type": "function", "function": {k: tool[k] for k in tool if k != "type"}})
    return tools or None


def tool_choice_of(body: ResponsesRequest) -> Any:
    """Return the choice of a tool as a chat has it."""
    choice = body.tool_choice
    if not body.tools and choice == "auto":
        return None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def conversation(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them, the instructions first.

    Raises:
        ApiError: an item of the input is malformed, or of a type that the model does not read.
    """
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for index, item in enumerate(body.input):
        _add(messages, item, f"input.{index}")
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Add an item to the messages. Calls and reasoning belong to an assistant's message."""
    kind = item.get("type", "message")
    if kind == "message":
        message = _message(item, where)
        last = messages[-1] if messages else message
        if "reasoning" in last and last["content"] is None and message["role"] == "assistant":
            last["content"] = message["content"]
        else:
            messages.append(message)
    elif kind == "function_call":
        _only(item, _CALL_KEYS, where)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        _of_assistant(messages).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        _only(item, _OUTPUT_KEYS, where)
        output = {"tool_call_id": item.get("call_id"), "content": item.get("output")}
        messages.append({"role": "tool", **output})
    elif kind == "reasoning":
        _only(item, _REASONING_KEYS, where)
        content = item.get("content")
        parts = content if isinstance(content, list) else []
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        text = "".join(text for text in texts if isinstance(text, str))
        messages.append({"role": "assistant", "content": None, "reasoning": text})
    else:
        raise unsupported(where, f"the model reads no items of the type {shown(kind)}")


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    _only(item, _MESSAGE_KEYS, where)
    role, content = item.get("role"), item.get("content")
    if role not in ("user", "assistant", "system", "developer"):
        raise invalid(f"{where}.role is no role; got {shown(role)}", "input")
    if not isinstance(content, str | list):
        message = f"{where}.content must be text or a list of parts; got {shown(content)}"
        raise invalid(message, "input")
    return {"role": role, "content": content}


def _of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _only(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            raise unsupported(f"{where}.{name}", f"leave it out; got {shown(value)}")
