"""Write the parts of an answer as formats of structural tags, for a grammar of the whole answer.

`mie.structured.structural_tags` has the formats. `mie.frontend.whole_answer` joins the parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    free: Format = field(default_factory=lambda: {"type": "any_tokens"})
    """The answer after its reasoning, where no tool and no structure restricts it."""
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


def opened(begun: Sequence[Format], tag: Format) -> list[Format]:
    """Return a tag with its beginning. A beginning of several texts and tokens stands before it."""
    if len(begun) != 1:
        return [*begun, tag]
    [only] = begun
    return [{**tag, "begin": only["value"] if only["type"] == "const_string" else only}]


def sequence(*elements: Format) -> Format:
    """Return formats in order."""
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Format) -> Format:
    """Return one of the formats."""
    return {"type": "or", "elements": list(elements)}
