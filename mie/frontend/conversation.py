"""Turn conversations into prompts that say how their answers are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mie.structured.tools.definitions import tool_choice_of
from mie.structured.tools.families import FAMILY_FORMATS, NO_FORMATS
from mie.structured.tools.forced import grammar_of
from mie.structured.tools.formats import AnswerFormat, call_format, reasoning_tags
from mie.text.messages import Message
from mie.text.pretrained import PretrainedTokenizer


def prompt_of(
    messages: Sequence[Message],
    tokenizer: PretrainedTokenizer,
    render: Callable[..., str],
    encode: Callable[[str], list[int]],
    tool_call_parser: str,
    reasoning_parser: str,
    architecture: str,
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the prompt of a conversation, written with the model's chat template.

    ``render`` renders messages with the template, whose own parameters are ``options``. ``encode``
    encodes a text that has its special tokens. ``architecture`` is the family's name.

    Raises:
        ConfigError: an option of the template is wrong.
        RequestError: a message or a tool is malformed, the template rejects them, or the model's
            format of calls is not known.
    """

    def special_id(text: str) -> int | None:
        """Return the id of a special token, which is not spelled like other tokens."""
        token_id = tokenizer.tokenizer.token_to_id(text)
        return token_id if token_id in tokenizer.tokenizer.special_ids else None

    choice = tool_choice_of(tools, tool_choice, parallel_tool_calls)
    templates = tokenizer.chat_templates
    shown = None if choice is None else tools
    template = templates.choose(options.get("chat_template"), shown).source
    declared = tokenizer.tokenizer.config.response_template
    family = FAMILY_FORMATS.get(architecture, NO_FORMATS)
    calls = None
    if choice is not None and (choice.is_forced or tool_call_parser != "none"):
        calls = call_format(tool_call_parser, template, declared, family)
    text = render(messages, tools=shown, **options)
    prompt = {"prompt": text, "prompt_token_ids": encode(text)}
    if calls is not None and choice is not None and choice.is_forced:
        form = AnswerFormat(
            calls=calls,
            names=choice.names,
            structured_outputs=grammar_of(calls, choice, special_id),
        )
        return {**prompt, "answer": form}
    tags = reasoning_tags(reasoning_parser, template, declared, family)
    if calls is None and tags is None:
        return prompt
    form = AnswerFormat(
        reasoning=tags,
        begins_in_reasoning=tags is not None and text.rstrip().endswith(tags.open),
        calls=calls,
        names=frozenset() if choice is None else choice.names,
        may_repeat=choice is None or choice.may_repeat,
    )
    return {**prompt, "answer": form}
