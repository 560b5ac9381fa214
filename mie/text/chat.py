"""Render chat messages as a prompt with the model's chat template."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from mie.errors import ChatTemplateError, ConfigError, RequestError, printable, shown
from mie.text.ignored_lines import without_lines
from mie.text.messages import (
    Message,
    checked_messages,
    conversation,
    for_channels,
    forms,
    has_python_notation,
    without_developers,
    without_null,
)
from mie.text.template_files import TemplateFiles, is_template

if TYPE_CHECKING:
    from mie.text.renderer import TemplateRenderer

LARGEST_TEMPLATE = 128 << 10  # characters; the longest in use are about 30,000
CONTENT_FORMATS = ("auto", "string", "openai")

_TESTS_NULL = re.compile(r"content\W* is (not )?none")
_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "
_PROBE = "MESSAGE_TAG"


class ChatTemplate:
    """A chat template, rendered with Hugging Face's settings in a worker process with limits.

    The template writes BOS itself if the model needs it, so encode the prompt with
    ``add_special_tokens=False``. Templates may share a ``renderer`` and its worker.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the chat template",
        renderer: TemplateRenderer | None = None,
    ) -> None:
        if not isinstance(source, str):
            raise ChatTemplateError(f"{name} must be text, got {type(source).__name__}")
        if len(source) > LARGEST_TEMPLATE:
            raise ChatTemplateError(
                f"{name} has {len(source):,} characters; the limit is {LARGEST_TEMPLATE:,}"
            )
        self.source = source
        self._name = name
        self._special_tokens = dict(special_tokens or {})
        self._renderer = renderer or _new_renderer()

    @cached_property
    def content_format(self) -> str:
        """The form of message contents that the template expects.

        It is "openai" if the template iterates over the parts of a content, else "string".

        Raises:
            ChatTemplateError: it is not a valid jinja2 template.
        """
        return str(self._ask({"source": self.source})["format"])

    @cached_property
    def takes_text(self) -> bool:
        """Whether the template writes a content that is text, and not only contents in parts."""
        try:
            return _PROBE in self.render([{"role": "user", "content": _PROBE}])
        except ChatTemplateError:
            return False

    @cached_property
    def has_system(self) -> bool:
        """Whether the template writes a system message."""
        try:
            messages = [{"role": "system", "content": _PROBE}, {"role": "user", "content": "Hello"}]
            return _PROBE in self.render(conversation(messages, self.content_format))
        except ChatTemplateError:
            return False

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt for ``messages``. The template gets them unchanged.

        The template can use the special tokens by name (``bos_token``, …). ``variables`` may
        override them and add others (``enable_thinking``, …). With ``continue_final_message`` the
        prompt ends with the last message's text.

        Raises:
            RequestError: a message is malformed, or a variable is not a JSON value.
            ChatTemplateError: the template rejects the messages, fails, or exceeds a limit.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other: the first"
                " continues the last message, the second begins a new one"
                " (pass add_generation_prompt=False)"
            )
        messages = checked_messages(messages)
        if continue_final_message:
            messages[-1] = self._marked(messages[-1])
        values = {
            **self._special_tokens,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        text = str(self._ask({"source": self.source, "variables": values})["text"])
        return self._cut(text) if continue_final_message else text

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            reply = self._renderer.ask(request)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"{self._name} {error}") from error
        if "error" not in reply:
            return reply
        message = printable(reply["message"])
        what = {
            "syntax": f"is not a jinja2 template: line {reply.get('line')}:",
            "compile": "cannot be compiled:",
            "refused": "refused the messages:",
            "long": "rendered too long a prompt:",
        }.get(reply["error"], "failed:")
        kind = _BrokenTemplateError if reply["error"] == "failed" else ChatTemplateError
        raise kind(f"{self._name} {what} {message}")

    def _marked(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return ``message`` with a mark at the end of its text."""
        content = message.get("content")
        if isinstance(content, str):
            return {**message, "content": content + _CONTINUE_HERE}
        if isinstance(content, Sequence):
            for index in reversed(range(len(content))):
                part = content[index]
                if isinstance(part, Mapping) and isinstance(part.get("text"), str):
                    marked = {**part, "text": part["text"] + _CONTINUE_HERE}
                    return {**message, "content": [*content[:index], marked, *content[index + 1 :]]}
        raise RequestError("continue_final_message: the last message has no text to continue")

    def _cut(self, text: str) -> str:
        """Return ``text`` up to the mark, without trailing space that the template trimmed."""
        place = text.rfind(_CONTINUE_HERE.strip())
        if place < 0:
            raise ChatTemplateError(
                f"{self._name} does not write the last message's text as it is,"
                " so continue_final_message has nothing to continue"
            )
        is_trimmed = not text.startswith(_CONTINUE_HERE, place)
        before = text[:place].replace(_CONTINUE_HERE.strip() if is_trimmed else _CONTINUE_HERE, "")
        return before.rstrip() if is_trimmed else before


class ChatTemplates:
    """The chat templates of a model directory."""

    def __init__(self, files: TemplateFiles) -> None:
        self._files = files
        self._renderer = _new_renderer()
        self._loaded: dict[str, ChatTemplate] = {}

    def start(self) -> None:
        """Start the render worker before the first chat, without waiting for it."""
        self._renderer.start()

    def close(self) -> None:
        """Stop the render worker. The next chat starts another."""
        self._renderer.close()

    def choose(self, chat_template: str | None, tools: Sequence[Any] | None = None) -> ChatTemplate:
        """Return the template to use: a named one, the given text, or the model's default.

        The model's template named ``tool_use`` is used if there are tools and it exists.

        Raises:
            ChatTemplateError: there is no template.
            TokenizerError: the files are broken.
        """
        names = self._files.names
        if chat_template is not None and chat_template not in names:
            if not is_template(chat_template):
                known = f" ({', '.join(names)})" if names else ""
                raise ChatTemplateError(
                    f"chat_template {shown(chat_template)} is neither a file, nor the text of a "
                    f"template, nor the name of one of the model's{known}"
                )
            return self._new(chat_template, "the chat template")
        default = "tool_use" if tools and "tool_use" in names else "default"
        name = chat_template or default
        if name not in self._loaded:
            self._loaded[name] = self._new(*self._files.read(name))
        return self._loaded[name]

    def render(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for ``messages``. `LLM.chat` explains the parameters.

        Raises:
            ConfigError: a parameter is wrong.
            RequestError: a message is malformed.
            ChatTemplateError: there is no template, or it rejects the messages.
        """
        if chat_template_content_format not in CONTENT_FORMATS:
            raise ConfigError(
                "chat_template_content_format must be one of"
                f" {', '.join(map(repr, CONTENT_FORMATS))}; got {chat_template_content_format!r}"
            )
        variables = _checked_variables(chat_template_kwargs)
        template = self.choose(chat_template, tools)
        content_format = chat_template_content_format
        if content_format == "auto":
            content_format = template.content_format
            if content_format == "openai" and template.takes_text:
                content_format = "given"
        given = conversation(messages, content_format)
        if not _TESTS_NULL.search(template.source):
            given = without_null(given)
        if "<|channel|>" in template.source:
            given = for_channels(given)
        if "developer" not in template.source:
            given = without_developers(given)
        render = partial(
            template.render,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools or None,
            documents=documents,
            **variables,
        )
        return _first_good(render, forms(given, joins_parts=content_format == "given"))

    def without_lines(self, messages: Sequence[Message], pattern: str) -> Sequence[Message]:
        """Return messages without the lines of system messages in which a regex is found.

        Raises:
            RequestError: the regex took too much time or memory.
        """
        return without_lines(messages, pattern, self._renderer.ask)

    def _new(self, source: str, name: str) -> ChatTemplate:
        tokens = self._files.special_tokens
        return ChatTemplate(source, special_tokens=tokens, name=name, renderer=self._renderer)


class _BrokenTemplateError(ChatTemplateError):
    """A template failed while it ran, within the limits."""


def _first_good(render: Callable[[Sequence[Message]], str], given: Iterable[Any]) -> str:
    """Return the prompt of the first form of messages that the template writes without a fault.

    Most templates write the arguments of a call with ``tojson``, so they are objects. Some write
    them as they are, as text. Objects break such a template or appear in Python's notation. Some
    templates break on a content of None, or write the parts of some contents in Python's notation.
    """
    failed: ChatTemplateError | None = None
    faulty: str | None = None
    for form in given:
        try:
            text = render(form)
        except ChatTemplateError as error:
            if failed is None and faulty is None and not isinstance(error, _BrokenTemplateError):
                raise
            failed = failed or error
            continue
        if not has_python_notation(text, form):
            return text
        faulty = faulty or text
    if faulty is not None:
        return faulty
    assert failed is not None, "there is at least one form"
    raise failed


def _new_renderer() -> TemplateRenderer:
    from mie.text.renderer import TemplateRenderer  # imports subprocess for chats alone

    return TemplateRenderer()


def _checked_variables(variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return ``chat_template_kwargs`` after checking that it contains no parameters."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
        raise ConfigError(f"chat_template_kwargs must have string keys; got {variables!r}")
    own = [*inspect.signature(ChatTemplates.render).parameters][1:]
    for name in variables:
        if name in own:
            raise ConfigError(
                f"{name} is a separate parameter; remove it from chat_template_kwargs"
            )
    return variables
