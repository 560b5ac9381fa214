"""Check chat messages and convert them to the form that templates expect."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, TypeAlias

from mie.errors import RequestError, shown

Message: TypeAlias = Mapping[str, Any]
"""``{"role": "user", "content": "Hello"}``."""

MOST_MESSAGES = 2**16
"""Maximum number of messages. Each is at least a few tokens."""

_OF_PEOPLE = ("system", "developer", "user", "assistant")  # other roles are tools, with any content
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of an assistant's reasoning, in the order in which they are looked up."""
_SEARCHED_CALLS = 16
_MARKS = ("{'type': 'text', 'text': ", '{"type": "text", "text": ')  # beginnings of written parts
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}


def conversation(messages: Sequence[Message], content_format: str = "string") -> list[Any]:
    """Return ``messages`` in the form that a template expects.

    With ``content_format`` "string" a content is text, and text parts are joined by newlines. With
    "openai" it is a list of ``{"type": "text", "text": …}``. With "given" it is either, as in
    ``messages``. A content of None becomes an empty
    text, except in an assistant's message with tool calls. A tool may return any JSON value.
    Arguments of tool calls that are JSON text become objects. Arguments of a call that was cut stay
    text. The reasoning of an assistant's message has all names under which templates look for it.

    Raises:
        RequestError: there are no messages, one lacks its role, or its content is not text.
    """
    checked = checked_messages(messages)
    return [
        _converted(message, f"messages[{i}]", content_format) for i, message in enumerate(checked)
    ]


def is_batch(messages: object) -> bool:
    """Return whether ``messages`` is a list of conversations. It may be empty."""
    return _is_list(messages) and (not messages or _is_list(messages[0]))  # type: ignore[index]


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return ``messages`` as plain dicts, each with a role.

    Raises:
        RequestError: ``messages`` is empty or not a list, or one lacks its role.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            'messages must be a list of {"role": …, "content": …} objects,'
            f" got {type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    if len(messages) > MOST_MESSAGES:
        raise RequestError(f"messages has {len(messages)} entries; the limit is {MOST_MESSAGES}")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{index}] must be an object, got {type(message).__name__}")
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise RequestError(
                f"messages[{index}] must have a role such as 'user', got {shown(role)}"
            )
    return [dict(message) for message in messages]


def _converted(message: dict[str, Any], where: str, content_format: str) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if calls is not None and not _is_list(calls):
        raise RequestError(f"{where}.tool_calls must be a list, got {type(calls).__name__}")
    if calls is not None:
        message["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
        if not calls:  # some templates only check whether the key exists
            del message["tool_calls"]
    if message["role"] == "assistant":
        reasoning = [message[key] for key in REASONING if message.get(key) is not None]
        message |= {key: reasoning[0] for key in REASONING if reasoning and not message.get(key)}
    if message.get("content") is None and message.get("tool_calls"):
        return {"content": None, **message}
    if "content" not in message:
        raise RequestError(f"{where} has no content; it must be text or a list of text parts")
    content = message["content"]
    if message["role"] not in _OF_PEOPLE and not _is_text(content):
        return message
    return {**message, "content": _content(content, where, content_format)}


def _is_text(content: Any) -> bool:
    """Return whether ``content`` is text, None, or a list of text parts."""
    if content is None or isinstance(content, str):
        return True
    return _is_list(content) and all(
        isinstance(part, str) or (isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS)
        for part in content
    )


def _content(content: Any, where: str, content_format: str) -> str | list[dict[str, str]]:
    if content is None:
        content = []
    if not isinstance(content, str) and not _is_list(content):
        raise RequestError(
            f"{where}: content must be text or a list of text parts, got {type(content).__name__}"
        )
    texts = [content] if isinstance(content, str) else [_part(part, where) for part in content]
    is_text = isinstance(content, str) or not texts
    if content_format == "openai" or (content_format == "given" and not is_text):
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part(part: Any, where: str) -> str:
    text = part
    if isinstance(part, Mapping) and isinstance(part.get("type"), str):
        text = part.get(_TEXT_PARTS.get(part["type"], ""))
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f"{where}: only parts of type 'text' are supported, got {shown(kind)}")


