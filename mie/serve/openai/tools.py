"""The tools of requests, and the choice among them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag, WithJsonSchema
from pydantic_core import core_schema

from mie.errors import shown
from mie.serve.body import AtMost, Body, IgnoredObject, Items
from mie.serve.errors import unsupported
from mie.serve.openai.formats import Schema, Text, TextFormat
from mie.text.tools.definitions import MOST_TOOLS, NAME

Own = TypeVar("Own", bound=Body)
OfFunction = TypeVar("OfFunction")
OfText = TypeVar("OfText")

OWN_TOOLS = ("function", "custom")
"""Types of the tools that a model is offered."""
ToolName = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]


@dataclass(frozen=True)
class SomeOwn:
    """Describes a list of tools: if it has any, one has a type of its dialect."""

    types: tuple[str, ...]

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        own = {"properties": {"type": {"enum": [None, *self.types]}}}
        return {**handler(schema), "anyOf": [{"maxItems": 0}, {"contains": own}]}


class FunctionName(Body):
    """The name of a function."""

    name: ToolName


class Function(FunctionName):
    """A function that the model may call."""

    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool of a chat."""

    type: Literal["function"] = "function"
    function: Function


class TextGrammar(Body):
    """The grammar of the text that a custom tool takes."""

    syntax: Literal["lark", "regex"]
    definition: Text


class TextGrammarFormat(Body):
    """A text that follows a grammar."""

    type: Literal["grammar"]
    grammar: TextGrammar


class Custom(FunctionName):
    """A custom tool. It takes a text."""

    description: str | None = None
    format: Annotated[TextFormat | TextGrammarFormat, Field(discriminator="type")] | None = None


class CustomTool(Body):
    """A custom tool of a chat."""

    type: Literal["custom"]
    custom: Custom


class OtherTool(IgnoredObject):
    """A tool of another type. The model is not offered it."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"enum": [*OWN_TOOLS]}})]


class NamedTool(Body):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


class NamedCustomTool(Body):
    """The choice of one custom tool."""

    type: Literal["custom"]
    custom: FunctionName


class AllowedTools(Body):
    """The tools that the model may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        Items[Annotated[NamedTool | NamedCustomTool, Field(discriminator="type")]],
        Field(min_length=1),
        AtMost(MOST_TOOLS),
    ]


class AllowedToolsChoice(Body):
    """The choice of some of the tools. The prompt has all tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def is_other(tool: Any, *own: object) -> bool:
    """Return whether a tool of a body has another type than its dialect's ``own``."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind not in own


def own_tools(tools: Sequence[Own | OtherTool] | None) -> list[Own]:
    """Return the tools that the model is offered.

    Raises:
        ApiError: there are only tools of other types, so that an answer would do without all.
    """
    own = [tool for tool in tools or () if not isinstance(tool, OtherTool)]
    if tools and not own:
        why = "the model calls the client's functions and custom tools only, and tools has none"
        raise unsupported("tools.0.type", f"{why}; got {shown(cast(OtherTool, tools[0]).type)}")
    return own


def choice_of(choice: Any, tools: Sequence[Any]) -> Any:
    """Return the choice of a tool; "auto" has no effect without tools."""
    return None if choice == "auto" and not tools else choice


def kind_of_tool(tool: Any) -> str:
    """Return the type of a tool of a body: "function", "custom" or "other"."""
    if is_other(tool, *OWN_TOOLS):
        return "other"
    return "custom" if isinstance(tool, dict) and tool.get("type") == "custom" else "function"


ToolsOf = Annotated[
    Items[
        Annotated[
            Annotated[OfFunction, Tag("function")]
            | Annotated[OfText, Tag("custom")]
            | Annotated[OtherTool, Tag("other")],
            Discriminator(kind_of_tool),
        ]
    ],
    AtMost(MOST_TOOLS),
    SomeOwn(OWN_TOOLS),
]
"""The tools of a dialect with these two types of its own."""
Tools = ToolsOf[Tool, CustomTool]
Choice = Literal["none", "auto", "required"]
ToolChoice = (
    Choice
    | Annotated[NamedTool | NamedCustomTool | AllowedToolsChoice, Field(discriminator="type")]
)
