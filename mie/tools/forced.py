"""Write the grammar of answers that must be calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mie.params.structured import StructuredOutputsParams
from mie.structured.schemas import COMPACT, close
from mie.tools.definitions import Tool, ToolChoice
from mie.tools.response_template import CallFormat

MOST_CALLS = 32
"""Calls that an answer may have. A small model may not know when to end."""


@dataclass(frozen=True, kw_only=True)
class Literals:
    """What a grammar writes around names and arguments."""

    begin: str
    """Before the name of the first call."""
    again: str
    """Before the name of any other call."""
    middle: str
    """Between a name and its arguments."""
    after: str
    """After the arguments."""
    end: str
    """After all calls."""


def literals_of(form: CallFormat) -> Literals:
    """Return what is written around the calls of a format."""
    name = f'{{"{form.name}": "'
    middle = f'", "{form.arguments}": '
    opening = "" if form.is_open_optional else form.open
    if form.name_close:
        return Literals(
            begin=opening,
            again=form.separator + opening,
            middle=form.name_close,
            after=form.close,
            end="",
        )
    if form.is_list:
        return Literals(
            begin=f"{opening}{form.padding}[{name}",
            again=form.separator + name,
            middle=middle,
            after="}",
            end=f"]{form.padding}{form.close}",
        )
    return Literals(
        begin=opening + form.padding + name,
        again=form.separator + opening + form.padding + name,
        middle=middle,
        after=f"}}{form.padding}{form.close}",
        end="",
    )


def grammar_of(
    form: CallFormat, choice: ToolChoice, special_id: Callable[[str], int | None]
) -> StructuredOutputsParams:
    """Return the grammar of answers that are calls, in llguidance's dialect of Lark.

    ``special_id`` returns the id of a special token, which a grammar has to name by its id.
    """
    written = literals_of(form)

    def terms(text: str) -> str:
        return " ".join(_terms(text, form, special_id))

    again = f"({terms(written.again)} call){{0,{MOST_CALLS - 1}}}" if choice.may_repeat else ""
    calls = [
        f"{terms(tool.name + written.middle)} %json {_schema(tool)} {terms(written.after)}"
        for tool in choice.tools
    ]
    start = f"start: {terms(written.begin)} call {again} {terms(written.end)}"
    return StructuredOutputsParams(grammar="\n".join([start, "call: " + "\n  | ".join(calls)]))


def _schema(tool: Tool) -> str:
    """Return the schema of arguments for compact JSON without keys that it does not name."""
    text = json.dumps(tool.parameters)
    schema = json.loads(text)
    if '"allOf"' not in text:  # two closed schemas would allow nothing together
        close(schema)
    return json.dumps({**schema, "x-guidance": COMPACT})


def _terms(text: str, form: CallFormat, special_id: Callable[[str], int | None]) -> Iterator[str]:
    tags = [tag for tag in (form.open, form.close, form.name_close) if tag]
    for part in re.split("(" + "|".join(map(re.escape, tags)) + ")", text):
        token_id = special_id(part) if part in tags else None
        if token_id is not None:
            yield f"<[{token_id}]>"
        elif part:
            yield json.dumps(part, ensure_ascii=False)
