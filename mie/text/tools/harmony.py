"""Write the messages of harmony as parts of a grammar. `channels` reads them."""

from __future__ import annotations

import re
from functools import partial

from mie.text.tools.calls import Calls
from mie.text.tools.definitions import ToolChoice
from mie.text.tools.formats import (
    ANALYSIS,
    COMMENTARY,
    END,
    ENDS,
    FINAL,
    HARMONY,
    HARMONY_TAGS,
    HARMONY_TO,
    MESSAGE,
    REPLY,
    AnswerFormat,
)
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

_OWN_TOOLS = re.compile(r"^## (browser|python)$", re.MULTILINE)
"""The heading of a tool that belongs to the model, where the system message describes it."""
_OWN_CHANNELS = ("analysis", "commentary")
_OWN_NAMES = ("browser.search", "browser.open", "browser.find", "python")


def messages_of(
    form: AnswerFormat, choice: ToolChoice | None, special_id: SpecialId, prompt: str
) -> AnswerParts:
    """Return the messages of an answer: one of analysis, preambles, and calls or a final message.

    If the prompt describes tools of the model itself, a message to one of them may end the answer.
    """
    terms = partial(formats_of, tags=HARMONY_TAGS, special_id=special_id)
    text: Format = {"type": "any_text", "excludes": list(ENDS)}
    if form.begins_with and not form.begins_with.startswith(ANALYSIS.open):
        return AnswerParts(free=text, calls_in_text=text)
    end = {"type": "tag", "begin": "", "content": text, "end": literal_of(END, special_id)}
    before: list[Format] = []
    reasoning: list[Format] = []
    if form.begins_with:
        reasoning = [sequence(end, *terms(REPLY))]
    elif not prompt.endswith(REPLY):
        before = terms(REPLY)
    if form.reasoning is not None and not form.begins_with:
        analysis = sequence(*opened(terms(ANALYSIS.open), end), *terms(REPLY))
        reasoning = [*before, {"type": "optional", "content": analysis}]
        before = []
    preamble = sequence(*terms(COMMENTARY), end, *terms(REPLY))
    answers = [sequence(*terms(FINAL), text)]
    if _OWN_TOOLS.search(prompt):
        headers = (f"{of} to={name} code" for name in _OWN_NAMES for of in _OWN_CHANNELS)
        header = either(*({"type": "const_string", "value": each} for each in headers))
        answers.append(sequence(*terms("<|channel|>"), header, *terms(MESSAGE), text))
    if choice is not None:
        answers += [
            Calls(each, choice, special_id).alone(holds_all=False) for each in (HARMONY, HARMONY_TO)
        ]
    free = sequence(*before, {"type": "star", "content": preamble}, either(*answers))
    is_held = form.calls is not None and choice is not None and choice.is_held
    return AnswerParts(
        reasoning=reasoning,
        before_text=[*before, *terms(FINAL)],
        free=free,
        calls_in_text=free if is_held else None,
    )
