"""Convert text to token ids and back with the ``tokenizer.json`` of a model directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.base.files import read_file, read_json_object, without_bom
from mie.checkpoint.gguf import tokenizer as gguf
from mie.checkpoint.gguf.files import gguf_remedy
from mie.checkpoint.gguf.header import GgufHeader, opened
from mie.errors import RequestError, TokenizerError, printable, shown
from mie.text.byte_table import ByteTable
from mie.text.library import built, library_errors, parsed

if TYPE_CHECKING:
    import tokenizers

    from mie.text.partial_tokenizer import PartialTokenizer

FILE_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
LARGEST_FILE = 128 << 20  # bytes; the largest in use have 35 million
LARGEST_CONFIG = 16 << 20  # bytes; it may list thousands of added tokens
_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """The settings in ``tokenizer_config.json``: special tokens, and the templates of a chat."""

    special_tokens: Mapping[str, str] = field(default_factory=dict)  # "eos_token" -> "</s>"
    more_special_tokens: tuple[str, ...] = ()  # special tokens without a name
    add_bos_token: bool = False
    add_eos_token: bool = False
    chat_template: Any = None  # checked where it is used, and so is the response_template
    response_template: Any = None

    @classmethod
    def load(cls, directory: Path | GgufHeader) -> TokenizerConfig:
        """Load the settings in ``directory``, or the defaults if the file does not exist.

        The ``directory`` may be a GGUF file or its header.

        Raises:
            TokenizerError: the file is not a JSON object, or a token in it is not text.
        """
        model = opened(directory)
        if isinstance(model, GgufHeader):
            path, values = model.path, gguf.tokenizer_config(model)
        else:
            path = model / CONFIG_NAME
            if not path.exists():
                return cls()
            values = read_json_object(path, LARGEST_CONFIG, TokenizerError)
        names = [f"{name}_token" for name in _SPECIAL_NAMES]
        tokens = {name: _token_text(values.get(name), name, path) for name in names}
        return cls(
            special_tokens={name: text for name, text in tokens.items() if text is not None},
            more_special_tokens=_more_tokens(values, path),
            add_bos_token=_flag(values, "add_bos_token", path),
            add_eos_token=_flag(values, "add_eos_token", path),
            chat_template=values.get("chat_template"),
            response_template=values.get("response_template"),
        )


def read_text(path: Path, largest: int) -> str:
    """Return the UTF-8 text of the file ``path`` of at most ``largest`` bytes.

    Raises:
        TokenizerError: the file cannot be read, is too large or is not UTF-8.
    """
    try:
        return without_bom(read_file(path, largest)).decode("utf-8")
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path} is not UTF-8 text: {error}") from error


def _token_text(value: object, name: str, path: Path) -> str | None:
    """Return the text of a special token: a string or a serialized token."""
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


def _flag(values: Mapping[str, Any], name: str, path: Path) -> bool:
    """Return a boolean. Some files write it as 0 or 1. An absent boolean is false."""
    value = values.get(name)
    if value in (None, 0, 1):
        return bool(value)
    raise TokenizerError(f"{path}: {name} must be a boolean, got {shown(value)}")


def _more_tokens(values: Mapping[str, Any], path: Path) -> tuple[str, ...]:
    name = "additional_special_tokens"  # called "extra_special_tokens" since transformers 5
    more = values.get(name) or values.get("extra_special_tokens") or []
    if isinstance(more, Mapping):  # a mapping gives the tokens names
        more = list(more.values())
    if not isinstance(more, list):
        raise TokenizerError(f"{path}: {name} must be a list, got a {type(more).__name__}")
    return tuple(text for entry in more if (text := _token_text(entry, name, path)) is not None)


class Tokenizer:
    """A model's tokenizer: ``encode``, ``decode``, and the ids of special tokens.

    Special tokens are added as Hugging Face adds them, by the post-processor in ``tokenizer.json``.
    If it adds none, ``add_bos_token`` and ``add_eos_token`` of ``tokenizer_config.json`` decide.
    ``decode`` follows the tokenizers library, but broken bytes do not destroy the complete
    characters before them. It does not apply ``clean_up_tokenization_spaces``: it would rewrite
    text that a stream has already shown.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer | PartialTokenizer,
        config: TokenizerConfig,
        source: str = FILE_NAME,
        vocab_size: int | None = None,
    ) -> None:
        """Use `load`. Without ``vocab_size`` all tokens are listed to find the largest id."""
        self._backend = backend
        self._vocab_size = vocab_size
        self._source = source
        self._token_texts: dict[int, str] = {}
        self._backend.no_truncation()
        self._backend.no_padding()
        self.config = config
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        self.special_ids = frozenset(
            token_id for token_id, token in self._added_tokens().items() if token.special
        )
        self._prefix, self._suffix = self._ids_around()

    def __repr__(self) -> str:
        return (
            f"Tokenizer({self._source!r}, vocab_size={self.vocab_size},"
            f" bos_token_id={self.bos_token_id}, eos_token_id={self.eos_token_id})"
        )

    @classmethod
    def load(cls, directory: Path | GgufHeader, vocab_size: int | None) -> Tokenizer:
        """Load the tokenizer in ``directory`` and check it against ``vocab_size`` if that is given.

        A model may have more rows than its tokenizer has ids (padding), but never fewer. The
        ``directory`` may be a GGUF file or its header.

        Raises:
            TokenizerError: a file is missing or broken, or an id has no row in the model.
        """
        model = opened(directory)
        if isinstance(model, GgufHeader):
            path = model.path
            backend, num_ids = _of_gguf(model)
        else:
            path, num_ids = model / FILE_NAME, None
            if not path.exists():
                raise TokenizerError(_missing(model))
            backend = parsed(read_text(path, LARGEST_FILE), path)
        tokenizer = cls(backend, TokenizerConfig.load(model), str(path), num_ids)
        if vocab_size is not None and tokenizer.vocab_size > vocab_size:
            raise TokenizerError(
                f"{path} has token id {tokenizer.vocab_size - 1}, but the model's vocab_size is"
                f" {vocab_size} (ids 0 … {vocab_size - 1}): the tokenizer is for another model"
            )
        return tokenizer

    def complete(self) -> None:
        """Make the parts that are otherwise made on demand, so that no request waits for them."""
        from mie.text.partial_tokenizer import PartialTokenizer

        if isinstance(self._backend, PartialTokenizer):
            self._backend = self._backend.whole()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of ``text``, by default with BOS and EOS as the model expects them.

        Raises:
            RequestError: ``text`` is not a string, contains an unpaired surrogate or text that
                the vocabulary cannot spell, or the tokenizer fails.
        """
        _check_text(text)
        with library_errors(RequestError, f"{self._source} cannot encode the prompt"):
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return [*self._prefix, *ids, *self._suffix] if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ``token_ids``. Ids without a token are left out.

        Raises:
            RequestError: an id is negative or does not fit 32 bits, or the tokenizer fails.
        """
        if not token_ids:
            return ""  # The library's Strip panics on an empty list.
        with library_errors(RequestError, f"{self._source} cannot decode the tokens"):
            try:
                text: str = self._backend.decode(list(token_ids), skip_special_tokens)
            except (OverflowError, TypeError) as error:
                raise RequestError(f"token ids must be integers in [0, 2**32): {error}") from error
        if "\ufffd" not in text or self.byte_table is None:
            return text
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return self.byte_table.text(each for each in token_ids if each not in skipped)

    def token_str(self, token_id: int) -> str:
        """Return the text of a single token, also of a special token."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([token_id], skip_special_tokens=False)
            if text:  # ids without a token have no end
                self._token_texts[token_id] = text
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary's spelling of an id (``Ġworld``, ``▁world``), or None."""
        return self._backend.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as the vocabulary spells it, or None if there is none."""
        return self._backend.token_to_id(token)

    @property
    def special_tokens(self) -> dict[str, str]:
        """Special tokens by the names that chat templates use: ``{"eos_token": "</s>", …}``."""
        return dict(self.config.special_tokens)

    @cached_property
    def added_tokens(self) -> Mapping[int, str]:
        """The tokens outside the model's vocabulary, special or not, as ``{id: text}``."""
        return {token_id: token.content for token_id, token in self._added_tokens().items()}

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one: the minimum number of rows of a model."""
        if self._vocab_size is not None:
            return self._vocab_size
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def decoder_steps(self) -> tuple[dict[str, Any], ...]:
        """The flat list of the steps in ``tokenizer.json`` that turn tokens into text."""
        decoder = self._backend.decoder
        return () if decoder is None else tuple(_unnested(json.loads(decoder.__getstate__())))

    @cached_property
    def byte_table(self) -> ByteTable | None:
        """The bytes of each token, or None if the decoder needs more than the bytes of tokens."""
        return ByteTable.of(self.decoder_steps, self._spell)

    def to_json(self) -> str:
        """Return the contents of ``tokenizer.json``."""
        return str(self._backend.to_str())

    def join(self, tokens: list[str]) -> str:
        """Return the text of tokens that are spelled as in the vocabulary."""
        if self._backend.decoder is None:
            return " ".join(tokens)
        with library_errors(RequestError, f"{self._source} cannot decode the tokens"):
            return str(self._backend.decoder.decode(tokens))

    def num_tokens(self, *, with_added_tokens: bool) -> int:
        """Return the number of tokens. It may be less than `vocab_size`."""
        return int(self._backend.get_vocab_size(with_added_tokens=with_added_tokens))

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, including added tokens."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def _added_tokens(self) -> dict[int, Any]:
        return dict(self._backend.get_added_tokens_decoder())

    def _spell(self, token_id: int) -> str | None:
        with library_errors(RequestError, f"{self._source} cannot decode the tokens"):
            return self.id_to_token(token_id)

    def _special_id(self, name: str) -> int | None:
        text = self.config.special_tokens.get(name)
        if text is None:
            return None
        token_id = self._backend.token_to_id(text)
        if token_id is None:
            raise TokenizerError(
                f"{name} in tokenizer_config.json is {text!r}, which {self._source} does not have"
            )
        return token_id

    def _ids_around(self) -> tuple[list[int], list[int]]:
        """Return the ids that ``encode`` adds if the post-processor adds none."""
        if self._backend.num_special_tokens_to_add(False) > 0:
            return [], []
        around: list[list[int]] = []
        for name, is_wanted, token_id in (
            ("bos_token", self.config.add_bos_token, self.bos_token_id),
            ("eos_token", self.config.add_eos_token, self.eos_token_id),
        ):
            if is_wanted and token_id is None:
                where = f"the configuration of {self._source}"
                raise TokenizerError(f"{where} sets add_{name} but names no {name}")
            around.append([token_id] if is_wanted and token_id is not None else [])
        return around[0], around[1]


def encode_bad_words(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the beginning of a text and after a space, as in vLLM.

    The second spelling is left out if it ends with the first one, because a search for the first
    finds it. vLLM also leaves it out if the two have different lengths, and so misses many words.

    Raises:
        RequestError: a word is not valid Unicode, or the tokenizer has no tokens for it.
    """
    spelled: list[tuple[int, ...]] = []
    for word in words:
        plain = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        if not plain:
            raise RequestError(f"the tokenizer has no tokens for the bad word {word!r}")
        spelled.append(tuple(plain))
        if spaced[-len(plain) :] != plain:
            spelled.append(tuple(spaced))
    return tuple(spelled)


