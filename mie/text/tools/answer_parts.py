"""Write the parts of an answer for a grammar: reasoning, calls, and the text with calls in it."""

from __future__ import annotations

from dataclasses import replace

from mie.text.tools.calls import Calls
from mie.text.tools.definitions import ToolChoice
from mie.text.tools.formats import AnswerFormat, split_tags
from mie.text.tools.harmony import messages_of
from mie.text.tools.whole import (
    AnswerParts,
    Format,
    SpecialId,
    either,
    formats_of,
    literal_of,
    opened,
    sequence,
)


def parts_of(
    form: AnswerFormat, choice: ToolChoice | None, special_id: SpecialId, prompt: str
) -> AnswerParts:
    """Return the parts of an answer to a prompt, for a grammar.

    Raises:
        RequestError: the format of calls cannot hold to a schema.
    """
    if form.has_channels:
        parts = messages_of(form, choice, special_id, prompt)
    else:
        parts = AnswerParts(reasoning=reasoning_part(form, special_id))
    if choice is None or form.calls is None:
        return parts
    calls = Calls(form.calls, choice, special_id)
    if choice.is_forced:
        forced = calls.alone()
        return replace(parts, calls=lambda: forced, is_forced=True)
    if form.has_channels:
        return replace(parts, calls=calls.alone)
    return replace(parts, calls=calls.alone, calls_in_text=calls.in_text())


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
    tag = {"type": "tag", "begin": "", "content": thought, "end": close}
    begun = [] if is_open else formats_of(tags.open, split_tags(tags.open), special_id)
    newlines = either(*({"type": "const_string", "value": text} for text in ("\n", "\n\n")))
    part = sequence(*opened(begun, tag), {"type": "optional", "content": newlines})
    return [part if is_open else {"type": "optional", "content": part}]
