"""The bodies of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

from pydantic import Field

from mie.config.engine import DEFAULT_LIMITS
from mie.serve.body import (
    SOME,
    AtMost,
    Body,
    Items,
    Unsupported,
    WithoutEffect,
    all_of,
    any_of,
    with_fields_of,
)
from mie.serve.openai.formats import Schema
from mie.serve.openai.protocol import (
    Count,
    Integer64,
    Natural,
    Queued,
    Stop,
    Temperature,
    ToolName,
    TopP,
)
from mie.structured.tools.definitions import MOST_TOOLS
from mie.text.messages import MOST_MESSAGES

_NO_BUDGET = "the chat template decides whether a model reasons, and it has no budget"


class Block(Body):
    """The fields of all blocks."""

    cache_control: WithoutEffect = None  # equal prefixes are cached anyway


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Annotated[Any, Unsupported("the model reads no sources", ([], {}, ""))] = None


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[TextBlock] | None = None
    is_error: WithoutEffect = None  # the text says so


class ToolUseBlock(Block):
    """A call of a tool that the model wrote."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: WithoutEffect = None


class ThinkingBlock(Block):
    """The reasoning that the model wrote before an answer."""

    type: Literal["thinking"]
    thinking: str
    signature: WithoutEffect = None


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock, Field(discriminator="type")]


class UserTurn(Body):
    """A turn of the user."""

    role: Literal["user"]
    content: str | Items[UserBlock]


class AssistantTurn(Body):
    """A turn of the assistant. An answer continues the last one."""

    role: Literal["assistant"]
    content: str | Items[AssistantBlock]


Turn = Annotated[UserTurn | AssistantTurn, Field(discriminator="role")]


class ClientTool(Body):
    """A tool of the client's own."""

    type: Annotated[Any, Unsupported("tools have a name and an input_schema", ("custom",))] = None
    name: ToolName
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None
    cache_control: WithoutEffect = None


class ClientToolChoice(Body):
    """Which tools the model may call."""

    model_config = all_of(
        any_of({"type": {"enum": ["auto", "any", "none"]}}, {"name": {"type": "string"}})
    )

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class SchemaFormat(Body):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class OutputConfig(Body):
    """The constraint of an answer."""

    format: SchemaFormat | None = None
    effort: Annotated[Any, Unsupported(_NO_BUDGET)] = None


_CHOSEN = any_of(
    {"tool_choice": {"type": "null"}},
    {
        "tool_choice": {
            "type": "object",
            "properties": {"type": {"enum": ["auto", "none"]}},
            "required": ["type"],
        }
    },
    {"tools": SOME},
)
"""A tool that must be called is one of the tools."""


@with_fields_of("messages")
class CountTokensRequest(Body):
    """The body of ``POST /v1/messages/count_tokens``."""

    model_config = all_of(_CHOSEN)

    model: str | None = None
    messages: Annotated[Items[Turn], Field(min_length=1), AtMost(MOST_MESSAGES)]
    system: str | Items[TextBlock] | None = None
    tools: Annotated[Items[ClientTool], AtMost(MOST_TOOLS)] | None = None
    tool_choice: ClientToolChoice | None = None


class MessagesRequest(CountTokensRequest, Queued):
    """The body of ``POST /v1/messages``."""

    max_tokens: Count
    stop_sequences: Annotated[Items[Stop], AtMost(DEFAULT_LIMITS.max_stop_strings)] | None = None
    output_config: OutputConfig | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Natural | None = None
    seed: Integer64 | None = None  # mie's own
