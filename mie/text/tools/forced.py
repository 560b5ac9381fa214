"""Force answers to be calls with a grammar, and read those answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from mie.config.params.structured import COMPACT, StructuredOutputsParams
from mie.text.tools.channels import ChannelParser
from mie.text.tools.definitions import ToolCall, ToolChoice
from mie.text.tools.formats import AnswerFormat, CallFormat
from mie.text.tools.parser import AnswerParser, Divider, new_call
from mie.text.tools.values import JsonEnd
from mie.text.tools.written import ArgumentRules, literals_of

MOST_CALLS = 32
"""Calls that an answer may have. A small model may not know when to end."""


def grammar_of(
    form: CallFormat, choice: ToolChoice, special_id: Callable[[str], int | None]
) -> StructuredOutputsParams:
    """Return the grammar of answers that are calls, in llguidance's dialect of Lark.

    ``special_id`` returns the id of a special token. A grammar has to name it by its id.
    """
    written = literals_of(form)

    def terms(text: str) -> str:
        return " ".join(_terms(text, form, special_id))

    again = f"({terms(written.again)} call){{0,{MOST_CALLS - 1}}}" if choice.may_repeat else ""
    calls = []
    rules = ArgumentRules(form.parameters, terms) if form.parameters is not None else None
    for tool in choice.tools:
        if rules is None:
            arguments = f"%json {json.dumps({**tool.parameters, 'x-guidance': COMPACT})}"
        else:
            arguments = rules.of(tool)
        # The number of a call is free, because one rule writes all calls.
        name = f"{terms(tool.name)} /:[0-9]{{1,2}}/ {terms(form.name_close)}"
        if not form.has_index:
            name = terms(tool.name + written.middle)
        calls.append(f"{name} {arguments} {terms(written.after)}")
    start = f"start: {terms(written.begin)} call {again} {terms(written.end)}"
    more = [] if rules is None else rules.rules
    text = "\n".join([start, "call: " + "\n  | ".join(calls), *more])
    return StructuredOutputsParams(grammar=text, disable_additional_properties=True)


def _terms(text: str, form: CallFormat, special_id: Callable[[str], int | None]) -> Iterator[str]:
    special = {tag: token_id for tag in form.tags if (token_id := special_id(tag)) is not None}
    for part in (
        re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    ):
        if part in special:
            yield f"<[{special[part]}]>"
        elif part:
            yield json.dumps(part, ensure_ascii=False)


def new_parser(form: AnswerFormat, key: str) -> Divider | ForcedParser:
    """Return a parser for one answer. The ids of its calls derive from ``key``."""
    if form.structured_outputs is not None and form.calls is not None and form.calls.is_streamed:
        return ForcedParser(form, key)
    return (ChannelParser if form.has_channels else AnswerParser)(form, key)


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
        self.moved: str | None = None
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
