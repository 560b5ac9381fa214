"""What the body of a message says in the words of chats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mie.errors import shown
from mie.params.structured import StructuredOutputsParams
from mie.serve.anthropic.protocol import Content, CountTokensRequest, MessagesRequest
from mie.serve.errors import invalid, unsupported
from mie.serve.openai.structure import schema_of

_KEYS = {
    "text": {"text"},
    "tool_use": {"id", "name", "input", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error"},
    "thinking": {"thinking", "signature"},
}
"""What blocks may have beside their type and ``cache_control``."""
_TOOL_KEYS = {"type", "name", "description", "input_schema", "strict", "cache_control"}


def conversation(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them.

    The system prompt is the first message. Turns of the same role that follow each other are
    joined, as Anthropic joins them, because templates may refuse them. Each result of a tool
    is a separate message.

    Raises:
        ApiError: a content has a part that the model does not read.
    """
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _text(body.system, "system")})
    for index, message in enumerate(body.messages):
        for name, value in (message.model_extra or {}).items():
            raise unsupported(f"messages.{index}.{name}", f"leave it out; got {shown(value)}")
        where = f"messages.{index}.content"
        if isinstance(message.content, str):
            _add_text(messages, message.role, message.content)
            continue
        for place, block in enumerate(message.content):
            _add_block(messages, message.role, block, f"{where}.{place}")
    return messages


def _add_block(
    messages: list[dict[str, Any]], role: str, block: Mapping[str, Any], where: str
) -> None:
    kind: Any = block.get("type")
    allowed = ("text", "tool_use", "thinking") if role == "assistant" else ("text", "tool_result")
    if kind not in allowed:
        kinds = ", ".join(map(repr, allowed))
        why = f"a turn of the {role} has blocks of type {kinds} only; got {shown(kind)}"
        raise unsupported(where, why)
    _only(block, _KEYS[kind] | {"type", "cache_control"}, where)
    if kind == "text":
        _add_text(messages, role, _block_text(block, where))
    elif kind == "tool_result":
        content = block.get("content") or ""
        text = _text(content, f"{where}.content") if isinstance(content, list) else content
        messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
    else:
        message = _of_assistant(messages)
        if kind == "thinking":
            message["reasoning"] = f"{message.get('reasoning', '')}{block.get('thinking', '')}"
            return
        function = {"name": block.get("name"), "arguments": block.get("input")}
        call = {"id": block.get("id"), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)


def _add_text(messages: list[dict[str, Any]], role: str, text: str) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == role else None
    if last is None:
        messages.append({"role": role, "content": text})
    else:
        before = last["content"]
        last["content"] = text if before is None else f"{before}\n{text}"


def _of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the assistant's message that a call or a thought belongs to."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _text(content: Content, where: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else block
        if kind != "text":
            message = f"there are blocks of type 'text' only; got {shown(kind)}"
            raise unsupported(f"{where}.{index}", message)
        _only(block, _KEYS["text"] | {"type", "cache_control"}, f"{where}.{index}")
        texts.append(_block_text(block, f"{where}.{index}"))
    return "\n".join(texts)


def _block_text(block: Mapping[str, Any], where: str) -> str:
    text = block.get("text")
    if not isinstance(text, str):
        raise invalid(f"{where}.text must be text; got {shown(text)}", where)
    return text


def _only(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for name, value in given.items():
        if name not in known and value is not None:
            raise unsupported(f"{where}.{name}", f"leave it out; got {shown(value)}")


def tools_of(body: CountTokensRequest) -> dict[str, Any]:
    """Return the tools and the choice among them, in the words of `LLM.chat_prompt`.

    Raises:
        ApiError: one is malformed, or is a tool of Anthropic's own.
    """
    if not isinstance(body.tools, list | None):
        raise invalid(f"tools must be a list; got {shown(body.tools)}", "tools")
    choice: Any = body.tool_choice
    if choice is not None and not isinstance(choice, Mapping):
        raise invalid(f"tool_choice must be an object; got {shown(choice)}", "tool_choice")
    kind = None if choice is None else choice.get("type")
    known: dict[Any, Any] = {None: None, "auto": "auto", "any": "required", "none": "none"}
    if choice is not None and kind == "tool":
        known[kind] = {"type": "function", "function": {"name": choice.get("name")}}
    if choice is not None and (not isinstance(kind, str) or kind not in known):
        kinds = "'auto', 'any', 'tool' or 'none'"
        raise invalid(f"tool_choice.type must be {kinds}; got {shown(kind)}", "tool_choice")
    tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(body.tools or ())]
    return {
        "tools": tools or None,
        "tool_choice": known[kind] if tools or kind in ("any", "tool") else None,
        "parallel_tool_calls": not (choice or {}).get("disable_parallel_tool_use"),
    }


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type", "custom") not in (None, "custom"):
        raise unsupported(where, f"tools have a name and an input_schema; got {shown(tool)}")
    _only(tool, _TOOL_KEYS, where)
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise invalid(f"{where}.input_schema must be a JSON schema; got {shown(schema)}", "tools")
    function = {"name": tool.get("name"), "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def structure_of(body: MessagesRequest) -> StructuredOutputsParams | None:
    """Return what the answer must be, or None for text.

    Raises:
        ApiError: ``output_config`` is malformed or not supported.
    """
    given = body.output_config
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise invalid(f"output_config must be an object; got {shown(given)}", "output_config")
    _only(given, {"format"}, "output_config")
    form = given.get("format")
    if form is None:
        return None
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind != "json_schema":
        message = f"output_config.format.type must be 'json_schema'; got {shown(kind)}"
        raise invalid(message, "output_config")
    schema = {key: value for key, value in form.items() if key != "type"}
    return schema_of(schema, "output_config.format", "output_config")
