"""Read answers that a grammar forces to be calls.

The grammar writes the tags and the keys exactly, so that arguments are passed on while they come.
"""

from __future__ import annotations

from collections.abc import Callable

from mie.tools.answer import AnswerFormat
from mie.tools.calls import ToolCall
from mie.tools.forced import literals_of
from mie.tools.json_end import JsonEnd
from mie.tools.parser import AnswerParser, new_call


def new_parser(form: AnswerFormat, key: str) -> AnswerParser | ForcedParser:
    """Return a parser for one answer. The ids of its calls derive from ``key``."""
    return (AnswerParser if form.structured_outputs is None else ForcedParser)(form, key)


class ForcedParser:
    """Reads calls that a grammar wrote. An answer that was cut has a call that was cut."""

    def __init__(self, form: AnswerFormat, key: str) -> None:
        """The ids of calls derive from ``key``."""
        assert form.calls is not None
        self.calls: list[ToolCall] = []
        self.content = ""
        self.reasoning = ""
        self.is_reasoning = False
        self.num_unparsed = 0
        self._form = form
        self._key = key
        self._literals = literals_of(form.calls)
        self._buffer = ""
        self._state: Callable[[], bool] = self._begin
        self._value = JsonEnd()

    def add(self, text: str) -> None:
        """Read the next piece of the answer."""
        self._buffer += text
        while self._state():
            pass

    def finish(self) -> None:
        """Do nothing: nothing is held back but tags."""

    def _begin(self) -> bool:
        before = self._literals.again if self.calls else self._literals.begin
        if not self._buffer.startswith(before):
            return False
        self._buffer, self._state = self._buffer[len(before) :], self._name
        return True

    def _name(self) -> bool:
        name, found, rest = self._buffer.partition(self._literals.middle)
        if not found:
            return False
        self.calls.append(new_call(self._form, self._key, len(self.calls), name))
        self._buffer, self._state = rest, self._arguments
        self._value = JsonEnd()
        return True

    def _arguments(self) -> bool:
        is_whole = self._value.read(self._buffer)
        taken = self._value.place
        self.calls[-1].arguments += self._buffer[:taken]
        self._buffer, self._value.place = self._buffer[taken:], 0
        if is_whole:
            self._state = self._after
        return is_whole

    def _after(self) -> bool:
        if not self._buffer.startswith(self._literals.after):
            return False
        self._buffer, self._state = self._buffer[len(self._literals.after) :], self._begin
        return True
