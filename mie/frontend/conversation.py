"""Turn conversations into prompts, and read the parts of their answers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mie.errors import RequestError
from mie.text.chat import ChatTemplate
from mie.text.messages import Message, conversation, has_calls, without_developers
from mie.text.pretrained import PretrainedTokenizer
from mie.text.tools.answer_parts import parts_of
from mie.text.tools.channels import unfinished_header
from mie.text.tools.definitions import ToolCall, ToolChoice, as_functions, tool_choice_of
from mie.text.tools.families import FAMILY_FORMATS, NO_FORMATS
from mie.text.tools.forced import new_parser
from mie.text.tools.formats import FINAL, REPLY, AnswerFormat, CallFormat, Tags
from mie.text.tools.stated import HEADING, with_tools_stated
from mie.text.tools.table import HERMES, call_format, reasoning_tags, writes_channels, writes_tools


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
    max_tool_calls: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the prompt of a conversation, written with the model's chat template.

    ``render`` renders messages with the template. ``options`` are the template's parameters.
    ``encode`` encodes a text that has its special tokens. ``architecture`` is the family's name.

    Raises:
        ConfigError: an option of the template is wrong.
        RequestError: a message or a tool is malformed, the template rejects them, or the model's
            format of calls is not known.
    """
    choice = tool_choice_of(tools, tool_choice, parallel_tool_calls, max_tool_calls)
    shown = None if choice is None or tools is None else as_functions(tools)
    template = tokenizer.chat_templates.choose(options.get("chat_template"), shown)
    declared = tokenizer.tokenizer.config.response_template
    formats = template.source, declared, FAMILY_FORMATS.get(architecture, NO_FORMATS)
    calls = None
    if choice is not None and (choice.is_forced or tool_call_parser != "none"):
        calls = call_format(tool_call_parser, *formats)
    if not writes_tools(template.source) and (choice is not None or has_calls(messages)):
        messages = _in_words(messages, template, shown, choice, calls or HERMES)
        shown = None
    text = render(messages, tools=shown, **options)
    if choice is not None and shown is None and HEADING not in text:
        raise RequestError(
            "tools are written neither by this model's chat template, nor in a message that it "
            "writes (give a template that writes tools)"
        )
    prompt = {"prompt": text, "prompt_token_ids": encode(text)}
    tags = reasoning_tags(reasoning_parser, *formats)
    form = _form_of(tags, calls, choice)
    if tags is not None or calls is not None:
        if form.has_channels:
            form = replace(form, begins_with=unfinished_header(text))
        elif tags is not None:
            opening = _opening(text, tags, messages, partial(render, tools=shown), options)
            always = reasoning_parser == "deepseek_r1"  # as in vLLM: these models always reason
            form = _begun(form, tags, opening, options, always_reasons=always)
        special_id = partial(_special_id, tokenizer)
        return {**prompt, "answer": replace(form, parts=parts_of(form, choice, special_id, text))}
    if writes_channels(template.source):
        before = FINAL if text.endswith(REPLY) else ""
        return {**prompt, "answer": replace(form, before_structure=before)}
    return prompt


def _in_words(
    messages: Sequence[Message],
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: ToolChoice | None,
    calls: CallFormat,
) -> list[dict[str, Any]]:
    """Return the messages with tools, calls and results in words, for a template without tools."""
    given = conversation(messages)
    if "developer" not in template.source:
        given = without_developers(given)
    return with_tools_stated(given, tools, choice, calls, has_system=template.has_system)


def _form_of(
    reasoning: Tags | None, calls: CallFormat | None, choice: ToolChoice | None
) -> AnswerFormat:
    """Return the format of an answer with this reasoning, and with calls of the chosen tools."""
    if choice is None:
        return AnswerFormat(reasoning=reasoning, calls=calls)
    return AnswerFormat(
        reasoning=reasoning,
        calls=calls,
        names=choice.names,
        customs=choice.customs,
        schemas=choice.schemas,
        most_calls=choice.most_calls,
    )


def _begun(
    form: AnswerFormat,
    tags: Tags,
    opening: str,
    options: Mapping[str, Any],
    *,
    always_reasons: bool,
) -> AnswerFormat:
    """Return the format of an answer that begins with ``opening`` at the end of the prompt."""
    is_open = tags.open in opening and tags.close not in opening.rpartition(tags.open)[2]
    is_begun = tags.close in opening or bool(options.get("continue_final_message"))
    return replace(
        form,
        begins_with=tags.open if is_open or (always_reasons and not is_begun) else "",
        may_lack_open=not is_open and not is_begun,
    )


def _special_id(tokenizer: PretrainedTokenizer, text: str) -> int | None:
    """Return the id of a special token. It is not spelled like other tokens."""
    token_id = tokenizer.tokenizer.token_to_id(text)
    return token_id if token_id in tokenizer.tokenizer.special_ids else None


def _opening(
    text: str,
    tags: Tags,
    messages: Sequence[Message],
    render: Callable[..., str],
    options: Mapping[str, Any],
) -> str:
    """Return the beginning of the answer at the end of the prompt ``text``.

    The tags of other messages do not count: a user may write about them.
    """
    if options.get("continue_final_message"):
        return str(conversation(messages)[-1]["content"] or "")
    if tags.open not in text and tags.close not in text:
        return ""
    for tag in (tags.open, tags.close):  # the usual cases need no second prompt
        if text.rstrip().endswith(tag):
            return tag
    before = render(messages, **{**options, "add_generation_prompt": False})
    return text.removeprefix(before) if text.startswith(before) else ""


class AnswerState:
    """Reads the text of one choice by its format."""

    def __init__(self, form: AnswerFormat, key: str) -> None:
        """The ids of calls derive from ``key``."""
        self._form = form
        self._key = key
        self._num_reasoning_taken = 0
        # Characters of each call's arguments that were taken.
        self._num_arguments_taken: list[int] = []
        self.begin()

    def begin(self) -> None:
        """Read the text from the first character on."""
        self.parser = new_parser(self._form, self._key)
        self.num_reasoning_tokens = self._num_tokens = 0

    def add(self, text: str, num_taken: int, *, is_last: bool) -> tuple[str, int]:
        """Read the text of a token, and return the answer so far, without its other parts.

        The caller has ``num_taken`` characters of the answer before. Text that turns out to be
        reasoning leaves the answer, so the other value is how many it has of the new one.
        """
        self.num_reasoning_tokens += self.parser.is_reasoning
        self._num_tokens += 1
        before = self.parser.moved
        self.parser.add(text)
        if is_last:
            self.parser.finish()
        moved = self.parser.moved
        if moved is not None and before is None:
            self.num_reasoning_tokens = self._num_tokens
            num_left = len(moved) - num_taken
            self._num_reasoning_taken = max(0, len(moved.lstrip()) - num_left)
            num_taken = 0
        return self.parser.content, num_taken

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
