"""The shapes of answers, with the keys that are always there."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict


def _shape(name: str, /, **fields: Any) -> Any:
    """Return the type of an object that has all of these fields, and maybe others."""
    return TypedDict(name, fields)  # type: ignore[operator]


def _list(*kinds: Any) -> Any:
    """Return the type of a list of objects, each of one of these types."""
    kind = reduce(or_, kinds)
    return list[kind]  # type: ignore[valid-type]


_Count = Annotated[int, Field(ge=0)]
_Status: Any = Literal["completed", "incomplete"]

# OpenAI's

_Cached = _shape("CachedTokens", cached_tokens=_Count)
_Usage = _shape(
    "Usage",
    prompt_tokens=_Count,
    completion_tokens=_Count,
    total_tokens=_Count,
    prompt_tokens_details=_Cached,
)
_GENERATED: Any = {
    "id": str,
    "created": _Count,
    "model": str,
    "system_fingerprint": str,
    "usage": _Usage,
}
_CHOICE: Any = {
    "index": _Count,
    "logprobs": dict[str, Any] | None,
    "finish_reason": Literal["stop", "length", "tool_calls", "abort", None],
}
_Texts = _list(_shape("CompletionChoice", text=str, **_CHOICE))
Completion = _shape("Completion", object=Literal["text_completion"], choices=_Texts, **_GENERATED)
_Function = _shape("WrittenFunction", name=str, arguments=str)
_Call = _shape("WrittenCall", id=str, type=Literal["function"], function=_Function)
_Calls: Any = _list(_Call)
_Message = _shape(
    "AssistantMessage",
    role=Literal["assistant"],
    content=str | None,
    refusal=str | None,
    reasoning=NotRequired[str | None],
    tool_calls=NotRequired[_Calls],
)
_Chats = _list(_shape("ChatChoice", message=_Message, **_CHOICE))
ChatCompletion = _shape(
    "ChatCompletion", object=Literal["chat.completion"], choices=_Chats, **_GENERATED
)
_OutputText = _shape(
    "OutputText",
    type=Literal["output_text"],
    text=str,
    annotations=list[Any],
    logprobs=list[dict[str, Any]],
)
_OutputMessage = _shape(
    "OutputMessage",
    id=str,
    status=_Status,
    type=Literal["message"],
    role=Literal["assistant"],
    content=_list(_OutputText),
)
_Thought = _shape("OutputReasoningText", type=Literal["reasoning_text"], text=str)
_OutputReasoning = _shape(
    "OutputReasoning",
    id=str,
    status=_Status,
    type=Literal["reasoning"],
    summary=list[Any],
    content=_list(_Thought),
)
_OutputCall = _shape(
    "OutputCall",
    id=str,
    status=_Status,
    type=Literal["function_call"],
    call_id=str,
    name=str,
    arguments=str,
)
_ResponseUsage = _shape(
    "ResponseUsage",
    input_tokens=_Count,
    input_tokens_details=_Cached,
    output_tokens=_Count,
    output_tokens_details=_shape("ReasoningTokens", reasoning_tokens=_Count),
    total_tokens=_Count,
)
Response = _shape(
    "Response",
    id=str,
    object=Literal["response"],
    created_at=_Count,
    status=_Status,
    model=str,
    output=_list(_OutputMessage, _OutputReasoning, _OutputCall),
    incomplete_details=dict[str, Any] | None,
    store=Literal[False],
    usage=_ResponseUsage,
)
Model = _shape(
    "Model",
    id=str,
    object=Literal["model"],
    created=_Count,
    owned_by=str,
    max_model_len=_Count,
    default_sampling_params=dict[str, Any],
)
Models = _shape("Models", object=Literal["list"], data=_list(Model))
_Error = _shape("ErrorDetails", message=str, type=str, param=str | None, code=str | None)
Error = _shape("Error", error=_Error)

# Anthropic's

_Text = _shape("MessageText", type=Literal["text"], text=str)
_Thinking = _shape("MessageThinking", type=Literal["thinking"], thinking=str, signature=str)
_ToolUse = _shape("MessageCall", type=Literal["tool_use"], id=str, name=str, input=dict[str, Any])
_MessageUsage = _shape(
    "MessageUsage",
    input_tokens=_Count,
    cache_creation_input_tokens=_Count,
    cache_read_input_tokens=_Count,
    output_tokens=_Count,
)
Message = _shape(
    "Message",
    id=str,
    type=Literal["message"],
    role=Literal["assistant"],
    model=str,
    content=_list(_Text, _Thinking, _ToolUse),
    stop_reason=Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"],
    stop_sequence=str | None,
    usage=_MessageUsage,
)
TokenCount = _shape("TokenCount", input_tokens=_Count)
_Details = _shape("AnthropicErrorDetails", type=str, message=str)
AnthropicError = _shape("AnthropicError", type=Literal["error"], error=_Details)

# vLLM's, llama.cpp's, and the server's own

_Piece = _shape("Piece", id=_Count, piece=str | list[int])
Tokens = _shape(
    "Tokens",
    count=_Count,
    max_model_len=_Count,
    tokens=_list(_Count) | _list(_Piece),
    token_strs=list[str] | None,
)
Text = _shape("Text", prompt=str, content=str)
Prompt = _shape("Prompt", prompt=str)
TokenizerInfo = _shape(
    "TokenizerInfo",
    vocab_size=_Count,
    model_max_length=_Count,
    bos_token=str | None,
    eos_token=str | None,
    chat_template=str | None,
)
Cancelled = _shape("Cancelled", id=str, cancelled=Literal[True])
Reset = _shape("Reset", reset=Literal[True])
Health = _shape("Health", status=Literal["ok", "stalled", "draining", "dead"])
Load = _shape("Load", server_load=float)
Version = _shape("Version", version=str)
Description = _shape("Description", openapi=Literal["3.1.0"], paths=dict[str, Any])
