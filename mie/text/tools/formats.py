"""Define the formats in which models write calls of tools and their reasoning.

The words come from transformers' response templates: a field stands between the tags ``open`` and
``close``, and its content is JSON or text. A model's ``tokenizer_config.json`` may bring a
``response_template`` of its own. Reasoning must stand between two literal tags, and calls must be
JSON between literal tags. Anything else in it is refused by name, because another reading would
give wrong calls.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mie.config.params.structured import StructuredOutputsParams
from mie.errors import RequestError, shown
from mie.text.tools.families import NO_FORMATS, FamilyFormats


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The tags before and after a part of an answer."""

    open: str
    close: str


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a model writes calls of tools."""

    open: str
    """The tag before a call, or before a list of calls."""
    close: str = ""
    """The tag after it; nothing if the JSON ends a call."""
    name: str = "name"
    """The key of the tool's name."""
    arguments: str = "arguments"
    """The key of the arguments."""
    is_list: bool = False
    """Whether one pair of tags has a list of all calls."""
    name_close: str = ""
    """The tag between a name and arguments that stand outside of an object."""
    is_open_optional: bool = False
    """Whether a call may begin an answer without the tag, as it does where it is forced."""
    padding: str = ""
    """Text between tags and JSON."""
    separator: str = ""
    """Text between two calls."""
    id_length: int = 0
    """Characters that the id of a call must have; 0 sets no length."""

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that may be special tokens."""
        own = (self.open, self.close, self.name_close)
        return HARMONY_TAGS if self == HARMONY else tuple(tag for tag in own if tag)


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """The reasoning, the calls and the grammar that an answer may have."""

    reasoning: Tags | None = None
    begins_with: str = ""
    """Tags at the end of the prompt: the answer continues the part that they open."""
    may_lack_open: bool = False
    """Whether text before a closing tag is reasoning, where the model left out the opening tag."""
    calls: CallFormat | None = None
    names: frozenset[str] = frozenset()
    """The names of the tools that may be called."""
    may_repeat: bool = True
    """Whether there may be several calls."""
    structured_outputs: StructuredOutputsParams | None = None
    """The grammar of an answer that must be calls, and nothing else."""
    before_structure: str = ""
    """The tags that the prompt must end with if a grammar of the request writes the answer."""

    @property
    def has_channels(self) -> bool:
        """Whether the answer is harmony's messages."""
        return self.calls == HARMONY or self.reasoning == ANALYSIS

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that the text must keep, even where they are special tokens."""
        if self.has_channels:
            return HARMONY_TAGS
        reasoning = () if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        return (*(() if self.calls is None else self.calls.tags), *reasoning)


HERMES = CallFormat(open="<tool_call>", close="</tool_call>", padding="\n", separator="\n")
LLAMA3 = CallFormat(
    open="<|python_tag|>", is_open_optional=True, arguments="parameters", separator="; "
)
MISTRAL = CallFormat(open="[TOOL_CALLS]", is_list=True, separator=", ", id_length=9)
MISTRAL_NAMED = CallFormat(open="[TOOL_CALLS]", name_close="[ARGS]", id_length=9)
GRANITE = CallFormat(open="<|tool_call|>", is_list=True, separator=", ")
PHI4_MINI = CallFormat(open="functools", is_list=True, separator=", ")
HUNYUAN = CallFormat(open="<tool_calls>", close="</tool_calls>", is_list=True, separator=", ")

MESSAGE, END = "<|message|>", "<|end|>"
ENDS = (END, "<|call|>", "<|return|>")
HARMONY_TAGS = ("<|start|>", "<|channel|>", "<|constrain|>", MESSAGE, *ENDS)
REPLY = "<|start|>assistant"
FINAL = f"<|channel|>final{MESSAGE}"
ANALYSIS = Tags(open=f"<|channel|>analysis{MESSAGE}", close=END)
HARMONY = CallFormat(
    open="<|channel|>commentary to=functions.",
    name_close=f" <|constrain|>json{MESSAGE}",
    separator=END + REPLY,
)
"""The calls that a grammar writes; `mie.text.tools.channels` reads all of harmony."""

CALLS: Mapping[str, CallFormat] = {
    "hermes": HERMES,  # Hermes, Qwen2.5, Qwen3, SmolLM3
    "llama3_json": LLAMA3,  # Llama 3.1, 3.2, 3.3
    "mistral": MISTRAL,  # Mistral; the newer spelling is found in the chat template
    "granite": GRANITE,  # Granite 3
    "phi4_mini_json": PHI4_MINI,  # Phi-4-mini
    "hunyuan_a13b": HUNYUAN,  # Hunyuan
    "openai": HARMONY,  # gpt-oss
}
"""The formats of calls by vLLM's names of their parsers."""

