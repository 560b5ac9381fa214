"""Turn conversations into prompts, and read the parts of their answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mie.structured.tools.channels import unfinished_header
from mie.structured.tools.definitions import ToolCall, tool_choice_of
from mie.structured.tools.families import FAMILY_FORMATS, NO_FORMATS
from mie.structured.tools.forced import grammar_of, new_parser
from mie.structured.tools.formats import (
    FINAL,
    REPLY,
    AnswerFormat,
    call_format,
    reasoning_tags,
    writes_channels,
)
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
    has_channels = writes_channels(template)
    if calls is None and tags is None and not has_channels:
        return prompt
    form = AnswerFormat(
        reasoning=tags,
        calls=calls,
        names=frozenset() if choice is None else choice.names,
        may_repeat=choice is None or choice.may_repeat,
        before_structure=FINAL if has_channels and text.endswith(REPLY) else "",
    )
    if form.has_channels:
        form = replace(form, begins_with=unfinished_header(text))
    elif tags is not None and text.rstrip().endswith(tags.open):
        form = replace(form, begins_with=tags.open)
    return {**prompt, "answer": form}


class AnswerState:
    """Reads the text of one choice as its format says."""

    def __init__(self, form: AnswerFormat, key: str) -> None:
        """The ids of calls derive from ``key``."""
        self._form = form
        self._key = key
        self._num_reasoning_taken = 0
        self._num_arguments_taken: list[int] = []  # characters, of each call
        self.begin()

    def begin(self) -> None:
        """Read the text from the first character on."""
        self.parser = new_parser(self._form, self._key)
        self.num_reasoning_tokens = 0

    def add(self, text: str, *, is_last: bool) -> str:
        """Read the text of a token, and return the answer so far, without its other parts."""
        self.num_reasoning_tokens += self.parser.is_reasoning
        self.parser.add(text)
        if is_last:
            self.parser.finish()
        return self.parser.content

    def reasoning(self, *, is_delta: bool) -> str | None:
        """Return the reasoning, or only its new part; None if the format has none."""
        if self._form.reasoning is None:
            return None
        return self.parser.reasoning[self._num_reasoning_taken if is_delta else 0 :]

    def calls(self, *, is_delta: bool) -> list[ToolCall] | None:
        """Return the calls, or only their new parts; None if there are no tools."""
        if self._form.calls is None:
            return None
        if not is_delta:
            return [replace(call) for call in self.parser.calls]
        taken = self._num_arguments_taken
        return [
            replace(call, arguments=call.arguments[taken[call.index] :])
            if call.index < len(taken)
            else replace(call)
            for call in self.parser.calls
            if call.index >= len(taken) or len(call.arguments) > taken[call.index]
        ]

    def take(self) -> None:
        """Note that the caller has everything so far."""
        self._num_reasoning_taken = len(self.parser.reasoning)
        self._num_arguments_taken = [len(call.arguments) for call in self.parser.calls]
