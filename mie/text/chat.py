"""Chat messages to a prompt, by the model's own template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from mie.errors import ChatTemplateError, RequestError, TokenizerError
from mie.text.sandbox import STEP, Sandbox, TooMuchWork, size_of
from mie.text.tokenizer_config import TokenizerConfig, read_text

Message = Mapping[str, Any]

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"

_LARGEST_TEMPLATE = 1 << 20  # characters; the longest in use are about 30,000
_BASE_WORK = 200_000 * STEP
_WORK_PER_INPUT = 200  # what is allowed more for each character of the messages


class ChatTemplate:
    """A model's chat template, rendered with Hugging Face's settings in a bounded sandbox.

    A template may do a fixed amount of work plus some per character of its input (see
    ``mie.text.sandbox``): one that loops, or builds huge values, raises ChatTemplateError within
    seconds. The prompt that it writes already holds BOS where the model wants it: encode it with
    ``add_special_tokens=False``.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        name: str = "the chat template",
    ) -> None:
        self.source = source
        self._name = name
        self._special_tokens = dict(special_tokens or {})
        self._sandbox = _new_sandbox()
        self._template = self._compile()

    @classmethod
    def load(cls, directory: Path, name: str = "default") -> ChatTemplate:
        """The template in ``directory``.

        Looked for in ``chat_template.jinja``, in ``tokenizer_config.json`` under ``chat_template``
        (one template, or a list of named ones), then in ``additional_chat_templates/NAME.jinja``.
        A ``name`` other than ``default`` asks for a named one.

        Raises:
            ChatTemplateError: there is none, or it is not a jinja2 template.
            TokenizerError: ``tokenizer_config.json`` is broken.
        """
        config = TokenizerConfig.load(directory)
        source, found_in = _find(directory, config, name)
        return cls(source, special_tokens=config.special_tokens, name=found_in)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for ``messages``: ``{"role": …, "content": text or list of text parts}`` each.

        Special tokens are known to the template by name (``bos_token``, …); ``variables`` may
        override them, and bring whatever else the template reads (``enable_thinking``, …).

        Raises:
            RequestError: a message is malformed.
            ChatTemplateError: the template refuses the messages, fails, or does not end in time.
        """
        values = {
            **self._special_tokens,
            "messages": checked_messages(messages),
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        work = _BASE_WORK + _WORK_PER_INPUT * size_of(values, _BASE_WORK)
        try:
            self._sandbox.allow(work)
            return self._sandbox.concat(list(self._template.generate(values)))
        except TooMuchWork:
            raise ChatTemplateError(
                f"{self._name} did not end: it was stopped at {work:,} units of work ({STEP} for a"
                " turn of a loop, 1 for a character); does it loop, or build huge values?"
            ) from None
        except TemplateError as error:
            raise ChatTemplateError(f"{self._name} refused the messages: {error}") from error
        except Exception as error:  # a template can fail in every way that Python can
            raise ChatTemplateError(
                f"{self._name} failed: {type(error).__name__}: {error}"
            ) from error

    def _compile(self) -> Any:
        if len(self.source) > _LARGEST_TEMPLATE:
            raise ChatTemplateError(
                f"{self._name} has {len(self.source):,} characters;"
                f" the limit is {_LARGEST_TEMPLATE:,}"
            )
        try:
            return self._sandbox.compile_metered(self.source)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"{self._name} is not a jinja2 template: line {error.lineno}: {error.message}"
            ) from error
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ChatTemplateError(f"{self._name} cannot be compiled: {error}") from error


def checked_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """``messages`` as templates expect them: plain dicts, text parts joined by newlines.

    Raises:
        RequestError: there are none, one lacks its role, or its content is not text.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            'messages must be a list of {"role": …, "content": …} objects,'
            f" got {type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages is empty; give at least one message")
    return [_checked(message, index) for index, message in enumerate(messages)]


def _checked(message: object, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] must be an object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"messages[{index}] must have a role such as 'user', got {role!r}")
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)
    return {**message, "content": _text(content, f"messages[{index}]")}


def _text(content: object, where: str) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and not isinstance(content, bytes):
        return "\n".join(_part(part, where) for part in content)
    raise RequestError(
        f"{where}: content must be text or a list of text parts, got {type(content).__name__}"
    )


def _part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(f"{where}: only parts of type 'text' are supported, got {kind!r}")


def _find(directory: Path, config: TokenizerConfig, name: str) -> tuple[str, str]:
    """The template called ``name`` in ``directory``, and where it was found."""
    path = directory / TEMPLATE_FILE
    if name == "default" and path.is_file():
        return _read(path), str(path)
    named = _named(config.chat_template, directory)
    if name in named:
        return named[name], f"chat_template in {directory / 'tokenizer_config.json'}"
    path = directory / MORE_TEMPLATES / f"{name}.jinja"
    if path.is_file():
        return _read(path), str(path)
    raise ChatTemplateError(_missing(directory, name, [*named]))


def _missing(directory: Path, name: str, others: Sequence[str]) -> str:
    tried = f"{TEMPLATE_FILE}, tokenizer_config.json, {MORE_TEMPLATES}/{name}.jinja"
    known = f" (there are others: {', '.join(sorted(others))})" if others else ""
    which = "no chat template" if name == "default" else f"no chat template {name!r}"
    return (
        f"{which} in {directory}: tried {tried}{known}. Put a jinja2 template into"
        f" {directory / TEMPLATE_FILE}, or generate from a plain prompt"
    )


def _named(templates: object, directory: Path) -> dict[str, str]:
    """The templates in ``tokenizer_config.json`` by name; one without a name is the default."""
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    entries = templates if isinstance(templates, list) else [templates]
    named = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
    }
    if len(named) < len(entries) or not all(isinstance(text, str) for text in named.values()):
        raise TokenizerError(
            f"{directory / 'tokenizer_config.json'}: chat_template must be a string, or a list of"
            ' {"name": …, "template": …} objects with different names'
        )
    return named


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except TokenizerError as error:
        raise ChatTemplateError(str(error)) from error


def _new_sandbox() -> Sandbox:
    sandbox = Sandbox()
    sandbox.add_filter("tojson", _to_json)
    sandbox.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return sandbox


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's templates write it: no HTML escapes."""
    if indent is not None and not (isinstance(indent, int) and 0 <= indent <= 16):
        raise TemplateError(f"tojson: indent must be an integer from 0 to 16, got {indent!r}")
    if separators is not None and len("".join(separators)) > 16:
        raise TemplateError("tojson: separators must be short")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    if re.search(r"%[^A-Za-z%]*\d", format):
        raise TemplateError(f"strftime_now: widths are not supported, got {format!r}")
    return datetime.now().strftime(format)