THINK = Tags(open="<think>", close="</think>")
REASONING: Mapping[str, Tags] = {
    "deepseek_r1": THINK,
    "qwen3": THINK,
    "olmo3": THINK,
    "mistral": Tags(open="[THINK]", close="[/THINK]"),
    "granite": Tags(open="Here is my thought process:", close="Here is my response:"),
    "seed_oss": Tags(open="<seed:think>", close="</seed:think>"),
    "openai_gptoss": ANALYSIS,
}
"""The tags of reasoning by vLLM's names of their parsers."""

_USES_TOOLS = re.compile(r"\btools\b")
_TOP = {"version", "defaults", "start_anchor", "start_anchor_pattern", "fields"}
_REASONING = ("thinking", "reasoning_content", "reasoning")
_TEXT_KEYS = {"open", "close", "content", "content_args", "optional"}
_CALL_KEYS = {*_TEXT_KEYS, "repeats", "transform", "transform_each"}
_PLACE = re.compile(r"\{(?:content\.)?(\w+)\}")


def call_format(
    parser: str,
    chat_template: str,
    response_template: Mapping[str, object] | None,
    family: FamilyFormats = NO_FORMATS,
) -> CallFormat:
    """Return how a model writes calls; ``parser`` is a name of `CALLS`, "hf" or "auto".

    "hf" is the model's response template. "auto" is the template too, or else the format with a tag
    in the chat template, or else the family's format. Where the template does not write tools, a
    message states the format, so it is Hermes' unless the family has one.

    Raises:
        RequestError: the format is unknown, or the response template has something that is not
            supported.
    """
    if parser == "hf" or (parser == "auto" and response_template is not None):
        calls = calls_in(response_template)
        if calls is not None:
            return calls
        if parser == "hf":
            raise RequestError("tools: the model's response_template has no field tool_calls")
    if parser == "auto" and not writes_tools(chat_template):
        parser = family.calls or "hermes"
    elif parser == "auto":
        parser = _named_in(chat_template, family)
    if parser == "none":
        raise RequestError("tool_choice cannot force a call, because tool_call_parser is none")
    if parser == "mistral" and "[ARGS]" in chat_template:
        return MISTRAL_NAMED
    return CALLS[parser]


def reasoning_tags(
    parser: str,
    chat_template: str,
    response_template: Mapping[str, object] | None,
    family: FamilyFormats = NO_FORMATS,
) -> Tags | None:
    """Return the tags of a model's reasoning, or None if it is part of the text.

    ``parser`` is a name of `REASONING`, "hf", "auto" or "none". "hf" reads the response template.
    "auto" does so if its tags are literal, and otherwise finds tags in the chat template, or takes
    the family's tags.

    Raises:
        RequestError: the response template has no such tags, and the parser is "hf".
    """
    if parser == "hf":
        return reasoning_in(response_template)
    if parser != "auto":
        return None if parser == "none" else REASONING[parser]
    if response_template is not None:
        with suppress(RequestError):
            return reasoning_in(response_template)
    if writes_channels(chat_template):
        return ANALYSIS
    found = [
        tags for tags in REASONING.values() if tags.close in chat_template and tags != ANALYSIS
    ]
    if found:
        return found[0]
    return None if family.reasoning is None else REASONING[family.reasoning]


def writes_tools(chat_template: str) -> bool:
    """Return whether a chat template writes tools, in one way or another."""
    return _USES_TOOLS.search(chat_template) is not None or writes_channels(chat_template)


def writes_channels(chat_template: str) -> bool:
    """Return whether a chat template writes harmony's messages."""
    return "<|channel|>" in chat_template


