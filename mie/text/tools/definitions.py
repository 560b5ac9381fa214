"""The tools of a request, the tools that the model may call, and its calls."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mie.errors import RequestError, shown

MOST_TOOLS = 1024
"""Maximum number of tools. An agent with servers of tools has hundreds."""
MOST_CALLS = 32
"""Calls that an answer may have. A small model may not end."""
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
"""Names of tools. The formats write them without escapes."""

INPUT = "input"
"""The only argument of a custom tool, where a model writes it as a function."""

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, kw_only=True)
class TextGrammar:
    """The grammar of the input of a custom tool."""

    syntax: str
    """"lark" or "regex"."""
    definition: str


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call, or a custom tool with a text as input."""

    name: str
    parameters: Mapping[str, Any]
    """The JSON schema of its arguments, an object."""
    is_strict: bool = False
    """Whether the arguments must follow the schema in a call that the model decides to write."""
    is_custom: bool = False
    grammar: TextGrammar | None = None
    """The grammar of the text that a custom tool takes; None for any text."""


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """The tools that may be called in an answer, and whether a call is required."""

    tools: tuple[Tool, ...]
    is_forced: bool
    """Whether the answer is a call, and nothing else."""
    most_calls: int | None = None
    """Maximum number of calls in the answer; None if the caller sets no limit."""
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
    def customs(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(tool.name for tool in self.tools if tool.is_custom)

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """The schemas of the arguments by the names of the tools."""
        return {tool.name: tool.parameters for tool in self.tools}


def tool_choice_of(
    tools: object,
    tool_choice: object = None,
    parallel_tool_calls: object = None,
    max_tool_calls: object = None,
) -> ToolChoice | None:
    """Return the choice of OpenAI's four parameters, or None if no tool may be called.

    ``tool_choice`` is "auto" by default. It may be "none", "required",
    ``{"type": "function", "function": {"name": …}}``, or the tools that may be called:
    ``{"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": […]}}``.

    Raises:
        RequestError: one of them is malformed, or they contradict each other.
    """
    if parallel_tool_calls is not None and not isinstance(parallel_tool_calls, bool):
        got = shown(parallel_tool_calls)
        raise RequestError(f"parallel_tool_calls must be True or False; got {got}")
    most_calls = _most_calls(max_tool_calls)
    if tools is None:
        if tool_choice not in (None, "none"):
            raise RequestError(f"tool_choice needs tools; got {shown(tool_choice)} without them")
        return None
    known = _tools(tools)
    allowed, mode = known, tool_choice
    most_calls = 1 if parallel_tool_calls is False else most_calls
    if isinstance(tool_choice, Mapping) and tool_choice.get("type") in _KINDS:
        allowed, mode = (_named(tool_choice, known, "tool_choice"),), "required"
        most_calls = 1
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
        most_calls=most_calls,
        is_subset=len(allowed) < len(known),
    )


