"""The body of ``POST /v1/responses``."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from mie.serve.body import AtMost, Body, Items, Whole, all_of
from mie.serve.fields import WithoutEffect, with_fields_of
from mie.serve.openai.formats import JsonObjectFormat, NamedSchema, Text, TextFormat
from mie.serve.openai.protocol import (
    CHOSEN,
    Content,
    Integer64,
    Limit,
    Natural,
    Queued,
    Temperature,
    TopP,
)
from mie.serve.openai.tools import Choice, Function, FunctionName, TextGrammar, ToolsOf
from mie.text.messages import MOST_MESSAGES
from mie.text.tools.definitions import MOST_TOOLS

LOGPROBS = "message.output_text.logprobs"
"""The entry of ``include`` for log-probabilities."""
Included = Literal[
    "message.output_text.logprobs",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Parts of answers that are sent on demand. Answers of mie have only the first."""


class FlatSchemaFormat(NamedSchema):
    """JSON of a schema."""

    type: Literal["json_schema"]


@with_fields_of("responses.text")
class TextOptions(Body):
    """The constraint of an answer's text."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | FlatSchemaFormat, Field(discriminator="type")]
        | None
    ) = None


class FunctionTool(Function):
    """A tool of a response."""

    type: Literal["function"]


class FlatGrammarFormat(TextGrammar):
    """A text that follows a grammar."""

    type: Literal["grammar"]


class CustomTool(FunctionName):
    """A custom tool of a response."""

    type: Literal["custom"]
    description: str | None = None
    format: Annotated[TextFormat | FlatGrammarFormat, Field(discriminator="type")] | None = None


class NamedFunction(FunctionName):
    """The choice of one tool."""

    type: Literal["function", "custom"]


class AllowedFunctions(Body):
    """The choice of some of the tools. The prompt has all tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedFunction], Field(min_length=1), AtMost(MOST_TOOLS)]


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


class CustomCallItem(Item):
    """A call of a custom tool that the model wrote."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class OutputItem(Item):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class CustomOutputItem(Item):
    """The result of a call of a custom tool."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: Content


class ReasoningText(Body):
    """A part of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


@with_fields_of("responses.input.reasoning")
class ReasoningItem(Item):
    """The reasoning that the model wrote before an answer."""

    type: Literal["reasoning"]
    content: Items[ReasoningText] | None = None
    summary: WithoutEffect = None


def _kind(item: Any) -> str:
    return str(item.get("type", "message")) if isinstance(item, dict) else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


@with_fields_of("responses.stream_options")
class ResponseStreamOptions(Body):
    """The additions of a stream to its events."""


@with_fields_of("responses.reasoning")
class ReasoningOptions(Body):
    """How much the model reasons."""

    effort: str | None = None
    """A value of the chat template's own, if the template reads one."""


@with_fields_of("responses")
class ResponsesRequest(Queued):
    """The body of ``POST /v1/responses``."""

    model_config = all_of(CHOSEN)

    model: str | None = None
    input: Text | Annotated[Items[InputItem], Field(min_length=1), AtMost(MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Limit | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    include: Annotated[Items[Included], AtMost(16)] | None = None
    top_logprobs: Natural | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], AtMost(16)] | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: ToolsOf[FunctionTool, CustomTool] | None = None
    tool_choice: (
        Choice | Annotated[NamedFunction | AllowedFunctions, Field(discriminator="type")] | None
    ) = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int, Whole(1)] | None = None
    seed: Integer64 | None = None  # not in OpenAI's API