def _of_gguf(header: GgufHeader) -> tuple[tokenizers.Tokenizer | PartialTokenizer, int]:
    """Return the tokenizer of a GGUF file and its number of ids, from the cache if possible."""
    # `mie --help` does not need NumPy.
    from mie.checkpoint.gguf import kept_vocabulary as cache
    from mie.text.partial_tokenizer import PartialTokenizer

    name = gguf.vocabulary_digest(header)
    found = None if name is None else cache.kept_vocabulary(name)
    if found is None:
        found = gguf.vocabulary(header)
        if len(found.ids) < cache.MIN_PIECES:
            return built(found.all_parts(), header.path), found.num_ids
        if name is not None:
            cache.keep_vocabulary(name, found)
    return PartialTokenizer(found, header.path), found.num_ids


def _missing(directory: Path) -> str:
    message = f"no {FILE_NAME} in {directory}"
    if (directory / "tokenizer.model").is_file():
        return (
            f"{message}: tokenizer.model alone is not supported (save the model's fast tokenizer"
            " with transformers' save_pretrained to get one)"
        )
    return f"{message}: is it a model directory in Hugging Face format?{gguf_remedy(directory)}"


def _unnested(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for outer in step["decoders"] for inner in _unnested(outer)]


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"a prompt must be a string, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt has an unpaired surrogate, U+{ord(text[error.start]):04X}, at"
            f" character {error.start}: it is not valid Unicode (read with the wrong encoding?)"
        ) from error
