"""Read special tokens, BOS and EOS rules and the chat template from ``tokenizer_config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mie.errors import TokenizerError
from mie.system.files import read_file
from mie.system.json_files import read_json_object
from mie.text.printable import printable

FILE_NAME = "tokenizer_config.json"
LARGEST_CONFIG = 16 << 20  # Bytes. It may list thousands of added tokens.
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
    """Settings of a tokenizer that its ``tokenizer.json`` does not contain."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "eos_token" -> "</s>"
    more_special_tokens: tuple[str, ...] = ()  # Special tokens without a name.
    add_bos_token: bool = False
    add_eos_token: bool = False
    chat_template: Any = (
        None  # a string, or a list of {"name", "template"}; checked where it is used
    )
    response_template: Any = None  # How answers are read. Checked where it is used.

    @classmethod
    def load(cls, directory: Path) -> TokenizerConfig:
        """Load the settings in ``directory``, or the defaults if the file does not exist.

        Raises:
            TokenizerError: the file is not a JSON object, or a token in it is not text.
        """
        path = directory / FILE_NAME
        if not path.exists():
            return cls()
        values = read_json_object(path, LARGEST_CONFIG, TokenizerError)
        tokens = {name: _token_text(values.get(name), name, path) for name in _SPECIAL_NAMES}
        return cls(
            special_tokens={name: text for name, text in tokens.items() if text is not None},
            more_special_tokens=_more_tokens(values, path),
            add_bos_token=values.get("add_bos_token") is True,
            add_eos_token=values.get("add_eos_token") is True,
            chat_template=values.get("chat_template"),
            response_template=values.get("response_template"),
        )


def read_text(path: Path, largest: int) -> str:
    """Return the UTF-8 text of the file ``path``, which may have at most ``largest`` bytes.

    Raises:
        TokenizerError: the file cannot be read, is too large or is not UTF-8.
    """
    try:
        return read_file(path, largest).decode("utf-8")
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text: {error}") from error


def _token_text(value: object, name: str, path: Path) -> str | None:
    """Return the text of a special token, which is a string or a serialized token."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if isinstance(value, str):
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"{path}: {name} has an unpaired surrogate: {value!a}") from error
    if value is None or isinstance(value, str):
        return value
    raise TokenizerError(f"{path}: {name} must be a string, got {printable(repr(value))}")


def _more_tokens(values: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    name = "additional_special_tokens"  # called "extra_special_tokens" since transformers 5
    more = values.get(name) or values.get("extra_special_tokens") or []
    if isinstance(more, Mapping):  # named ones
        more = list(more.values())
    if not isinstance(more, list):
        raise TokenizerError(f"{path}: {name} must be a list, got a {type(more).__name__}")
    return tuple(text for entry in more if (text := _token_text(entry, name, path)) is not None)
