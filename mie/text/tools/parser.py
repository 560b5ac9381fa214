"""Read an answer that arrives in pieces. How it was cut into pieces changes nothing."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from mie.text.tools.definitions import NAME, ToolCall
from mie.text.tools.formats import AnswerFormat, CallFormat, Tags

LONGEST_HEAD = 256
"""Characters between a tag and JSON after which it is no call."""

_MARK = re.compile(r'["\\{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


class Divider(ABC):
    """Divides an answer into reasoning, text and calls, from state to state."""

    def __init__(self, form: AnswerFormat, key: str) -> None:
        """The ids of calls derive from ``key``."""
        self.calls: list[ToolCall] = []
        self.num_unparsed = 0
        """Opening tags, or messages to a recipient, that were no calls."""
        self.moved: str | None = None
        """Text that turned out to be reasoning."""
        self._form = form
        self._key = key
        self._content = BorderedText()
        self._reasoning = BorderedText()
        self._buffer = ""
        self._state: Callable[[bool], bool] = self._begin
        self.add(form.begins_with)

    @property
    def content(self) -> str:
        """The text so far, without reasoning and calls."""
        return self._content.text

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return self._reasoning.text

    @property
    @abstractmethod
    def is_reasoning(self) -> bool:
        """Whether the next piece belongs to the reasoning."""

    def add(self, text: str) -> None:
        """Read the next piece of the answer."""
        self._buffer += text
        while self._state(False):
            pass

    def finish(self) -> None:
        """Read the held-back text, because the answer has ended."""
        while self._state(True):
            pass
        self._content.end()

    @abstractmethod
    def _begin(self, is_last: bool) -> bool:
        """Read from the buffer, as each state does. Return whether the next may read on."""


class AnswerParser(Divider):
    """Divides an answer by its tags.

    Text that may be the beginning of a tag is held back, and so is a call until it is whole. An
    opening tag without a call stays text, and is counted.
    """

    _held: HeldCall | None = None
    _is_first = True  # no text has come yet
    _has_reasoned = False

    @property
    def is_reasoning(self) -> bool:
        return self._state in (self._think, self._opened)

    def _begin(self, is_last: bool) -> bool:
        """Look for reasoning at the beginning of an answer. It is nowhere else."""
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
        self._state, self._has_reasoned = self._opened, True

    def _opened(self, is_last: bool) -> bool:
        """Skip an opening tag that a model writes again, as after a prompt that ends with one."""
        assert self._form.reasoning is not None
        tag, found = self._form.reasoning.open, self._buffer.lstrip()
        if found.startswith(tag):
            self._buffer = found[len(tag) :]
            return True
        if tag.startswith(found) and not is_last:
            return False
        self._state = self._think
        return True

    def _think(self, is_last: bool) -> bool:
        assert self._form.reasoning is not None
        close = self._form.reasoning.close
        if close in self._buffer:
            thought, _, self._buffer = self._buffer.partition(close)
            self._reasoning.add(thought)
            self._content.border()
            self._state = self._begin  # some models think again at once
            return True
        self._reasoning.add(self._released(is_last, close))
        return False

    def _text(self, is_last: bool) -> bool:
        calls, tags = self._form.calls, self._lacking_tags()
        place = -1 if tags is None else self._buffer.find(tags.close)
        if tags is not None and place >= 0:
            before = self._buffer[:place]
            is_call = calls is not None and calls.open in before
            if not is_call and tags.open not in self._content.text + before:
                self._content.add(self._taken(place))
                self._taken(len(tags.close))
                self._move_to_reasoning()
                return True
        if calls is None:
            self._content.add(self._released(is_last, *(() if tags is None else (tags.close,))))
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
        text = self._released(is_last, calls.open, *(() if tags is None else (tags.close,)))
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
                self.calls[-1].arguments = json_text(arguments)
        else:
            self._content.add(text)
            self._is_first = False
            self.num_unparsed += text.startswith(self._form.calls.open)
        self._state = self._text
        return True

    def _lacking_tags(self) -> Tags | None:
        """Return the tags of reasoning that may have begun without the opening one."""
        if not self._form.may_lack_open or self._has_reasoned or self.calls:
            return None
        return self._form.reasoning

    def _move_to_reasoning(self) -> None:
        self.moved = self._content.text
        self._content, self._has_reasoned = BorderedText(), True
        self._reasoning.add(self.moved.lstrip())
        self._content.border()
        self._state = self._begin

    def _released(self, is_last: bool, *tags: str) -> str:
        """Take the buffer, except for an end that may begin a tag."""
        kept = 0
        for tag in () if is_last else tags:
            most = min(len(tag) - 1, len(self._buffer))
            lengths = (n for n in range(most, kept, -1) if self._buffer.endswith(tag[:n]))
            kept = next(lengths, kept)
        return self._taken(len(self._buffer) - kept)

    def _taken(self, length: int) -> str:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        return text


def new_call(form: AnswerFormat, key: str, index: int, name: str) -> ToolCall:
    """Return a call without arguments. A key and an index always give the same id."""
    assert form.calls is not None
    digest = hashlib.sha256(f"{key}\0{index}".encode()).hexdigest()
    length = form.calls.id_length
    return ToolCall(index=index, id=digest[:length] if length else f"call_{digest[:24]}", name=name)


class HeldCall:
    """Reads a tag and the call behind it.

    A call is JSON, names one of the tools, and has an object of arguments. The closing tag may be
    missing only at the end of the answer.
    """

    def __init__(self, form: CallFormat, names: frozenset[str], start: int) -> None:
        """The opening tag ends at ``start``."""
        self.found: list[tuple[str, Mapping[str, Any]]] = []
        """The names and arguments of the calls, once they are whole."""
        self._form = form
        self._names = names
        self._start = start
        self._name: str | None = None  # if it stands outside of the JSON
        self._first = 0
        self._value: JsonEnd | None = None
        self._is_whole = False

    def read(self, text: str, is_last: bool) -> int | None:
        """Read a text that has grown, and return how much of it is decided.

        That part is the calls in `found`, or it is text. None waits for more.
        """
        if self._value is None:
            place = self._place_of_value(text)
            if place is None:
                is_over = is_last or len(text) > self._start + LONGEST_HEAD
                return self._start if is_over else None
            if place < 0:
                return self._start
            self._first, self._value = place, JsonEnd(place)
        self._is_whole = self._is_whole or self._value.read(text)
        if not self._is_whole:
            return len(text) if is_last else None
        return self._close(text, self._value.place, is_last)

    def _place_of_value(self, text: str) -> int | None:
        """Return where the JSON begins, None as long as it may come, or -1 if it does not."""
        rest = text[self._start :].lstrip()
        if not rest:
            return None
        if rest[0] in "{[":
            return len(text) - len(rest)
        if not self._form.name_close:
            return -1
        head, bracket, value = rest.partition("{")
        if not bracket:
            return None
        self._name = head.strip().removesuffix(self._form.name_close).strip()
        return len(text) - len(value) - 1 if NAME.fullmatch(self._name) else -1

    def _close(self, text: str, end: int, is_last: bool) -> int | None:
        close, rest = self._form.close, text[end:].lstrip()
        if close.startswith(rest) and rest != close and not is_last:
            return None
        if rest.startswith(close):
            taken = len(text) - len(rest) + len(close) if close else end
        elif close.startswith(rest):
            taken = len(text)
        else:
            return end
        self.found = self._calls(text[self._first : end])
        return taken if self.found else end

    def _calls(self, text: str) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the calls in JSON, or none if it is not all calls."""
        value = json_value(text)
        if self._name is not None:
            calls = [(self._name, value)]
        else:
            calls = [self._call(each) for each in (value if isinstance(value, list) else [value])]
        is_right = all(
            isinstance(name, str) and name in self._names and isinstance(arguments, dict)
            for name, arguments in calls
        )
        return calls if is_right else []

    def _call(self, value: Any) -> tuple[Any, Any]:
        if not isinstance(value, dict):
            return None, None
        keys = (self._form.arguments, "arguments", "parameters")
        given = [value[key] for key in keys if key in value]
        return value.get(self._form.name), given[0] if given else None


