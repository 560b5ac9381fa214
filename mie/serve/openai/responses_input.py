"""What the body of ``POST /v1/responses`` says in the words of chats."""

from __future__ import annotations

from typing import Any

from mie.params.structured import StructuredOutputsParams
from mie.serve.openai.formats import JsonObjectFormat
from mie.serve.openai.responses_protocol import (
    CallItem,
    FlatSchemaFormat,
    MessageItem,
    NamedFunction,
    OutputItem,
    ReasoningItem,
    ResponsesRequest,
)
from mie.serve.openai.structure import schema_of


def format_of(body: ResponsesRequest) -> StructuredOutputsParams | None:
    """Return what the answer must be, or None for text."""
    given = None if body.text is None else body.text.format
    return schema_of(given) if isinstance(given, FlatSchemaFormat | JsonObjectFormat) else None


def tools_of(body: ResponsesRequest) -> list[dict[str, Any]] | None:
    """Return the tools as a chat has them; None if there are none."""
    tools = [
        {"type": "function", "function": {k: v for k, v in tool.given.items() if k != "type"}}
        for tool in body.tools or ()
    ]
    return tools or None


def tool_choice_of(body: ResponsesRequest) -> Any:
    """Return the choice of a tool as a chat has it."""
    choice = body.tool_choice
    if not body.tools and choice == "auto":
        return None
    if isinstance(choice, NamedFunction):
        return {"type": "function", "function": {"name": choice.name}}
    return choice


def conversation(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them, the instructions first."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    for item in body.input:
        _add(messages, item)
    return messages


def _add(
    messages: list[dict[str, Any]], item: MessageItem | CallItem | OutputItem | ReasoningItem
) -> None:
    """Add an item to the messages. Calls and reasoning belong to an assistant's message."""
    if isinstance(item, MessageItem):
        message = {"role": item.role, "content": item.given["content"]}
        last = messages[-1] if messages else message
        if "reasoning" in last and last["content"] is None and item.role == "assistant":
            last["content"] = message["content"]
        else:
            messages.append(message)
    elif isinstance(item, CallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        _of_assistant(messages).setdefault("tool_calls", []).append(call)
    elif isinstance(item, OutputItem):
        output = {"tool_call_id": item.call_id, "content": item.given["output"]}
        messages.append({"role": "tool", **output})
    else:
        text = "".join(part.text for part in item.content or ())
        messages.append({"role": "assistant", "content": None, "reasoning": text})


def _of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message that a call belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]
