"""Find the chat templates of a model, and the templates of a command line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from mie.errors import ChatTemplateError, TokenizerError
from mie.text.tokenizer import CONFIG_NAME, TokenizerConfig, read_text

TEMPLATE_FILE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
_LARGEST_FILE = 1 << 20  # most bytes of a template's file


class TemplateFiles:
    """The chat templates of a directory or GGUF file (``directory``), by name.

    The template ``default`` is in ``chat_template.jinja``. Any template may be in
    ``tokenizer_config.json`` under ``chat_template`` (one template, or a list of named ones), or in
    ``additional_chat_templates/NAME.jinja``. The first of these places that has it is used.
    """

    def __init__(self, directory: Path, config: TokenizerConfig | None = None) -> None:
        """Set the directory. A ``config`` that was loaded from it is not read again."""
        self._directory = directory
        self._given = config

    @cached_property
    def _config(self) -> TokenizerConfig:
        return self._given or TokenizerConfig.load(self._directory)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens that templates can use by name: ``{"eos_token": "</s>", …}``."""
        return dict(self._config.special_tokens)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all templates."""
        own = ["default"] if (self._directory / TEMPLATE_FILE).is_file() else []
        more = sorted(path.stem for path in (self._directory / MORE_TEMPLATES).glob("*.jinja"))
        return tuple(dict.fromkeys([*own, *self._in_config(), *more]))

    def read(self, name: str = "default") -> tuple[str, str]:
        """Return the template called ``name``, and where it was found.

        Raises:
            ChatTemplateError: there is no template of that name, or it cannot be read.
            TokenizerError: ``tokenizer_config.json`` is broken.
        """
        path = self._directory / TEMPLATE_FILE
        if name == "default" and path.is_file():
            return _read_template(path), str(path)
        named = self._in_config()
        if name in named:
            return named[name], f"chat_template in {self._directory / CONFIG_NAME}"
        if name in self.names:
            path = self._directory / MORE_TEMPLATES / f"{name}.jinja"
            return _read_template(path), str(path)
        raise ChatTemplateError(_no_template(self._directory, name, self.names))

    def _in_config(self) -> dict[str, str]:
        """Return the templates in ``tokenizer_config.json``. A template without a name is the
        default."""
        templates = self._config.chat_template
        if templates is None:
            return {}
        if isinstance(templates, str):
            return {"default": templates}
        entries = templates if isinstance(templates, list) else [templates]
        named = {
            str(entry["name"]): entry["template"]
            for entry in entries
            if isinstance(entry, dict) and {"name", "template"} <= entry.keys()
        }
        if len(named) < len(entries) or not all(isinstance(text, str) for text in named.values()):
            raise TokenizerError(
                f"{self._directory / CONFIG_NAME}: chat_template must be a string, or a"
                ' list of {"name": …, "template": …} objects with different names'
            )
        return named


def template_given(given: str | None) -> str | None:
    """Return the chat template that a command line gives.

    ``given`` is a file, the text of a template, or the name of one of the model's templates.

    Raises:
        ChatTemplateError: the file cannot be read.
    """
    if given is None or is_template(given) or not Path(given).is_file():
        return given
    return _read_template(Path(given))


def is_template(text: object) -> bool:
    """Return whether a text may be a template, since no name has such characters."""
    return not isinstance(text, str) or "{" in text or "\n" in text


_REMEDY = (
    "give one (--chat-template FILE with mie run, chat, generate or serve; chat_template=… in "
    "Python), or complete plain prompts (mie generate)"
)


def _no_template(directory: Path, name: str, others: Sequence[str]) -> str:
    if directory.is_file():
        return (
            f"no chat template{'' if name == 'default' else f' {name!r}'} in the metadata of"
            f" {directory}; {_REMEDY}"
        )
    tried = f"{TEMPLATE_FILE}, tokenizer_config.json, {MORE_TEMPLATES}/{name}.jinja"
    known = f" (there are others: {', '.join(sorted(others))})" if others else ""
    which = "no chat template" if name == "default" else f"no chat template {name!r}"
    return (
        f"{which} in {directory}: tried {tried}{known}. Put a jinja2 template into"
        f" {directory / TEMPLATE_FILE}, {_REMEDY}"
    )


def _read_template(path: Path) -> str:
    try:
        return read_text(path, _LARGEST_FILE)
    except TokenizerError as error:
        raise ChatTemplateError(str(error)) from error
