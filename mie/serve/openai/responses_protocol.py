"""The body of ``POST /v1/responses``."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mie.serve.body import AtMost, Body, Items, Unsupported, WithoutEffect, all_of, with_fields_of
from mie.serve.openai.formats import JsonObjectFormat, NamedSchema, Text, TextFormat
from mie.serve.openai.protocol import (
    CHOSEN,
    Choice,
    Content,
    Count,
    Function,
    FunctionName,
    Integer64,
    Natural,
    Queued,
    Temperature,
    TopP,
)
from mie.structured.tools.definitions import MOST_TOOLS
from mie.text.messages import MOST_MESSAGES

LOGPROBS = "message.output_text.logprobs"
"""The entry of ``include`` that asks for log-probabilities."""


class FlatSchemaFormat(NamedSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


class TextOptions(Body):
    """The constraint of an answer's text."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    verbosity: Annotated[Any, Unsupported("the model has no such setting", ("medium",))] = None


class FunctionTool(Function):
    """A tool of a response."""

    type: Literal["function"]


class NamedFunction(FunctionName):
    """The choice of one tool."""

    type: Literal["function"]


class Item(Body):
    """The fields that all items of the input may have, since answers have them."""

    id: WithoutEffect = None
    status: WithoutEffect = None


class MessageItem(Item):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    phase: WithoutEffect = None


class CallItem(Item):
    """A call of a tool that the model wrote."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class OutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningText(Body):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Item):
    """The reasoning that the model wrote before an answer."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: WithoutEffect = None
    encrypted_content: Annotated[Any, Unsupported("reasoning is sent as text")] = None


def _kind(item: Any) -> str:
    return str(item.get("type", "message")) if isinstance(item, dict) else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


class ResponseStreamOptions(Body):
    """The additions of a stream to its events."""

    include_obfuscation: Annotated[Any, Unsupported("chunks are not padded", (False,))] = None


@with_fields_of("responses")
class ResponsesRequest(Queued):
    """The body of ``POST /v1/responses``."""

    model_config = all_of(CHOSEN)

    model: str | None = None
    input: Text | Annotated[Items[InputItem], Field(min_length=1), AtMost(MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    include: Annotated[Items[Literal["message.output_text.logprobs"]], AtMost(16)] | None = None
    top_logprobs: Natural | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], AtMost(16)] | None = None
    text: TextOptions | None = None
    tools: Annotated[Items[FunctionTool], AtMost(MOST_TOOLS)] | None = None
    tool_choice: Choice | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    seed: Integer64 | None = None  # mie's own