def _call(call: Any, where: str) -> Any:
    """Return a tool call with its arguments as an object, as templates expect."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if function is None and isinstance(call, Mapping) and isinstance(call.get("custom"), Mapping):
        custom = call["custom"]  # templates take a call of a custom tool as one of a function
        function = {"name": custom.get("name"), "arguments": {"input": custom.get("input", "")}}
        call = {**{key: call[key] for key in call if key != "custom"}, "type": "function"}
    if not isinstance(function, Mapping):
        raise RequestError(f'{where} must be {{"function": {{"name": …, "arguments": …}}}}')
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a call that max_tokens or a stop string cut
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def has_calls(messages: Sequence[Message]) -> bool:
    """Return whether there are calls of tools, or results of them."""
    return any(
        isinstance(each, Mapping) and (each.get("tool_calls") or each.get("role") == "tool")
        for each in (messages if _is_list(messages) else ())
    )


def forms(messages: Sequence[Any], *, joins_parts: bool) -> Iterator[Sequence[Any]]:
    """Yield messages of `conversation` in the forms that templates take, the usual one first.

    Arguments of calls are objects or JSON text. A content of None may be empty, and with
    ``joins_parts`` a content in parts may be text.
    """
    tried: list[Sequence[Any]] = []
    for is_plain in (False, True):
        given = _plain(messages, joins_parts) if is_plain else messages
        for convert in (list, _with_arguments_as_text):
            form = convert(given)
            if form not in tried:
                tried.append(form)
                yield form


def _plain(messages: Sequence[Any], joins_parts: bool) -> list[dict[str, Any]]:
    plain = without_null(messages)
    if joins_parts:
        plain = [{**each, "content": _joined(each.get("content"))} for each in plain]
    return plain


def has_python_notation(text: str, messages: Sequence[Any]) -> bool:
    """Return whether a prompt has arguments of a call, or a part of a content, as Python's dict.

    A part in JSON counts too. The first calls stand for all, so that the time is linear.
    """
    calls = (call for each in messages for call in each.get("tool_calls") or ())
    arguments = (call["function"]["arguments"] for call in calls)
    objects = (each for each in arguments if isinstance(each, dict) and each)
    if any(str(each) in text for each in islice(objects, _SEARCHED_CALLS)):
        return True
    contents = [each.get("content") for each in messages]
    parts = [part["text"] for content in contents if _is_parts(content) for part in content]
    own = [*parts, *(content for content in contents if isinstance(content, str))]
    return bool(parts) and any(
        mark in text and not any(mark in each for each in own) for mark in _MARKS
    )


def _joined(content: Any) -> Any:
    return "\n".join(part["text"] for part in content) if _is_parts(content) else content


def _is_parts(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and _is_text(content)


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_arguments_as_text(messages: Sequence[Any]) -> list[dict[str, Any]]:
    def as_text(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):  # a call that was cut has text
            arguments = _as_json(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    return [
        {**each, "tool_calls": list(map(as_text, each["tool_calls"]))}
        if each.get("tool_calls")
        else each
        for each in messages
    ]


def without_null(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with empty texts in place of contents of None."""
    return [
        {**message, "content": ""} if message.get("content", "") is None else message
        for message in messages
    ]


def for_channels(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as harmony's template takes them.

    It refuses null, and calls with both reasoning and text. The reasoning is kept, because the
    model goes on from there after a call.
    """
    given = [
        {key: value for key, value in message.items() if value is not None} for message in messages
    ]
    for message in given:
        if message.get("tool_calls") and message.get("thinking"):
            message.pop("content", None)
    return given


def without_developers(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for a template without OpenAI's role "developer"."""
    return [
        {**message, "role": "system"} if message["role"] == "developer" else message
        for message in messages
    ]


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
