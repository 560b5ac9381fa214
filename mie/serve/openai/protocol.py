"""The bodies of OpenAI's generation requests, with vLLM's additions.

Types are checked strictly, and null stands for the default.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag, ValidationInfo, WithJsonSchema
from pydantic_core import PydanticCustomError

from mie.config.engine import DEFAULT_LIMITS
from mie.config.params.values import MAX_INTEGER
from mie.errors import shown
from mie.serve.body import (
    ABSENT,
    SOME,
    AtMost,
    Body,
    Items,
    Whole,
    all_of,
    any_of,
    limit,
    refused,
    whole,
)
from mie.serve.fields import Unsupported, WithoutEffect, with_fields_of
from mie.serve.openai.formats import ResponseFormat, StructuredOutputs
from mie.serve.openai.tools import ToolChoice, Tools
from mie.text.messages import MOST_MESSAGES

MAX_STOP_STRINGS = 16
MAX_PROMPTS = 4096
MAX_BIASES = 1024
"""Maximum number of entries of ``logit_bias``, as in vLLM."""
MAX_VARIABLES = 256
"""Maximum number of variables of a chat template."""

Salt = Annotated[str, Field(min_length=1, max_length=DEFAULT_LIMITS.max_cache_salt_chars)]
Stop = Annotated[str, Field(min_length=1, max_length=DEFAULT_LIMITS.max_stop_chars)]
BadWord = Annotated[str, Field(min_length=1, max_length=DEFAULT_LIMITS.max_bad_word_length)]
Count = Annotated[int, Whole(1)]
Natural = Annotated[int, Whole(0)]
NaturalOrAll = Annotated[int, Whole(-1)]
TokenId = Natural
Integer64 = Annotated[int, Whole(-(2**63))]
REST = "at least 1, or -1 for the rest of the context"
Limit = Annotated[int, Whole(-1, instead_of_zero=REST)]
"""The maximum number of new tokens; -1 is the rest of the context."""
Temperature = Annotated[float, Field(ge=0, le=1000)]
TopP = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


def _prompts(prompt: Any, info: ValidationInfo) -> Any:
    """Return the prompts of a request, each a text or a list of token ids.

    Raises:
        PydanticCustomError: it is none of the four forms that OpenAI has, or too long.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    elif not isinstance(prompt, list):
        raise _bad_prompt(prompt)
    elif prompt and type(prompt[0]) in (int, float):
        prompt = [prompt]
    if not prompt or not all(prompt):
        raise refused("is empty; it needs at least one token")
    if len(prompt) > MAX_PROMPTS:
        raise refused(f"has {len(prompt)} entries; the limit is {MAX_PROMPTS}")
    if all(isinstance(each, str) for each in prompt):
        return prompt
    most = limit(info, "prompt")
    return [_ids(each, prompt, most) for each in prompt]


def _ids(given: object, prompt: object, most: int) -> list[int]:
    """Return the token ids of one of the prompts."""
    if not isinstance(given, list):
        raise _bad_prompt(prompt)
    if len(given) > most:
        raise refused(f"may have at most {most} token ids; got {len(given)}")
    if set(map(type, given)) != {int}:
        given = [whole(each) for each in given]
        if set(map(type, given)) != {int}:
            raise _bad_prompt(prompt)
    return given


def _bad_prompt(prompt: object) -> PydanticCustomError:
    return refused(
        "must be a string, a list of strings, a list of token ids, or a list of lists of token "
        f"ids; got {shown(prompt)}"
    )


_ID = {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}
_IDS = {"type": "array", "items": _ID, "minItems": 1}
_STRING = {"type": "string", "minLength": 1}
Prompt = Annotated[
    list[Any],  # Checked by hand: a union would report every alternative's errors.
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _STRING,
                {"type": "array", "items": _STRING, "minItems": 1},
                _IDS,
                {"type": "array", "items": _IDS, "minItems": 1},
            ]
        }
    ),
]
Biases = Annotated[
    dict[str, Any],  # `SamplingParams` checks it
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,18}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
    AtMost(MAX_BIASES),
]


# Messages.


class TextPart(Body):
    """A part of a content that is text."""

    type: Literal["text", "input_text", "output_text"]
    text: str
    annotations: WithoutEffect = None
    cache_control: WithoutEffect = None  # equal prefixes are cached anyway
    logprobs: WithoutEffect = None


class RefusalPart(Body):
    """A part of an assistant's content that declines."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Content = str | Items[Part]


class CalledFunction(Body):
    """The function of a call, and its arguments as JSON text or as an object."""

    name: str
    arguments: Annotated[str | dict[str, Any] | None, AtMost("prompt")] = None


class Call(Body):
    """A call of a function in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: WithoutEffect = None


class CalledCustomTool(Body):
    """The custom tool of a call, and its text."""

    name: str
    input: str


class CustomCall(Body):
    """A call of a custom tool in an assistant's message."""

    id: str | None = None
    type: Literal["custom"]
    custom: CalledCustomTool
    index: WithoutEffect = None


def _kind_of_call(call: Any) -> str:
    return "custom" if isinstance(call, dict) and call.get("type") == "custom" else "function"