class JsonEnd:
    """Counts the brackets of one object or list. Each character is read once.

    It checks nothing else.
    """

    def __init__(self, start: int = 0) -> None:
        """``start`` is the place of the first bracket."""
        self.place = start
        """How far the text was read; after the end, the place behind the last bracket."""
        self._depth = 0
        self._is_string = False

    def read(self, text: str) -> bool:
        """Read on in a text that has grown, and return whether the end was found."""
        while True:
            mark = (_IN_STRING if self._is_string else _MARK).search(text, self.place)
            if mark is None:
                self.place = len(text)
                return False
            if mark.group() == "\\":
                if mark.end() == len(text):  # the escaped character is still to come
                    self.place = mark.start()
                    return False
                self.place = mark.end() + 1
                continue
            self.place = mark.end()
            if mark.group() == '"':
                self._is_string = not self._is_string
            else:
                self._depth += 1 if mark.group() in "{[" else -1
                if self._depth <= 0:
                    return True


class BorderedText:
    """Gathers a text in pieces. Space before a tag and after it belongs to the format."""

    def __init__(self) -> None:
        self.text = ""
        self._space = ""
        self._is_at_border = False

    def add(self, text: str) -> None:
        """Add a piece. Space at its end waits for the next piece."""
        kept = text.rstrip()
        if kept:
            if self._is_at_border:  # text on both sides of a part stays apart
                self.text += ("\n" if self.text else "") + kept.lstrip()
            else:
                self.text += self._space + kept
            self._is_at_border = False
            self._space = text[len(kept) :]
        else:
            self._space += text

    def border(self) -> None:
        """Mark the place of a tag."""
        self._space = ""
        self._is_at_border = True

    def end(self) -> None:
        """Add the space that waits, because no tag follows it."""
        if not self._is_at_border:
            self.text += self._space
        self._space = ""


def json_value(text: str) -> Any:
    """Return the value of a JSON text, or None if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def json_text(arguments: Mapping[str, Any]) -> str:
    """Return arguments as JSON. An escape of half a character stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if text.isprintable() or _is_unicode(text) else json.dumps(arguments)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
