"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

import json
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from mie.frontend.outputs import RequestOutput
from mie.serve.anthropic.protocol import (
    ClientTool,
    CountTokensRequest,
    MessagesRequest,
    RedactedThinkingBlock,
    SystemTurn,
    TextBlock,
    ThinkingBlock,
    ToolReferenceBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from mie.serve.asgi import json_string
from mie.serve.errors import ApiError, anthropic_body
from mie.serve.openai.formats import closed_schema
from mie.serve.openai.tools import own_tools
from mie.serve.parts import Part, PartEvent
from mie.serve.parts_writer import PartsWriter
from mie.serve.serving import Asked, reasoning_variables
from mie.serve.writer import Choice, json_response
from mie.text.tools.definitions import call_message
from mie.text.tools.formats import AnswerFormat


async def count_tokens(asked: Asked[CountTokensRequest]) -> Response:
    """Count the tokens that a conversation has as a prompt."""
    prompt = await _prompt(asked)
    return json_response({"input_tokens": len(prompt["prompt_token_ids"])}, asked.headers)


# The request in the words of chats.


async def _prompt(asked: Asked[CountTokensRequest]) -> dict[str, Any]:
    """Return the conversation as a prompt. The answer continues a last turn of the assistant."""
    body, serving = asked.body, asked.serving
    tools = own_tools(body.tools)
    is_prefilled = body.messages[-1].role == "assistant"
    choice = body.tool_choice
    kind = None if choice is None else choice.type
    known: dict[str | None, Any] = {"auto": "auto", "any": "required", "none": "none"}
    if choice is not None:
        known["tool"] = {"type": "function", "function": {"name": choice.name}}
    return await serving.chat_prompt(
        _conversation(body),
        add_generation_prompt=not is_prefilled,
        continue_final_message=is_prefilled,
        chat_template_kwargs=_reasoning(asked),
        tools=[_tool(tool) for tool in tools] or None,
        tool_choice=known.get(kind) if tools or kind in ("any", "tool") else None,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
    )


def _reasoning(asked: Asked[CountTokensRequest]) -> dict[str, Any]:
    """Return the template's variables about reasoning, and name fields that it does not read."""
    body, template = asked.body, asked.serving.template_text
    found: dict[str, Any] = {}
    if (thinking := body.thinking) is not None:
        is_on = {"enabled": True, "disabled": False}.get(thinking.type)
        found = reasoning_variables(template, is_on=is_on)
        if not found:
            asked.ignore("thinking")
    effort = None if body.output_config is None else body.output_config.effort
    if effort is not None:
        of_effort = reasoning_variables(template, effort=effort)
        if not of_effort:
            asked.ignore("output_config.effort")
        found |= of_effort
    return found


def _tool(tool: ClientTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.strict is not None:
        function["strict"] = tool.strict
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _conversation(body: CountTokensRequest) -> list[dict[str, Any]]:
    """Return the messages as a chat template takes them.

    The system prompt is the first message. Turns of the same role that follow each other are
    joined, as Anthropic joins them, because templates may refuse them. Each result of a tool
    is a separate message. Instructions after the first turn are a part of the user's turn, since
    many templates take a system message in the first place only.
    """
    found: list[dict[str, Any]] = []
    if body.system:
        found.append({"role": "system", "content": [_text(body.system)]})
    for turn in body.messages:
        if isinstance(turn, SystemTurn):
            is_first = not found or found[-1]["role"] == "system"
            message = _message_of("system" if is_first else "user", found)
            message["content"].append(_text(turn.content))
            continue
        if isinstance(turn.content, str):
            _message_of(turn.role, found)["content"].append(turn.content)
            continue
        if not turn.content:
            _message_of(turn.role, found)["content"].append("")
        for block in turn.content:
            _add_block(found, turn.role, block)
    return [_joined(message) for message in found]


def _add_block(
    found: list[dict[str, Any]],
    role: str,
    block: TextBlock | ToolResultBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock,
) -> None:
    if isinstance(block, TextBlock):
        _message_of(role, found)["content"].append(block.text)
    elif isinstance(block, ToolResultBlock):
        content = _text(block.content or "")
        found.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    elif isinstance(block, ThinkingBlock):
        _message_of("assistant", found).setdefault("reasoning", []).append(block.thinking)
    elif isinstance(block, ToolUseBlock):
        call = call_message(block.id, block.name, block.input)
        _message_of("assistant", found).setdefault("tool_calls", []).append(call)


def _message_of(role: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the last message if it has this role, or a new one."""
    if not found or found[-1]["role"] != role:
        found.append({"role": role, "content": []})
    return found[-1]


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its texts joined at once, in linear time."""
    if message["role"] in ("system", "user", "assistant"):
        content = message["content"]
        message["content"] = "\n".join(content) if content else None
    if "reasoning" in message:
        message["reasoning"] = "".join(message["reasoning"])
    return message


def _text(content: str | Iterable[TextBlock | ToolReferenceBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


# The answer.

_DELTAS = MappingProxyType(
    {
        "text": ("text_delta", "text"),
        "reasoning": ("thinking_delta", "thinking"),
        "call": ("input_json_delta", "partial_json"),
    }
)
"""Kinds of parts -> the type of their deltas, and the key of the new text."""


class MessageWriter(PartsWriter[MessagesRequest]):
    """Answer a conversation in Anthropic's shape."""

    id_prefix = "msg_"

    def __init__(self, **asked: Any) -> None:
        super().__init__(**asked)
        self._fields = {
            "id": self.response_id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
        }

    async def run(self) -> ASGIApp:
        body = self.body
        form = None if body.output_config is None else body.output_config.format
        structure = None if form is None else closed_schema(form.schema_, form.strict)
        self.set_params(
            "output_config",
            body.stream,
            n=1,
            max_tokens=body.max_tokens,
            stop=body.stop_sequences or None,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            seed=body.seed,
            structured_outputs=structure,
        )
        prompt = await _prompt(self)
        budget = None if body.thinking is None else body.thinking.budget_tokens
        answer: AnswerFormat | None = prompt.get("answer")
        if budget is not None and answer is not None and answer.has_budget:
            self.params.thinking_token_budget = budget
        elif budget is not None:
            self.ignore("thinking.budget_tokens")
        return await self.respond([prompt])

    def ended(self, choice: Choice) -> dict[str, Any]:
        content = [block for part in choice.parts.all if (block := _block(part)) is not None]
        return {
            **self._fields,
            "content": content or [_begun(Part("text", 0, None))],
            **_stop_of(choice),
            "usage": self._usage(choice.request, choice.num_tokens),
        }

    def begin(self, output: RequestOutput | None) -> str:
        if output is None:
            return ""
        message: dict[str, Any] = {
            **self._fields,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(output, 0),
        }
        return _event("message_start", message=message)

    def write(self, event: PartEvent, status: str) -> Iterator[str]:
        index = event.part.index
        if event.what == "begin":
            yield _event("content_block_start", index=index, content_block=_begun(event.part))
        elif event.what == "end":
            yield _event("content_block_stop", index=index)
        else:
            kind, key = _DELTAS[event.part.kind]
            yield (
                'event: content_block_delta\ndata: {"type": "content_block_delta", '
                f'"index": {index}, "delta": {{"type": "{kind}", "{key}": '
                f"{json_string(event.text)}}}}}\n\n"
            )

    def finish(self, choice: Choice) -> Iterator[str]:
        usage = self._usage(choice.request, choice.num_tokens)
        yield _event("message_delta", delta=_stop_of(choice), usage=usage)
        yield _event("message_stop")

    def keepalive(self) -> str:
        return _event("ping")

    def failure(self, error: ApiError) -> str:
        return f"event: error\ndata: {json.dumps(anthropic_body(error))}\n\n"

    def _usage(self, output: RequestOutput, num_output: int) -> dict[str, Any]:
        """Return Anthropic's ``usage``. Its ``input_tokens`` leaves out cached tokens."""
        num_cached = output.num_cached_tokens or 0
        return {
            "input_tokens": len(output.prompt_token_ids) - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_output,
            **self.details([output]),
        }


def _stop_of(choice: Choice) -> dict[str, Any]:
    """Return why a message ended."""
    last = choice.new
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    whole = "end_turn" if choice.parts.last_call is None else "tool_use"
    reasons = {"stop": whole, "length": "max_tokens"}
    reason = reasons.get(last.finish_reason or "", last.finish_reason)
    return {"stop_reason": reason, "stop_sequence": None}


def _begun(part: Part) -> dict[str, Any]:
    """Return the block of a part that has begun."""
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": "", "citations": None}
    return {"type": "tool_use", "id": part.call.id, "name": part.call.name, "input": {}}


def _block(part: Part) -> dict[str, Any] | None:
    """Return the block of a whole part; None if it is a call that was cut."""
    if part.kind != "call":
        return {**_begun(part), _DELTAS[part.kind][1]: part.text}
    try:
        return {**_begun(part), "input": json.loads(part.text)}
    except ValueError:
        return None


def _event(name: str, **fields: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields})}\n\n"
