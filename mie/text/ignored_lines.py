"""Leave lines out of system messages, such as a line that changes with each request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from mie.errors import ChatTemplateError, RequestError, shown
from mie.text.messages import Message

ROLES = ("system", "developer")
"""The roles of the messages that lose lines."""

_Swap: TypeAlias = Callable[[str], str | None]


def without_lines(
    messages: Sequence[Message], pattern: str, ask: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Sequence[Message]:
    """Return messages without the lines of system messages in which a regex is found.

    A part or a message without any line left leaves too. ``ask`` is `TemplateRenderer.ask`: the
    regex runs in the worker process, because its time may be exponential in the length of a line.

    Raises:
        RequestError: the regex exceeded the limits of the worker.
    """
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    if isinstance(messages, Sequence):  # others are refused later
        for each in messages:
            _swapped(each, note)
    if not texts:
        return messages
    try:
        kept = iter(ask({"pattern": pattern, "texts": texts})["texts"])
    except ChatTemplateError as error:
        raise RequestError(
            f"ignore_prompt_lines {shown(pattern)} took too much time or memory on a system message"
            " (write it without nested repeats such as '(a+)+')"
        ) from error
    return [new for each in messages if (new := _swapped(each, lambda _: next(kept))) is not None]


def _swapped(message: Any, swap: _Swap) -> Any:
    """Return a message with each text of a system message swapped, or None if all are None."""
    if not isinstance(message, Mapping) or message.get("role") not in ROLES:
        return message
    content = message.get("content")
    if isinstance(content, str):
        new: Any = swap(content)
    elif isinstance(content, list | tuple) and content:
        new = [part for each in content if (part := _swapped_part(each, swap)) is not None] or None
    else:
        return message
    return None if new is None else {**message, "content": new}


def _swapped_part(part: Any, swap: _Swap) -> Any:
    if isinstance(part, str):
        return swap(part)
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return part
    text = swap(part["text"])
    return None if text is None else {**part, "text": text}
