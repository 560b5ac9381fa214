"""Write the parts of an answer as formats of structural tags, for a grammar of the whole answer.

`mie.structured.structural_tags` has the formats. `mie.frontend.whole_answer` joins the parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mie.text.tools.formats import AnswerFormat

Format = dict[str, Any]
SpecialId = Callable[[str], int | None]
"""Returns the id of a special token. A grammar has to name it by its id."""


@dataclass(frozen=True, kw_only=True)
class AnswerParts:
    """The parts of an answer, as formats of structural tags."""

    reasoning: Sequence[Format] = ()
    """The reasoning at the beginning, and its border; nothing if there is none."""
    before_text: Sequence[Format] = ()
    """Tags before a text that a grammar of the request writes."""
    calls: Callable[[], Format] | None = None
    """Returns calls, and nothing else."""
    calls_in_text: Format | None = None
    """Text with calls in it; None if nothing restricts them."""
    is_forced: bool = False
    """Whether the answer must be calls."""


def literal_of(text: str, special_id: SpecialId) -> str | Format:
    """Return a tag as the beginning or the end of a structural tag."""
    token_id = special_id(text)
    return text if token_id is None else {"type": "token", "token": token_id}


def formats_of(text: str, tags: Sequence[str], special_id: SpecialId) -> list[Format]:
    """Return a text as formats. The tags in it may be special tokens."""
    special = [tag for tag in tags if special_id(tag) is not None]
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    literals = [literal_of(part, special_id) if part in special else part for part in parts]
    return [
        {"type": "const_string", "value": each} if isinstance(each, str) else each
        for each in literals
        if each
    ]


def reasoning_part(form: AnswerFormat, special_id: SpecialId) -> list[Format]:
    """Return the reasoning that an answer may begin with, and up to two newlines after it.

    The model may leave it out, unless the prompt has opened it.
    """
    tags, is_open = form.reasoning, bool(form.begins_with)
    if tags is None or not (is_open or form.may_lack_open):
        return []
    close = literal_of(tags.close, special_id)
    thought: Format = {"type": "any_text"}
    if not isinstance(close, str):
        thought["excludes"] = [tags.close]  # spelled by other tokens, it would be read as the tag
    begin = "" if is_open else literal_of(tags.open, special_id)
    tag = {"type": "tag", "begin": begin, "content": thought, "end": close}
    newlines = either(*({"type": "const_string", "value": text} for text in ("\n", "\n\n")))
    part = sequence(tag, {"type": "optional", "content": newlines})
    return [part if is_open else {"type": "optional", "content": part}]


def sequence(*elements: Format) -> Format:
    """Return formats in order."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    """Return one of the formats."""
    return {"type": "or", "elements": list(elements)}
