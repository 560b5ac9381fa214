"""Turn conversations into prompts that say how their answers are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mie.text.messages import Message
from mie.text.pretrained import PretrainedTokenizer
from mie.tools.definitions import tool_choice_of
from mie.tools.forced import grammar_of
from mie.tools.formats import AnswerFormat, call_format, reasoning_tags


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Writes prompts with a model's chat template."""

    tokenizer: PretrainedTokenizer
    render: Callable[..., str]
    """Renders messages with the chat template."""
    encode: Callable[[str], list[int]]
    """Encodes a prompt whose special tokens are written."""
    tool_call_parser: str
    reasoning_parser: str

    def prompt(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Return the prompt of a conversation. ``options`` are those of the chat template.

        Raises:
            ConfigError: an option of the template is wrong.
            RequestError: a message or a tool is malformed, the template rejects them, or the
                model's format of calls is not known.
        """
        choice = tool_choice_of(tools, tool_choice, parallel_tool_calls)
        templates = self.tokenizer.chat_templates
        shown = None if choice is None else tools
        template = templates.choose(options.get("chat_template"), shown).source
        declared = self.tokenizer.tokenizer.config.response_template
        calls = None
        if choice is not None and (choice.is_forced or self.tool_call_parser != "none"):
            calls = call_format(self.tool_call_parser, template, declared)
        text = self.render(messages, tools=shown, **options)
        prompt = {"prompt": text, "prompt_token_ids": self.encode(text)}
        if calls is not None and choice is not None and choice.is_forced:
            form = AnswerFormat(
                calls=calls,
                names=choice.names,
                structured_outputs=grammar_of(calls, choice, self._special_id),
            )
            return {**prompt, "answer": form}
        tags = reasoning_tags(self.reasoning_parser, template, declared)
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

    def _special_id(self, text: str) -> int | None:
        """Return the id of a special token, which is not spelled like other tokens."""
        tokenizer = self.tokenizer.tokenizer
        token_id = tokenizer.token_to_id(text)
        return token_id if token_id in tokenizer.special_ids else None
