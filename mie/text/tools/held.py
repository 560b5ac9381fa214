"""Read the calls behind a tag in a text that grows. How it grows changes nothing."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any, TypeVar

from mie.text.tools.definitions import NAME
from mie.text.tools.formats import AnswerFormat, CallFormat, Parameters, split_tags
from mie.text.tools.values import JsonEnd, json_value, literal_value, typed

LONGEST_HEAD = 256
"""Characters of a name, a key or a header after which it is none."""

_SPACE = re.compile(r"\s*")
_NAME = re.compile(NAME.pattern.partition("{")[0] + "*")
_KEY = re.compile(r"[\w.$-]+")

_T = TypeVar("_T")
Wait = Generator[None, None, _T]
"""Steps that yield where they need more text, and return a value."""


class NoCallError(Exception):
    """The text is no call, or a call that the request does not allow."""


class HeldCalls:
    """Reads one call, or the calls between the tags of a format, from the start of a text.

    A call names one of the tools and has an object of arguments. The closing tag of a call with
    JSON may be missing at the end of the answer.
    """

    def __init__(self, form: AnswerFormat, most: int | None) -> None:
        """``most`` is how many calls there may be, or None for any number."""
        assert form.calls is not None
        self.found: list[tuple[str, Mapping[str, Any]]] = []
        """The names and arguments of the calls that are whole."""
        self.end = 0
        """The length of the text that is these calls."""
        self.place = 0
        """How far the text was read."""
        self._answer, self._form, self._most = form, form.calls, most
        self._num_taken = 0
        self._text, self._is_last = "", False
        self._steps = self._read()

    def read(self, text: str, is_last: bool) -> bool:
        """Read a text that has grown, and return whether nothing in it is held back any more."""
        self._text, self._is_last = text, is_last
        try:
            next(self._steps)
        except (StopIteration, NoCallError):
            return True
        return False

    def take(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Return the calls that were not returned before."""
        start, self._num_taken = self._num_taken, len(self.found)
        return self.found[start:]

    def _read(self) -> Wait[None]:
        form = self._form
        before, after = split_tags(form.begin + form.separator), split_tags(form.end)
        # Calls follow each other inside of tags, behind a separator, and where they need no tags.
        may_follow = bool(form.begin or form.separator.strip()) or form.is_open_optional
        while True:
            while (yield from self._skip(*before)):
                pass
            found = yield from (self._objects() if form.holds_name else self._calls())
            if self._most is not None and len(self.found) + len(found) > self._most:
                raise NoCallError
            self.found += found
            self.end = self.place
            while (yield from self._skip(*after)):
                self.end = self.place
                if self._text.endswith(after[-1], 0, self.end):
                    return
            if not may_follow:
                return

    def _objects(self) -> Wait[list[tuple[str, Mapping[str, Any]]]]:
        """Read calls that are JSON: an object, or a list of objects."""
        yield from self._expect(self._form.open)
        start = yield from self._start_of("{[")
        value = json_value((yield from self._span(JsonEnd(start))))
        yield from self._close()
        found = [
            _call(self._form, each) for each in (value if isinstance(value, list) else [value])
        ]
        if not found or not all(name in self._answer.names for name, _ in found):
            raise NoCallError
        return found

    def _calls(self) -> Wait[list[tuple[str, Mapping[str, Any]]]]:
        """Read a call with its name before its arguments, or a list of such calls."""
        if not self._form.is_list:
            return [(yield from self._call())]
        yield from self._expect("[")
        found = [(yield from self._call())]
        while (yield from self._skip(",")):
            found.append((yield from self._call()))
        yield from self._expect("]")
        return found

    def _call(self) -> Wait[tuple[str, Mapping[str, Any]]]:
        yield from self._expect(self._form.open)
        name = yield from self._name()
        if self._form.id_tag and (yield from self._skip(self._form.id_tag)):
            yield from self._match(_NAME)
        yield from self._expect(self._form.name_close)
        if self._form.parameters is not None:
            return name, (yield from self._arguments(self._form.parameters, name))
        start = yield from self._start_of("{")
        arguments = json_value((yield from self._span(JsonEnd(start))))
        if not isinstance(arguments, dict):
            raise NoCallError
        yield from self._close()
        return name, arguments

    def _name(self) -> Wait[str]:
        yield from self._space()
        name = yield from self._match(_NAME)
        if self._form.has_index and name not in self._answer.names:
            name = re.sub(r"^functions\.|:\d+$", "", name)
        if name not in self._answer.names:
            raise NoCallError
        return name

    def _arguments(self, form: Parameters, name: str) -> Wait[Mapping[str, Any]]:
        """Read arguments up to the end of the call."""
        arguments: dict[str, Any] = {}
        schema = self._answer.schemas.get(name, {})
        while not (yield from self._skip(self._form.close, is_whole=True)):
            if arguments and form.separator:
                yield from self._skip(form.separator)
            yield from self._expect(form.open)
            key = yield from self._until(form.middle.split()[0], LONGEST_HEAD)
            key = key.strip() if form.quotes else key
            if not key or key in arguments or (form.quotes and not _KEY.fullmatch(key)):
                raise NoCallError
            if form.quotes:
                arguments[key] = yield from self._literal(form, schema, key)
                continue
            is_text = form.text_middle and (yield from self._skip(form.text_middle, is_whole=True))
            if not is_text:
                yield from self._expect(form.middle)
            text = yield from self._until(form.close.strip())
            self.place += len(form.close.strip())
            # A line break belongs to the format where the format writes it.
            text = text.removeprefix("\n") if form.middle.endswith("\n") else text
            text = text.removesuffix("\n") if form.close.startswith("\n") else text
            arguments[key] = text if is_text else typed(text, schema, key)
        return arguments

    def _literal(self, form: Parameters, schema: Mapping[str, Any], key: str) -> Wait[Any]:
        yield from self._expect(form.middle)
        yield from self._space()
        text = yield from self._span(JsonEnd(self.place, quotes=form.quotes, is_value=True))
        value = literal_value(text, form.quotes)
        if value is None:
            raise NoCallError
        return typed(value[0], schema, key) if isinstance(value[0], str) else value[0]

    def _close(self) -> Wait[None]:
        """Read the closing tag. The end of the answer may cut it."""
        if not (yield from self._skip(self._form.close, is_whole=True)):
            rest = "".join(self._text[self.place :].split())
            if not (self._is_last and "".join(self._form.close.split()).startswith(rest)):
                raise NoCallError
            self.place = len(self._text)

    # Steps. Each waits until more text can change nothing.

    def _wait(self) -> Wait[None]:
        if self._is_last:
            raise NoCallError
        yield

    def _space(self) -> Wait[None]:
        """Skip space, and wait for something behind it."""
        while (end := _end(_SPACE, self._text, self.place)) == len(self._text):
            yield from self._wait()
        self.place = end

    def _skip(self, *tags: str, is_whole: bool = False) -> Wait[bool]:
        """Skip one of the tags, and return whether one was there.

        Space may stand before a tag, and where a tag has space if it ``is_whole``.
        """
        for tag in tags:
            place = self.place
            for part in tag.split() if is_whole else [tag.strip()]:
                while True:
                    begin = _end(_SPACE, self._text, place)
                    rest = self._text[begin : begin + len(part)]
                    if rest == part or not part.startswith(rest) or self._is_last:
                        break
                    yield
                if rest != part:
                    break
                place = begin + len(part)
            else:
                self.place = place
                return True
        return False

    def _expect(self, tag: str) -> Wait[None]:
        if not (yield from self._skip(tag, is_whole=True)):
            raise NoCallError

    def _match(self, pattern: re.Pattern[str]) -> Wait[str]:
        """Return the longest match that something else ends."""
        while (end := _end(pattern, self._text, self.place)) == len(self._text):
            if end - self.place > LONGEST_HEAD or self._is_last:
                raise NoCallError
            yield
        text, self.place = self._text[self.place : end], end
        return text

    def _start_of(self, brackets: str) -> Wait[int]:
        yield from self._space()
        if self._text[self.place] not in brackets:
            raise NoCallError
        return self.place

    def _span(self, end: JsonEnd) -> Wait[str]:
        start = self.place
        while not end.read(self._text):
            self.place = end.place
            yield from self._wait()
        self.place = end.place
        return self._text[start : self.place]

    def _until(self, tag: str, most: int | None = None) -> Wait[str]:
        """Return the text before a tag, and do not skip the tag."""
        start = searched = self.place
        while (end := self._text.find(tag, searched)) < 0:
            searched = max(start, len(self._text) - len(tag) + 1)
            if most is not None and searched - start > most:
                raise NoCallError
            yield from self._wait()
        if most is not None and end - start > most:
            raise NoCallError
        self.place = end
        return self._text[start:end]


def _call(form: CallFormat, value: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the call that a JSON value is."""
    if not isinstance(value, dict):
        raise NoCallError
    if form.name:
        name = value.get(form.name)
        keys = (form.arguments, "arguments", "parameters")
        arguments = next((value[key] for key in keys if key in value), None)
    elif len(value) == 1:
        [(name, arguments)] = value.items()
    else:
        raise NoCallError
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise NoCallError
    return name, arguments


def _end(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    assert found is not None
    return found.end()
