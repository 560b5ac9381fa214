"""The bodies of Anthropic's Messages API."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, WithJsonSchema

from mie.config.engine import DEFAULT_LIMITS
from mie.serve.body import SOME, AtMost, Body, IgnoredObject, Items, all_of, any_of
from mie.serve.fields import Unsupported, WithoutEffect, with_fields_of
from mie.serve.openai.formats import Schema
from mie.serve.openai.protocol import Count, Integer64, Natural, Queued, Stop, Temperature, TopP
from mie.serve.openai.tools import OtherTool, SomeOwn, ToolName, is_other
from mie.text.messages import MOST_MESSAGES
from mie.text.tools.definitions import MOST_TOOLS


class Block(Body):
    """The fields of all blocks."""

    cache_control: WithoutEffect = None  # equal prefixes are cached anyway


class TextBlock(Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Annotated[Any, Unsupported("the model reads no sources", ([], {}, ""))] = None


class ToolReferenceBlock(Block):
    """The name of a tool that a search found. The model is offered all tools anyway."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        """The name. The model reads it as the result."""
        return self.tool_name


ResultBlock = Annotated[TextBlock | ToolReferenceBlock, Field(discriminator="type")]


class ToolResultBlock(Block):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[ResultBlock] | None = None
    is_error: WithoutEffect = None  # the text of the result says so itself


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


class RedactedThinkingBlock(IgnoredObject):
    """Reasoning that only Anthropic can read."""

    type: Literal["redacted_thinking"]


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock, Field(discriminator="type")
]


class UserTurn(Body):
    """A turn of the user."""

    role: Literal["user"]
    content: str | Items[UserBlock]


class AssistantTurn(Body):
    """A turn of the assistant. An answer continues the last one."""

    role: Literal["assistant"]
    content: str | Items[AssistantBlock]


class SystemTurn(Body):
    """Instructions between the turns."""

    role: Literal["system"]
    content: str | Items[TextBlock]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


@with_fields_of("messages.tools")
class ClientTool(Body):
    """A tool of the client's own."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None
    cache_control: WithoutEffect = None


class ServerTool(OtherTool):
    """A tool that Anthropic defines, such as a web search. The model is not offered it."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "custom"}})]


def _kind_of_tool(tool: Any) -> str:
    return "other" if is_other(tool, "custom") else "own"


class ClientToolChoice(Body):
    """The tools that the model may call."""

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


@with_fields_of("messages.output_config")
class OutputConfig(Body):
    """The constraint of an answer."""

    format: SchemaFormat | None = None
    effort: str | None = None
    """How much the model reasons, if its chat template reads that."""


@with_fields_of("messages.thinking")
class Thinking(Body):
    """Whether the model reasons, if its chat template has a switch."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Count | None = None
    """Reasoning tokens after which the closing tag is written."""


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
    tools: (
        Annotated[
            Items[
                Annotated[
                    Annotated[ClientTool, Tag("own")] | Annotated[ServerTool, Tag("other")],
                    Discriminator(_kind_of_tool),
                ]
            ],
            AtMost(MOST_TOOLS),
            SomeOwn(("custom",)),
        ]
        | None
    ) = None
    tool_choice: ClientToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountTokensRequest, Queued):
    """The body of ``POST /v1/messages``."""

    max_tokens: Count
    stop_sequences: Annotated[Items[Stop], AtMost(DEFAULT_LIMITS.max_stop_strings)] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: Natural | None = None
    seed: Integer64 | None = None  # not in Anthropic's API