AnyCall = Annotated[
    Annotated[Call, Tag("function")] | Annotated[CustomCall, Tag("custom")],
    Discriminator(_kind_of_call),
]


_PEOPLE = ("system", "developer", "user", "assistant")


class ChatMessage(Body):
    """A message of a conversation. Unknown fields reach the chat template too."""

    # A message has a content, perhaps null, unless an assistant called tools in it.
    model_config = all_of(
        {
            "anyOf": [
                {"required": ["content"]},
                {
                    "properties": {"role": {"const": "assistant"}, "tool_calls": SOME},
                    "required": ["tool_calls"],
                },
            ]
        }
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[Items[AnyCall], AtMost(MOST_MESSAGES)] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[Any, Unsupported("send tool_calls")] = None
    audio: Annotated[Any, Unsupported("the model reads and writes text only")] = None
    refusal: WithoutEffect = None
    annotations: WithoutEffect = None


class ToolMessage(Body):
    """The result of a tool: any JSON value."""

    role: Annotated[
        str,
        Field(min_length=1),
        WithJsonSchema({"type": "string", "minLength": 1, "not": {"enum": _PEOPLE}}),
    ]
    content: Any
    name: str | None = None
    tool_call_id: str | None = None


def _kind(message: Any) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    return "tool" if isinstance(role, str) and role not in _PEOPLE else "chat"


Message = Annotated[
    Annotated[ChatMessage, Tag("chat")] | Annotated[ToolMessage, Tag("tool")], Discriminator(_kind)
]
Messages = Annotated[Items[Message], Field(min_length=1), AtMost(MOST_MESSAGES)]


# Requests.


@with_fields_of("stream_options")
class StreamOptions(Body):
    """The reports of a stream beside its text."""

    include_usage: bool | None = None
    """Send one more chunk, without choices, that has the usage."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far in every chunk (vLLM)."""


STREAMED = any_of({"stream_options": ABSENT}, {"stream": {"const": True}})
"""Options of a stream need one."""
CHOSEN = any_of({"tool_choice": {"enum": [None, "none", "auto"]}}, {"tools": SOME})
"""A choice of a tool needs tools."""


@with_fields_of("openai")
class OtherFields(Body):
    """The fields that mie reads and does not implement, and the fields that change no answer."""


class Queued(Body):
    """The fields of a request for its place in the queue and its share of the prefix cache."""

    cache_salt: Salt | None = None
    priority: Integer64 | None = None


class GenerationBody(OtherFields, Queued):
    """The fields of both generation routes."""

    model_config = all_of(STREAMED)

    model: str | None = None
    n: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: NaturalOrAll | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Integer64 | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    stop: Stop | Annotated[Items[Stop], AtMost(MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[Items[TokenId], AtMost(DEFAULT_LIMITS.max_stop_token_ids)] | None = (
        None
    )
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Natural | None = None
    bad_words: Annotated[Items[BadWord], AtMost(DEFAULT_LIMITS.max_bad_words)] | None = None
    allowed_token_ids: (
        Annotated[Items[TokenId], Field(min_length=1), AtMost("vocabulary")] | None
    ) = None
    logit_bias: Biases | None = None
    prompt_logprobs: NaturalOrAll | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: Natural | None = None
    """Reasoning tokens after which the closing tag is written (vLLM)."""
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: (
        Annotated[int, Whole(-1, instead_of_zero="at least 1, or -1 for as many as fit")] | None
    ) = None
    skip_reading_prefix_cache: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    """Send token ids beside the text (vLLM)."""
    return_tokens_as_token_ids: bool | None = None
    """Spell tokens of log-probabilities as ``token_id:7`` (vLLM)."""


class CompletionRequest(GenerationBody):
    """The body of ``POST /v1/completions``."""

    prompt: Prompt
    max_tokens: NaturalOrAll | None = None
    """The maximum number of new tokens; -1 is the rest of the context."""
    echo: bool | None = None
    logprobs: NaturalOrAll | None = None
    add_special_tokens: bool | None = None


class TemplateFields(Body):
    """A conversation, and how the chat template writes it."""

    model_config = all_of(CHOSEN)

    messages: Messages
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AtMost(MAX_VARIABLES)] | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] | None = None


class Prediction(Body):
    """A text that the answer may contain. It makes the answer faster, and does not change it."""

    type: Literal["content"]
    content: str | Items[TextPart]

    @property
    def text(self) -> str:
        """The whole text."""
        content = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatCompletionRequest(TemplateFields, GenerationBody):
    """The body of ``POST /v1/chat/completions``."""

    model_config = all_of(CHOSEN)

    max_tokens: Limit | None = None
    """The maximum number of new tokens; -1 is the rest of the context."""
    prediction: Prediction | None = None
    """A text that the answer may contain, for drafts."""
    max_completion_tokens: Limit | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    """How much the model reasons, if its chat template reads that."""
    include_reasoning: bool | None = None
    """Whether the answer has the model's reasoning (vLLM)."""
    logprobs: bool | None = None
    top_logprobs: NaturalOrAll | None = None
