"""Read the table of formats of calls and reasoning, `table.json`, and choose a model's."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mie.errors import RequestError
from mie.text.tools.families import NO_FORMATS, FamilyFormats
from mie.text.tools.formats import ANALYSIS, HARMONY, CallFormat, Parameters, Tags
from mie.text.tools.response_template import calls_in, reasoning_in

_CALLS, _REASONING = json.loads(
    Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
).values()


def _format(name: str) -> CallFormat:
    """Return the format of a row. A row may be like another one."""
    row = {key: value for key, value in _CALLS[name].items() if key not in ("like", "marks")}
    if "parameters" in row:
        written = row["parameters"]
        row["parameters"] = Parameters(**{**written, "quotes": tuple(written.get("quotes", ()))})
    like = _CALLS[name].get("like")
    return CallFormat(**row) if like is None else replace(_format(like), **row)


CALLS: Mapping[str, CallFormat] = {"openai": HARMONY, **{name: _format(name) for name in _CALLS}}
"""The formats of calls by the names of vLLM's parsers, and of other engines' where it has none."""
HERMES = CALLS["hermes"]

MARKS: Sequence[tuple[str, Sequence[str]]] = [
    ("openai", ["<|channel|>"]),
    *((name, marks) for name, row in _CALLS.items() for marks in row.get("marks", ())),
]
"""The texts in a chat template that show a format. The first entry with all its texts holds."""

REASONING: Mapping[str, Tags] = {
    **{name: Tags(**row["tags"]) for row in _REASONING for name in row["names"]},
    "openai_gptoss": ANALYSIS,
}
"""The tags of reasoning by the names of vLLM's parsers, and of models where it has none."""

_USES_TOOLS = re.compile(r"\btools\b")


def call_format(
    parser: str,
    chat_template: str,
    response_template: Mapping[str, object] | None,
    family: FamilyFormats = NO_FORMATS,
) -> CallFormat:
    """Return how a model writes calls; ``parser`` is a name of `CALLS`, "hf" or "auto".

    "hf" is the model's response template. "auto" is the template too, or else the format with a tag
    in the chat template, or else the family's format. Where the template does not write tools, a
    message states the format, so it is Hermes' if there is no other.

    Raises:
        RequestError: the format is unknown, or the response template has something that is not
            supported.
    """
    if parser == "hf" or (parser == "auto" and response_template is not None):
        calls = calls_in(response_template)
        if calls is not None:
            return calls
        if parser == "hf":
            raise RequestError("tools: the model's response_template has no field tool_calls")
    if parser == "auto":
        other = "" if writes_tools(chat_template) else "hermes"
        parser = _shown_in(chat_template) or family.calls or other
    if not parser:
        raise RequestError(
            "tools: this model's calls have a format that is not known (set tool_call_parser to "
            f"{', '.join(CALLS)}, or to none, which reads no calls)"
        )
    if parser == "none":
        raise RequestError("tool_choice cannot force a call, because tool_call_parser is none")
    if parser == "mistral" and "[ARGS]" in chat_template:
        return CALLS["mistral_v11"]
    return CALLS[parser]


def reasoning_tags(
    parser: str,
    chat_template: str,
    response_template: Mapping[str, object] | None,
    family: FamilyFormats = NO_FORMATS,
) -> Tags | None:
    """Return the tags of a model's reasoning, or None if it is part of the text.

    ``parser`` is a name of `REASONING`, "hf", "auto" or "none". "hf" reads the response template.
    "auto" does so if its tags are literal, and otherwise finds tags in the chat template, or takes
    the family's tags.

    Raises:
        RequestError: the response template has no such tags, and the parser is "hf".
    """
    if parser == "hf":
        return reasoning_in(response_template)
    if parser != "auto":
        return None if parser == "none" else REASONING[parser]
    if response_template is not None:
        with suppress(RequestError):
            return reasoning_in(response_template)
    if writes_channels(chat_template):
        return ANALYSIS
    for tags in REASONING.values():
        if tags != ANALYSIS and tags.close in chat_template and tags.text_open in chat_template:
            return tags
    return None if family.reasoning is None else REASONING[family.reasoning]


def writes_tools(chat_template: str) -> bool:
    """Return whether a chat template writes tools, in one way or another."""
    return _USES_TOOLS.search(chat_template) is not None or writes_channels(chat_template)


def writes_channels(chat_template: str) -> bool:
    """Return whether a chat template writes harmony's messages."""
    return "<|channel|>" in chat_template


def _shown_in(chat_template: str) -> str | None:
    """Return the name of the format that a chat template shows to the model."""
    for name, marks in MARKS:
        if all(mark in chat_template for mark in marks):
            return name
    return None
