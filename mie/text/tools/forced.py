"""Read the answers that a grammar wrote."""

from __future__ import annotations

from collections.abc import Callable

from mie.text.tools.channels import ChannelParser
from mie.text.tools.definitions import ToolCall
from mie.text.tools.formats import AnswerFormat
from mie.text.tools.parser import AnswerParser, BorderedText, Divider, new_call
from mie.text.tools.values import JsonEnd, length_that_begins
from mie.text.tools.written import literals_of


def new_parser(form: AnswerFormat, key: str) -> Divider | ForcedParser:
    """Return a parser for one answer. The ids of its calls derive from ``key``."""
    if form.is_written:
        return ForcedParser(form, key)
    return (ChannelParser if form.has_channels else AnswerParser)(form, key)


class ForcedParser:
    """Reads an answer that a grammar wrote: reasoning, and then calls or a text.

    An answer that was cut has a call that was cut.
    """

    def __init__(self, form: AnswerFormat, key: str) -> None:
        """The ids of calls derive from ``key``."""
        self.calls: list[ToolCall] = []
        self.content = ""
        self.num_unparsed = 0
        self.moved: str | None = None
        self._form = form
        self._key = key
        calls, is_forced = form.calls, form.parts.is_forced
        self._literals = None if calls is None else literals_of(calls, is_forced=is_forced)
        self._buffer = ""
        self._reasoning = BorderedText()
        self._has_reasoned = False
        self._state: Callable[[], bool] = self._open if form.parts.reasoning else self._begin
        self._value = JsonEnd()
        self.add(form.begins_with)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return self._reasoning.text

    @property
    def is_reasoning(self) -> bool:
        """Whether the next piece belongs to the reasoning."""
        return self._has_reasoned and self._state in (self._open, self._think)

    def add(self, text: str) -> None:
        """Read the next piece of the answer."""
        self._buffer += text
        while self._state():
            pass

    def finish(self) -> None:
        """Read the held-back text, because the answer has ended."""
        if self.is_reasoning:
            self._reasoning.add(self._buffer)
        elif self._state in (self._open, self._begin) and self._may_be_text:
            self.content += self._buffer
        self._buffer = ""

    @property
    def _may_be_text(self) -> bool:
        return not (self._form.parts.is_forced or self.calls)

    def _open(self) -> bool:
        """Look for reasoning. A model may write the opening tag again after the prompt's."""
        assert self._form.reasoning is not None
        tag = self._form.reasoning.open
        found = self._buffer.lstrip() if self._has_reasoned else self._buffer
        if found.startswith(tag):
            self._buffer, self._has_reasoned = found[len(tag) :], True
            self._reasoning.border()
            return True
        if tag.startswith(found):
            return False
        self._state = self._think if self._has_reasoned else self._begin
        return True

    def _think(self) -> bool:
        assert self._form.reasoning is not None
        close = self._form.reasoning.close
        thought, found, rest = self._buffer.partition(close)
        if found:
            self._buffer, self._state = rest, self._space
        else:
            length = len(thought) - length_that_begins(thought, (close,))
            thought, self._buffer = thought[:length], thought[length:]
        self._reasoning.add(thought)
        return bool(found)

    def _space(self) -> bool:
        """Skip the newlines after the reasoning."""
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._state = self._begin
        return bool(self._buffer)

    def _begin(self) -> bool:
        """Look for a call, or for a text if the answer may be one."""
        if self._literals is None:
            self._state = self._text
            return True
        before = self._literals.again if self.calls else self._literals.begin
        if self._buffer.startswith(before):
            self._buffer, self._state = self._buffer[len(before) :], self._name
            return True
        if self._may_be_text and not before.startswith(self._buffer):
            self._state = self._text
            return True
        return False

    def _text(self) -> bool:
        self.content += self._buffer
        self._buffer = ""
        return False

    def _name(self) -> bool:
        assert self._literals is not None
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
        assert self._literals is not None
        if not self._buffer.startswith(self._literals.after):
            return False
        self._buffer, self._state = self._buffer[len(self._literals.after) :], self._begin
        return True
