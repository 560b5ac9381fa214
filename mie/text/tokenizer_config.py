"""What ``tokenizer_config.json`` says: special tokens, BOS and EOS rules, the chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mie.errors import TokenizerError

FILE_NAME = "tokenizer_config.json"
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The settings of a tokenizer that its ``tokenizer.json`` does not hold."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "eos_token" -> "</s>"
    add_bos_token: bool = False
    add_eos_token: bool = False
    chat_template: Any = (
        None  # a string, or a list of {"name", "template"}; checked where it is used
    )

    @classmethod
    def load(cls, directory: Path) -> TokenizerConfig:
        """The settings in ``directory``, or the defaults when it has no ``tokenizer_config.json``.

        Raises:
            TokenizerError: the file is not a JSON object, or a token in it is not text.
        """
        path = directory / FILE_NAME
        if not path.exists():
            return cls()
        values = read_json_object(path)
        tokens = {name: _token_text(values.get(name), name, path) for name in _SPECIAL_NAMES}
        return cls(
            special_tokens={name: text for name, text in tokens.items() if text is not None},
            add_bos_token=values.get("add_bos_token") is True,
            add_eos_token=values.get("add_eos_token") is True,
            chat_template=values.get("chat_template"),
        )


def read_text(path: Path) -> str:
    """The UTF-8 text of ``path``.

    Raises:
        TokenizerError: the file cannot be read or is not UTF-8; the message names it.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        TokenizerError: the file cannot be read or holds something else; the message names it.
    """
    try:
        values = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # not JSON, or nested too deeply
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise TokenizerError(f"{path} must hold a JSON object, got a {type(values).__name__}")
    return values


def _token_text(value: object, name: str, path: Path) -> str | None:
    """A special token's text, which Hugging Face writes as a string or as a serialised token."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value
    raise TokenizerError(f"{path}: {name} must be a string, got {value!r}")
