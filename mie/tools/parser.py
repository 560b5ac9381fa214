"""Read an answer that arrives in pieces. How it was cut into pieces changes nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from mie.tools.answer import AnswerFormat
from mie.tools.border import BorderedText
from mie.tools.calls import ToolCall
from mie.tools.held_call import HeldCall


class AnswerParser:
    """Divides an answer into reasoning, text and calls.

    Text that may be the beginning of a tag is held back, and so is a call until it is whole. What
    follows an opening tag and is no call stays text, and is counted.
    """

    def __init__(self, form: AnswerFormat, key: str) -> None:
        """The ids of calls derive from ``key``."""
        self.calls: list[ToolCall] = []
        self.num_unparsed = 0
        """Opening tags that no call followed."""
        self._form = form
        self._key = key
        self._content = BorderedText()
        self._reasoning = BorderedText()
        self._buffer = ""
        self._held: HeldCall | None = None
        self._is_first = True  # no text has come yet
        self._state: Callable[[bool], bool] = self._begin
        if form.begins_in_reasoning:
            self._enter_reasoning()

    @property
    def content(self) -> str:
        """The text so far, without reasoning and calls."""
        return self._content.text

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return self._reasoning.text

    @property
    def is_reasoning(self) -> bool:
        """Whether the next piece belongs to the reasoning."""
        return self._state == self._think

    def add(self, text: str) -> None:
        """Read the next piece of the answer."""
        self._buffer += text
        while self._state(False):
            pass

    def finish(self) -> None:
        """Read what was held back, because the answer has ended."""
        while self._state(True):
            pass
        self._content.end()

    # Each state reads from the buffer, and returns whether the next state may read on.

    def _begin(self, is_last: bool) -> bool:
        """Look for reasoning, which is at the beginning of an answer or nowhere."""
        tags, found = self._form.reasoning, self._buffer.lstrip()
        if tags is not None and found.startswith(tags.open):
            self._buffer = found[len(tags.open) :]
            self._enter_reasoning()
            return True
        if tags is not None and tags.open.startswith(found) and not is_last:
            return False
        self._state = self._text
        return True

    def _enter_reasoning(self) -> None:
        self._reasoning.border()
        self._state = self._think

    def _think(self, is_last: bool) -> bool:
        assert self._form.reasoning is not None
        close = self._form.reasoning.close
        if close in self._buffer:
            thought, _, self._buffer = self._buffer.partition(close)
            self._reasoning.add(thought)
            self._content.border()
            self._state = self._text
            return True
        self._reasoning.add(self._released(close, is_last))
        return False

    def _text(self, is_last: bool) -> bool:
        calls = self._form.calls
        if calls is None:
            self._content.add(self._taken(len(self._buffer)))
            return False
        if self._is_first and calls.is_open_optional:
            found = self._buffer.lstrip()
            if self.calls:
                found = found.removeprefix(calls.separator.strip()).lstrip()
            if found.startswith("{"):
                return self._enter_call(len(self._buffer) - len(found))
            if not found and not is_last:
                return False
        place = self._buffer.find(calls.open)
        if place >= 0:
            self._content.add(self._taken(place))
            return self._enter_call(len(calls.open))
        text = self._released(calls.open, is_last)
        self._is_first = self._is_first and not text.strip()
        self._content.add(text)
        return False

    def _enter_call(self, start: int) -> bool:
        assert self._form.calls is not None
        self._held = HeldCall(self._form.calls, self._form.names, start)
        self._state = self._call
        return True

    def _call(self, is_last: bool) -> bool:
        assert self._held is not None
        assert self._form.calls is not None
        length = self._held.read(self._buffer, is_last)
        if length is None:
            return False
        text, found = self._taken(length), self._held.found
        if not self._form.may_repeat and len(self.calls) + len(found) > 1:
            found = []
        if found:
            self._content.border()
            for name, arguments in found:
                self.calls.append(new_call(self._form, self._key, len(self.calls), name))
                self.calls[-1].arguments = _json(arguments)
        else:
            self._content.add(text)
            self._is_first = False
            self.num_unparsed += text.startswith(self._form.calls.open)
        self._state = self._text
        return True

    def _released(self, tag: str, is_last: bool) -> str:
        """Take the buffer, but for what may be the beginning of a tag."""
        kept = 0
        if not is_last:
            most = min(len(tag) - 1, len(self._buffer))
            lengths = (n for n in range(most, 0, -1) if self._buffer.endswith(tag[:n]))
            kept = next(lengths, 0)
        return self._taken(len(self._buffer) - kept)

    def _taken(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text


def new_call(form: AnswerFormat, key: str, index: int, name: str) -> ToolCall:
    """Return a call without arguments. Its id is always the same for a key and an index."""
    assert form.calls is not None
    digest = hashlib.sha256(f"{key}\0{index}".encode()).hexdigest()
    length = form.calls.id_length
    return ToolCall(index=index, id=digest[:length] if length else f"call_{digest[:24]}", name=name)


def _json(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON. An escape of half a character stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text.isprintable() or _is_unicode(text) else json.dumps(arguments)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
