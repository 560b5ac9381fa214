"""Read the formats that a model's own ``response_template`` declares.

The words come from transformers: a field stands between the tags ``open`` and ``close``, and its
content is JSON or text. Reasoning must stand between two literal tags, and calls must be JSON
between literal tags. Anything else is refused by name, because another reading would give wrong
calls.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mie.errors import RequestError, shown
from mie.text.tools.formats import CallFormat, Tags

_TOP = {"version", "defaults", "start_anchor", "start_anchor_pattern", "fields"}
_REASONING = ("thinking", "reasoning_content", "reasoning")
_TEXT_KEYS = {"open", "close", "content", "content_args", "optional"}
_CALL_KEYS = {*_TEXT_KEYS, "repeats", "transform", "transform_each"}
_PLACE = re.compile(r"\{(?:content\.)?(\w+)\}")


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
