"""Text that may be a call, held back until it is one or cannot be one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from mie.tools.definitions import NAME
from mie.tools.json_end import JsonEnd
from mie.tools.response_template import CallFormat

LONGEST_HEAD = 256
"""Characters between a tag and JSON after which it is no call."""


class HeldCall:
    """Reads a tag and what follows it.

    A call is JSON, names one of the tools, and has an object of arguments. Its closing tag may be
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
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            return []
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


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
