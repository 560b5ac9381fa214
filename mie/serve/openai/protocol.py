"""The bodies of OpenAI's generation requests, with vLLM's additions.

Types are checked strictly, and null stands for the default. Fields that are not declared here are
judged by `mie.serve.openai.params`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

MAX_STOP_STRINGS = 16

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is checked up to its first wrong item.

Pydantic would make an error of each, and a body may hold millions."""
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0)]
Biases = Annotated[
    Any,  # checked by hand, up to the first wrong one
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
Prompt = Annotated[
    Any,  # Checked by hand: a union would report every alternative's errors.
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "array",
                        "items": {"type": "integer", "minimum": 0},
                        "minItems": 1,
                    },
                },
            ]
        }
    ),
]

_OBJECT = {"type": "object"}
_NAMED = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string", "minLength": 1}},
        },
    },
}
ResponseFormat = Annotated[
    Any,  # checked by hand, with messages that name the part that is wrong
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "null"},
                {
                    "type": "object",
                    "required": ["type"],
                    "properties": {"type": {"enum": ["text", "json_object"]}},
                },
                {
                    "type": "object",
                    "required": ["type", "json_schema"],
                    "properties": {
                        "type": {"const": "json_schema"},
                        "json_schema": {
                            "type": "object",
                            "required": ["schema"],
                            "properties": {"schema": _OBJECT},
                        },
                    },
                },
            ]
        }
    ),
]
Tools = Annotated[
    Any,  # checked by hand, as it is offline
    WithJsonSchema(
        {"anyOf": [{"type": "null"}, {"type": "array", "minItems": 1, "items": _NAMED}]}
    ),
]
ToolChoice = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"enum": [None, "none", "auto", "required"]}, _NAMED]}),
]


class Body(BaseModel):
    """A JSON object whose unknown fields are kept in ``model_extra``."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """What a stream reports beside its text."""

    include_usage: bool | None = None
    """Send one more chunk, without choices, that has the usage."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every chunk (vLLM)."""


class GenerationBody(Body):
    """What both generation routes take."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=1000)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    stop: Stop | Annotated[Items[Stop], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Items[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    bad_words: Items[str] | None = None
    allowed_token_ids: Annotated[Items[TokenId], Field(min_length=1)] | None = None
    logit_bias: Biases | None = None
    prompt_logprobs: Annotated[int, Field(ge=-1)] | None = None
    response_format: ResponseFormat = None
    structured_outputs: dict[str, Any] | None = None
    """What the answer must be, as in `StructuredOutputsParams` (vLLM)."""
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    skip_reading_prefix_cache: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Send token ids beside the text (vLLM)."""
    return_tokens_as_token_ids: bool | None = None
    """Spell tokens of log-probabilities as ``token_id:7`` (vLLM)."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None


class CompletionRequest(GenerationBody):
    """The body of ``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=-1)] | None = None
    add_special_tokens: bool | None = None


class ChatMessage(Body):
    """A message of a conversation."""

    role: Annotated[str, Field(min_length=1)]
    content: str | Items[dict[str, Any]] | None = None


class ChatCompletionRequest(GenerationBody):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[Items[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Tools = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """Whether the answer has the model's reasoning (vLLM)."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=-1)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] | None = None