def _most_calls(given: object) -> int | None:
    is_count = isinstance(given, int) and not isinstance(given, bool)
    if given is not None and not (is_count and cast(int, given) >= 1):
        raise RequestError(f"max_tool_calls must be an integer of at least 1; got {shown(given)}")
    return cast("int | None", given)


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
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or kind not in _KINDS:
        raise RequestError(
            f"{where} must be {{'type': 'function', 'function': …}}, or the same with 'custom'; "
            f"got {shown(tool)}"
        )
    function = tool.get(kind)
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.{kind} must be an object; got {shown(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(
            f"{where}.{kind}.name must be 1 to 128 letters, digits, '_', '-', '.' or ':'; got "
            f"{shown(name)}"
        )
    if kind == "custom":
        return _custom(name, function.get("format"), f"{where}.custom.format")
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


def _custom(name: str, given: object, where: str) -> Tool:
    """Return a custom tool as a function of one text."""
    grammar, text = None, {"type": "string"}
    if isinstance(given, Mapping) and given.get("type") == "grammar":
        found = given.get("grammar")
        found = found if isinstance(found, Mapping) else {}
        syntax, definition = found.get("syntax"), found.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str) or not definition:
            raise RequestError(
                f"{where}.grammar must have a syntax, 'lark' or 'regex', and a definition; got "
                f"{shown(given.get('grammar'))}"
            )
        grammar = TextGrammar(syntax=syntax, definition=definition)
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
    elif given is not None and not (isinstance(given, Mapping) and given.get("type") == "text"):
        raise RequestError(f"{where} must have the type 'text' or 'grammar'; got {shown(given)}")
    return Tool(
        name=name,
        parameters={
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        },
        is_strict=grammar is not None,
        is_custom=True,
        grammar=grammar,
    )


def as_functions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return tools as a chat template takes them: a custom tool is a function of one text.

    The description of the text has the grammar.
    """
    return [tool if tool.get("type") != "custom" else _function(tool["custom"]) for tool in tools]


def _function(custom: Mapping[str, Any]) -> dict[str, Any]:
    about = "The text of the input."
    if "grammar" in (given := custom.get("format") or {}):
        kind = {"lark": "the Lark grammar", "regex": "the regular expression"}
        grammar = given["grammar"]
        about = f"A text of {kind[grammar['syntax']]}:\n{grammar['definition']}"
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string", "description": about}},
        "required": [INPUT],
    }
    described = {key: custom[key] for key in ("name", "description") if custom.get(key)}
    return {"type": "function", "function": {**described, "parameters": parameters}}


def _named(given: object, known: Sequence[Tool], where: str) -> Tool:
    """Return the tool that an object names."""
    kinds = (given.get(kind) for kind in _KINDS) if isinstance(given, Mapping) else ()
    function = next((each for each in kinds if each is not None), None)
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(f"{where} must name a function; got {shown(given)}")
    for tool in known:
        if tool.name == name:
            return tool
    names = ", ".join(tool.name for tool in known)
    raise RequestError(f"{where} names {shown(name)}; the tools are {names}")


_KINDS = ("function", "custom")


def parameters_of(name: object) -> str:
    """Return the place of a function's parameters in messages."""
    return f"the parameters of the function {shown(name)}"


def input_grammar_of(name: object) -> str:
    """Return the place of the grammar of a custom tool in messages."""
    return f"the grammar of the custom tool {shown(name)}"


def custom_call(id: str | None, name: str, text: str) -> dict[str, Any]:
    """Return a call of a custom tool as an entry of ``tool_calls`` in an assistant's message."""
    return {"id": id, "type": "custom", "custom": {"name": name, INPUT: text}}


def call_message(id: str | None, name: str, arguments: object) -> dict[str, Any]:
    """Return a call as an entry of ``tool_calls`` in an assistant's message."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(kw_only=True, slots=True)
class ToolCall:
    """A call of a tool that a model wrote."""

    index: int
    """Place among the calls of its choice, from 0."""
    id: str
    """Name of this call. The result is sent back under it."""
    name: str
    """Name of the tool."""
    arguments: str = ""
    """The arguments as JSON, or only the new part of it if ``output_kind`` is DELTA."""
    is_custom: bool = False
    """Whether a custom tool is called. The arguments are then an object with `input`."""

    @property
    def input(self) -> str:
        """The text for a custom tool. Of a call that was cut, it is the beginning of the text.

        If ``output_kind`` is DELTA, join the arguments of all outputs first.
        """
        return input_of(self.arguments)

    def as_message(self) -> dict[str, Any]:
        """Return the call as an entry of ``tool_calls`` in an assistant's message."""
        if self.is_custom:
            return custom_call(self.id, self.name, self.input)
        return call_message(self.id, self.name, self.arguments)


_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*)(")?')
_HALF = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}$")


def input_of(arguments: str) -> str:
    """Return the text in the arguments of a custom tool, also of arguments that were cut.

    If a model writes something else, the text is the arguments.
    """
    found = _INPUT.match(arguments)
    if found is None:
        return "" if f'{{"{INPUT}":"'.startswith("".join(arguments.split())) else arguments
    text = found[1] if found[2] else _HALF.sub("", found[1])  # the other half is missing
    value = json.loads(f'"{text}"', strict=False)
    return str(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
