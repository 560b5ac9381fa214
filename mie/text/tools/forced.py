"""Write calls as parts of a grammar, and read the answers that a grammar wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from mie.config.params.structured import COMPACT
from mie.text.tools.channels import ChannelParser
from mie.text.tools.definitions import MOST_CALLS, Tool, ToolCall, ToolChoice
from mie.text.tools.formats import ANALYSIS, END, FINAL, HARMONY, REPLY, AnswerFormat, CallFormat
from mie.text.tools.parser import AnswerParser, BorderedText, Divider, new_call
from mie.text.tools.values import JsonEnd, length_that_begins
from mie.text.tools.whole import (
    AnswerParts,
    Format,
    SpecialId,
    formats_of,
    literal_of,
    reasoning_part,
    sequence,
)
from mie.text.tools.written import ArgumentRules, Literals, literals_of

_ANY_OBJECT = json.dumps(
    {"type": "object", "additionalProperties": True, "x-guidance": {"whitespace_flexible": True}}
)


def parts_of(
    form: AnswerFormat, choice: ToolChoice | None, special_id: SpecialId, *, is_new: bool
) -> AnswerParts:
    """Return the parts of an answer for a grammar.

    ``is_new`` is false if the prompt ends inside a message of harmony.

    Raises:
        RequestError: the format of calls cannot hold to a schema.
    """
    parts = AnswerParts(reasoning=reasoning_part(form, special_id))
    if form.has_channels:
        parts = AnswerParts()
        if is_new:
            terms = partial(formats_of, tags=form.tags, special_id=special_id)
            analysis = _analysis(terms, special_id) if form.reasoning else []
            parts = AnswerParts(reasoning=analysis, before_text=terms(FINAL))
    if choice is None or form.calls is None:
        return parts
    calls = _Calls(form.calls, choice, special_id)
    if choice.is_forced:
        forced = calls.alone()
        return replace(parts, calls=lambda: forced, is_forced=True)
    return replace(parts, calls=calls.alone, calls_in_text=calls.in_text())


def _analysis(terms: Callable[[str], list[Format]], special_id: SpecialId) -> list[Format]:
    """Return harmony's message of reasoning and the beginning of the next. It may be missing."""
    thought = {
        "type": "tag",
        "begin": "",
        "content": {"type": "any_text", "excludes": [END]},
        "end": literal_of(END, special_id),
    }
    analysis = sequence(*terms(ANALYSIS.open), thought, *terms(REPLY))
    return [{"type": "optional", "content": analysis}]


class _Calls:
    """Writes calls as grammars, in llguidance's dialect of Lark."""

    def __init__(self, form: CallFormat, choice: ToolChoice, special_id: SpecialId) -> None:
        self._form, self._choice, self._special_id = form, choice, special_id
        tags = {tag: token_id for tag in form.tags if (token_id := special_id(tag)) is not None}
        self._special = tags
        self._pattern = "(" + "|".join(map(re.escape, tags)) + ")"

    def alone(self) -> Format:
        """Return calls of the tools that may be called, and nothing else."""
        written = literals_of(self._form, is_forced=self._choice.is_forced)
        begin, end = self._terms(written.begin), self._terms(written.end)
        return self._grammar(begin, written, end, holds_all=True)

    def in_text(self) -> Format | None:
        """Return text with calls in it. None if nothing restricts the calls.

        A call begins with a tag. The arguments of functions that are not strict are free.
        """
        form, choice = self._form, self._choice
        is_free = not (choice.is_subset or any(tool.is_strict for tool in choice.tools))
        if form == HARMONY or not form.triggers or is_free:
            return None
        written = literals_of(form, is_forced=False)
        begins = [(written.begin, self._terms(written.end))]
        if form.begin.strip() and form.open.strip():  # the model may leave the first tags out
            end = self._terms(written.end)
            begins.append((written.begin.removeprefix(form.begin), f"({end})?" if end else ""))
        tags = []
        for begin, end in begins:
            first, *rest = self._each(begin)
            trigger = literal_of(first, self._special_id)
            if isinstance(trigger, str):
                trigger = next(tag for tag in form.triggers if first.startswith(tag))
                rest = [first.removeprefix(trigger), *rest]
            start = " ".join(filter(None, map(self._term, rest)))
            content = self._grammar(start, written, end)
            tags.append({"type": "tag", "begin": trigger, "content": content, "end": ""})
        texts = [tag["begin"] for tag in tags if isinstance(tag["begin"], str)]
        return {
            "type": "triggered_tags",
            "triggers": texts,
            "tags": tags,
            "excludes": [text for text in form.triggers if text not in texts],
            "stop_after_first": not choice.may_repeat,
        }

    def _grammar(
        self, begin: str, written: Literals, end: str, *, holds_all: bool = False
    ) -> Format:
        """Return calls after the beginning of the first call.

        With ``holds_all`` the arguments of all functions follow their schemas, strict or not.
        """
        form, choice = self._form, self._choice
        rules = None
        if form.parameters is not None:
            rules = ArgumentRules(form.parameters, self._terms)
        calls = [
            self._call(tool, written, rules, is_held=holds_all or tool.is_strict)
            for tool in choice.tools
        ]
        again = f"({self._terms(written.again)} call){{0,{MOST_CALLS - 1}}}"
        start = f"start: {begin} call {again if choice.may_repeat else ''} {end}"
        more = [] if rules is None else rules.rules
        text = "\n".join([start, "call: " + "\n  | ".join(calls), *more])
        return {
            "type": "grammar",
            "grammar": text,
            "disable_additional_properties": True,
            "functions": [tool.name for tool in choice.tools],
        }

    def _call(
        self, tool: Tool, written: Literals, rules: ArgumentRules | None, *, is_held: bool
    ) -> str:
        form = self._form
        after = self._terms(written.after)
        # The number of a call is free, because one rule writes all calls.
        name = f"{self._terms(tool.name)} /:[0-9]{{1,2}}/ {self._terms(form.name_close)}"
        if not form.has_index:
            name = self._terms(tool.name + written.middle)
        if rules is not None:
            arguments = rules.of(tool) if is_held else rules.free(written.after)
            return f"{name} {arguments} {after if is_held else ''}"
        schema = json.dumps({**tool.parameters, "x-guidance": COMPACT}) if is_held else _ANY_OBJECT
        return f"{name} %json {schema} {after}"

    def _terms(self, text: str) -> str:
        return " ".join(map(self._term, self._each(text)))

    def _each(self, text: str) -> Iterator[str]:
        """Yield the special tokens in a text, and the text between them."""
        parts = re.split(self._pattern, text) if self._special else [text]
        return filter(None, parts)

    def _term(self, part: str) -> str:
        if part in self._special:
            return f"<[{self._special[part]}]>"
        return json.dumps(part, ensure_ascii=False) if part else ""


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
