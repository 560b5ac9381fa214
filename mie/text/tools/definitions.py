"""The tools of a request, the tools that the model may call, and its calls."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mie.errors import RequestError, shown

MOST_TOOLS = 1024
"""Maximum number of tools. An agent with servers of tools has hundreds."""
MOST_CALLS = 32
"""Calls that an answer may have. A small model may not know when to end."""
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""Names of tools. The formats write them without escapes."""

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, an object."""
    is_strict: bool = False
    """Whether the arguments must follow the schema in a call that the model decides to write."""


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """Which tools may be called in an answer, and whether one must be."""

    tools: tuple[Tool, ...]
    is_forced: bool
    """Whether the answer is a call, and nothing else."""
    may_repeat: bool
    """Whether the answer may have several calls."""
    is_subset: bool = False
    """Whether the request has tools that may not be called."""

    @property
    def is_held(self) -> bool:
        """Whether the calls that a model decides to write must name these tools or be strict."""
        return self.is_subset or any(tool.is_strict for tool in self.tools)

    @property
    def names(self) -> frozenset[str]:
        """The names of the tools."""
        return frozenset(tool.name for tool in self.tools)

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of the arguments by the names of the tools."""
        return {tool.name: tool.parameters for tool in self.tools}


def tool_choice_of(
    tools: object, tool_choice: object = None, parallel_tool_calls: object = None
) -> ToolChoice | None:
    """Return the choice of OpenAI's three parameters, or None if no tool may be called.

    ``tool_choice`` is "auto" by default. It may be "none", "required",
    ``{"type": "function", "function": {"name": …}}``, or the tools that may be called:
    ``{"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": […]}}``.

    Raises:
        RequestError: one of them is malformed, or they contradict each other.
    """
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        got = shown(parallel_tool_calls)
        raise RequestError(f"parallel_tool_calls must be True or False; got {got}")
    if tools is None:
        if tool_choice not in (None, "none"):
            raise RequestError(f"tool_choice needs tools; got {shown(tool_choice)} without them")
        return None
    known = _tools(tools)
    allowed, mode, may_repeat = known, tool_choice, parallel_tool_calls is not False
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "function":
        allowed, mode = (_named(tool_choice, known, "tool_choice"),), "required"
        may_repeat = False
    elif isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
        allowed, mode = _allowed(tool_choice.get("allowed_tools"), known)
    if mode == "none":
        return None
    if mode not in (None, "auto", "required"):
        raise RequestError(
            "tool_choice must be 'none', 'auto', 'required', {'type': 'function', 'function': "
            "{'name': …}}, or {'type': 'allowed_tools', 'allowed_tools': {'mode': …, 'tools': …}};"
            f" got {shown(tool_choice)}"
        )
    return ToolChoice(
        tools=allowed,
        is_forced=mode == "required",
        may_repeat=may_repeat,
        is_subset=len(allowed) < len(known),
    )


def _allowed(given: object, known: Sequence[Tool]) -> tuple[tuple[Tool, ...], object]:
    """Return the tools that may be called, and whether one must be."""
    where = "tool_choice.allowed_tools"
    if not isinstance(given, Mapping) or given.get("mode") not in ("auto", "required"):
        raise RequestError(
            f"{where} must have a mode, 'auto' or 'required', and tools; got {shown(given)}"
        )
    tools = given.get("tools")
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes) or not tools:
        raise RequestError(f"{where}.tools must be a list of functions; got {shown(tools)}")
    named = [_named(tool, known, f"{where}.tools[{index}]") for index, tool in enumerate(tools)]
    return tuple(tool for tool in known if tool in named), given["mode"]


def _tools(tools: object) -> tuple[Tool, ...]:
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise RequestError(f"tools must be a list of functions; got {shown(tools)}")
    if not 1 <= len(tools) <= MOST_TOOLS:
        raise RequestError(f"tools must have 1 to {MOST_TOOLS} entries; got {len(tools)}")
    known = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    for name, count in Counter(tool.name for tool in known).items():
        if count > 1:
            raise RequestError(f"tools has the name {name} {count} times; names differ")
    return known


def _tool(tool: object, where: str) -> Tool:
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        raise RequestError(
            f"{where} must be {{'type': 'function', 'function': …}}; got {shown(tool)}"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function must be an object; got {shown(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name must be 1 to 128 letters, digits, '_', '-', '.' or ':'; got "
            f"{shown(name)}"
        )
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    if not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise RequestError(
            f"{where}.function.parameters must be the JSON schema of an object; got "
            f"{shown(parameters)}"
        )
    strict = function.get("strict")
    if strict not in (None, True, False):
        raise RequestError(f"{where}.function.strict must be True or False; got {shown(strict)}")
    return Tool(name=name, parameters={"type": "object", **parameters}, is_strict=strict is True)


def _named(given: object, known: Sequence[Tool], where: str) -> Tool:
    """Return the tool that an object names."""
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"{where} must name a function; got {shown(given)}")
    for tool in known:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in known)
    raise RequestError(f"{where} names {shown(name)}; the tools are {names}")


def call_message(id: str | None, name: str, arguments: object) -> dict[str, Any]:
    """Return a call as an entry of ``tool_calls`` in an assistant's message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(kw_only=True, slots=True)
class ToolCall:
    """A call of a tool that a model wrote."""

    index: int
    """Place among the calls of its choice, from 0."""
    id: str
    """Name of this call, under which its result is sent back."""
    name: str
    """Name of the tool."""
    arguments: str = ""
    """The arguments as JSON, or only the new part of it if ``output_kind`` is DELTA."""

    def as_message(self) -> dict[str, Any]:
        """Return the call as an entry of ``tool_calls`` in an assistant's message."""
        return call_message(self.id, self.name, self.arguments)
