"""The table of formats in which models write calls of tools and their reasoning.

The words are those of transformers' response templates: a field stands between the tags ``open``
and ``close``, and its content is JSON or text. A model's files may bring a template of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress

from mie.errors import RequestError
from mie.tools.response_template import CallFormat, Tags, calls_in, reasoning_in

HERMES = CallFormat(open="<tool_call>", close="</tool_call>", padding="\n", separator="\n")
LLAMA3 = CallFormat(
    open="<|python_tag|>", is_open_optional=True, arguments="parameters", separator="; "
)
MISTRAL = CallFormat(open="[TOOL_CALLS]", is_list=True, separator=", ", id_length=9)
MISTRAL_NAMED = CallFormat(open="[TOOL_CALLS]", name_close="[ARGS]", id_length=9)

CALLS: Mapping[str, CallFormat] = {
    "hermes": HERMES,  # Hermes, Qwen2.5, Qwen3, SmolLM3
    "llama3_json": LLAMA3,  # Llama 3.1, 3.2, 3.3
    "mistral": MISTRAL,  # Mistral; the newer spelling is found in the chat template
}
"""The formats of calls by vLLM's names of their parsers."""

THINK = Tags(open="<think>", close="</think>")
REASONING: Mapping[str, Tags] = {
    "deepseek_r1": THINK,
    "qwen3": THINK,
    "mistral": Tags(open="[THINK]", close="[/THINK]"),
}
"""The tags of reasoning by vLLM's names of their parsers."""

_USES_TOOLS = re.compile(r"\btools\b")


def call_format(
    parser: str, chat_template: str, response_template: Mapping[str, object] | None
) -> CallFormat:
    """Return how a model writes calls; ``parser`` is a name of `CALLS`, "hf" or "auto".

    "hf" is the model's response template. "auto" is that one too, or else the format whose tag is
    in the chat template.

    Raises:
        RequestError: the chat template does not write tools, the format is unknown, or the
            response template has something that is not supported.
    """
    if not _USES_TOOLS.search(chat_template):
        raise RequestError(
            "tools are not written by this model's chat template (give it one that does: "
            "chat_template)"
        )
    if parser == "hf" or (parser == "auto" and response_template is not None):
        calls = calls_in(response_template)
        if calls is not None:
            return calls
        if parser == "hf":
            raise RequestError("tools: the model's response_template has no field tool_calls")
    if parser == "auto":
        parser = _named_in(chat_template)
    if parser == "none":
        raise RequestError("tool_choice cannot force a call, because tool_call_parser is none")
    if parser == "mistral" and "[ARGS]" in chat_template:
        return MISTRAL_NAMED
    return CALLS[parser]


def reasoning_tags(
    parser: str, chat_template: str, response_template: Mapping[str, object] | None
) -> Tags | None:
    """Return the tags of a model's reasoning, or None if it is part of the text.

    ``parser`` is a name of `REASONING`, "hf", "auto" or "none". "hf" reads the response template.
    "auto" does so if its tags are literal, and otherwise finds tags in the chat template.

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
    found = [tags for tags in REASONING.values() if tags.close in chat_template]
    return found[0] if found else None


def _named_in(chat_template: str) -> str:
    """Return the name of the format that a chat template shows to the model."""
    if "<function=" not in chat_template:
        for name, calls in CALLS.items():
            if calls.open in chat_template:
                return name
        if "<|start_header_id|>" in chat_template and '"parameters": ' in chat_template:
            return "llama3_json"
    names = ", ".join(CALLS)
    raise RequestError(
        "tools: the format of this model's calls is not known (set tool_call_parser to "
        f"{names}, or to none, which reads no calls)"
    )
