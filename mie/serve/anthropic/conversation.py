"""What the body of a message says in the words of chats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mie.params.structured import StructuredOutputsParams
from mie.serve.anthropic.protocol import (
    ClientTool,
    CountTokensRequest,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)


def conversation(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them.

    The system prompt is the first message. Turns of the same role that follow each other are
    joined, as Anthropic joins them, because templates may refuse them. Each result of a tool
    is a separate message.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system)})
    for turn in body.messages:
        if isinstance(turn.content, str):
            _add_text(messages, turn.role, turn.content)
            continue
        if not turn.content:
            _add_text(messages, turn.role, "")
        for block in turn.content:
            _add_block(messages, turn.role, block)
    return [_joined(message) for message in messages]


def _add_block(
    messages: list[dict[str, Any]],
    role: str,
    block: TextBlock | ToolResultBlock | ToolUseBlock | ThinkingBlock,
) -> None:
    if isinstance(block, TextBlock):
        _add_text(messages, role, block.text)
    elif isinstance(block, ToolResultBlock):
        content = _text(block.content or "")
        messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    elif isinstance(block, ThinkingBlock):
        _of_assistant(messages).setdefault("reasoning", []).append(block.thinking)
    else:
        function = {"name": block.name, "arguments": block.input}
        call = {"id": block.id, "type": "function", "function": function}
        _of_assistant(messages).setdefault("tool_calls", []).append(call)


def _add_text(messages: list[dict[str, Any]], role: str, text: str) -> None:
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": []})
    messages[-1]["content"].append(text)


def _of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message that a call or a thought belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": []})
    return messages[-1]


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its texts joined at once, which takes linear time."""
    if message["role"] in ("user", "assistant"):
        content = message["content"]
        message["content"] = "\n".join(content) if content else None
    if "reasoning" in message:
        message["reasoning"] = "".join(message["reasoning"])
    return message


def _text(content: str | Iterable[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def tools_of(body: CountTokensRequest) -> dict[str, Any]:
    """Return the tools and the choice among them, in the words of `LLM.chat_prompt`."""
    choice = body.tool_choice
    kind = None if choice is None else choice.type
    known: dict[str | None, Any] = {"auto": "auto", "any": "required", "none": "none"}
    if choice is not None:
        known["tool"] = {"type": "function", "function": {"name": choice.name}}
    return {
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": known.get(kind) if body.tools or kind in ("any", "tool") else None,
        "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
    }


def _tool(tool: ClientTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def structure_of(body: MessagesRequest) -> StructuredOutputsParams | None:
    """Return what the answer must be, or None for text."""
    form = None if body.output_config is None else body.output_config.format
    return None if form is None else StructuredOutputsParams(json=form.schema_)