def _named_in(chat_template: str, family: FamilyFormats) -> str:
    """Return the name of the format that a chat template shows to the model, or its family's."""
    if "<function=" in chat_template:
        raise _unknown("are XML, which is not read")
    if writes_channels(chat_template):
        return "openai"
    for name, calls in CALLS.items():
        if calls.open in chat_template:
            return name
    if "<|start_header_id|>" in chat_template and '"parameters": ' in chat_template:
        return "llama3_json"
    if family.calls is None:
        unread = f"are {family.unread}, which is not read" if family.unread else ""
        raise _unknown(unread or "have a format that is not known")
    return family.calls


def _unknown(problem: str) -> RequestError:
    return RequestError(
        f"tools: this model's calls {problem} (set tool_call_parser to {', '.join(CALLS)}, or to "
        "none, which reads no calls)"
    )


# Response templates


def reasoning_in(template: object) -> Tags | None:
    """Return the tags of the reasoning in a response template, or None if it has none.

    Raises:
        RequestError: there is no template, or its reasoning is not between two literal tags.
    """
    fields = _fields(template)
    for name in _REASONING:
        if name in fields:
            return _reasoning(fields[name], f"fields.{name}")
    return None


def calls_in(template: object) -> CallFormat | None:
    """Return the format of calls in a response template, or None if it has none.

    Raises:
        RequestError: there is no template, or its calls are not JSON between literal tags.
    """
    fields = _fields(template)
    return _calls(fields["tool_calls"]) if "tool_calls" in fields else None


def _fields(template: object) -> Mapping[str, Any]:
    if template is None:
        raise _unsupported("there is none in tokenizer_config.json")
    given = _mapping(template, "response_template")
    _only(given, _TOP, "")
    if given.get("version", 1) != 1:
        raise _unsupported(f"version {shown(given['version'])}")
    return _mapping(given.get("fields", {}), "fields")


def _reasoning(given: object, where: str) -> Tags:
    field = _mapping(given, where)
    _only(field, _TEXT_KEYS, f"{where}.")
    _check_kind(field, "text", where)
    return Tags(open=_tag(field, "open", where), close=_tag(field, "close", where))


def _calls(given: object) -> CallFormat:
    where = "fields.tool_calls"
    field = _mapping(given, where)
    _only(field, _CALL_KEYS, f"{where}.")
    _check_kind(field, "json", where)
    name, arguments = _keys(field.get("transform", "{content}"), f"{where}.transform")
    return CallFormat(
        open=_tag(field, "open", where),
        close=_tag(field, "close", where) if "close" in field else "",
        name=name,
        arguments=arguments,
        is_list=field.get("transform_each") is True,
        separator=", " if field.get("transform_each") is True else "\n",
    )


def _keys(transform: object, where: str) -> tuple[str, str]:
    """Return the keys of the name and the arguments in the JSON of a call."""
    if isinstance(transform, Mapping):
        transform = transform.get("function", transform)
    if transform == "{content}":
        return "name", "arguments"
    if isinstance(transform, Mapping) and transform.keys() == {"name", "arguments"}:
        found = [_PLACE.fullmatch(str(transform[key])) for key in ("name", "arguments")]
        if found[0] and found[1]:
            return found[0].group(1), found[1].group(1)
    raise _unsupported(f"{where}: {shown(transform)}")


def _check_kind(field: Mapping[str, Any], kind: str, where: str) -> None:
    if field.get("content", "text") != kind:
        raise _unsupported(f"{where}.content: {shown(field.get('content', 'text'))}")
    arguments = field.get("content_args", {})
    if arguments not in ({}, {"strip": True}):
        raise _unsupported(f"{where}.content_args: {shown(arguments)}")


def _tag(field: Mapping[str, Any], key: str, where: str) -> str:
    """Return a literal tag."""
    tag = field.get(key)
    if isinstance(tag, Sequence) and not isinstance(tag, str) and len(tag) == 1:
        [tag] = tag
    if not isinstance(tag, str) or not tag or tag != tag.encode(errors="replace").decode():
        raise _unsupported(f"{where}.{key}: {shown(tag)} (one literal tag is)")
    return tag


def _mapping(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _unsupported(f"{where}: {shown(value)}")
    return value


def _only(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise _unsupported(f"{where}{name}")


def _unsupported(what: str) -> RequestError:
    return RequestError(
        f"tools: the model's response_template is not supported: {what} (name a tool_call_parser)"
    )
