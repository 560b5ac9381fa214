"""The tools of requests, and the choice among them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import Discriminator, Field, GetJsonSchemaHandler, Tag, WithJsonSchema
from pydantic_core import core_schema

from mie.errors import shown
from mie.serve.body import AtMost, Body, IgnoredObject, Items
from mie.serve.errors import unsupported
from mie.serve.openai.formats import Schema
from mie.text.tools.definitions import MOST_TOOLS, NAME

Own = TypeVar("Own", bound=Body)

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


class OtherTool(IgnoredObject):
    """A tool of another type. The model is not offered it."""

    type: Annotated[str, WithJsonSchema({"type": "string", "not": {"const": "function"}})]


class NamedTool(Body):
    """The choice of one tool."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    """The tools that the model may call, and whether it must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[Items[NamedTool], Field(min_length=1), AtMost(MOST_TOOLS)]


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
        why = "the model calls the client's own functions only, and tools has none"
        raise unsupported("tools.0.type", f"{why}; got {shown(cast(OtherTool, tools[0]).type)}")
    return own


def choice_of(choice: Any, tools: Sequence[Any]) -> Any:
    """Return the choice of a tool; "auto" has no effect without tools."""
    return None if choice == "auto" and not tools else choice


def _kind_of_tool(tool: Any) -> str:
    return "other" if is_other(tool, "function") else "own"


Tools = Annotated[
    Items[
        Annotated[
            Annotated[Tool, Tag("own")] | Annotated[OtherTool, Tag("other")],
            Discriminator(_kind_of_tool),
        ]
    ],
    AtMost(MOST_TOOLS),
    SomeOwn(("function",)),
]
Choice = Literal["none", "auto", "required"]
ToolChoice = Choice | Annotated[NamedTool | AllowedToolsChoice, Field(discriminator="type")]
