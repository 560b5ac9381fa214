"""Convert text to token ids and back with the ``tokenizer.json`` of a model directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mie.errors import MieError, RequestError, TokenizerError
from mie.system.interrupts import is_of_the_request
from mie.text.printable import printable
from mie.text.tokenizer_checks import check_model, checked_tokenizer
from mie.text.tokenizer_config import TokenizerConfig, read_text

if TYPE_CHECKING:
    import tokenizers

FILE_NAME = "tokenizer.json"
_PROBE = "A 1 é\u0301 猫 ▁🦄\n"  # a component that panics does so with any text
LARGEST_FILE = 128 << 20  # Bytes; the largest in use have 35 million.


class Tokenizer:
    """A model's tokenizer: ``encode``, ``decode``, and the ids of special tokens.

    Special tokens are added as Hugging Face adds them, by the post-processor in ``tokenizer.json``.
    If it adds none, ``add_bos_token`` and ``add_eos_token`` of ``tokenizer_config.json`` decide.
    ``decode`` does what the tokenizers library does. It does not apply
    ``clean_up_tokenization_spaces``, which would rewrite text that a stream has already shown.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, config: TokenizerConfig, source: str = FILE_NAME
    ) -> None:
        self._backend = backend
        self._source = source
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
    def load(cls, directory: Path, vocab_size: int | None) -> Tokenizer:
        """Load the tokenizer in ``directory`` and check it against ``vocab_size`` if that is given.

        A model may have more rows than its tokenizer has ids (padding), but never fewer.

        Raises:
            TokenizerError: a file is missing or broken, or an id has no row in the model.
        """
        path = directory / FILE_NAME
        if not path.exists():
            raise TokenizerError(_missing(directory))
        tokenizer = cls(_parse(path), TokenizerConfig.load(directory), str(path))
        if vocab_size is not None:
            tokenizer._check_vocabulary(vocab_size)
        return tokenizer

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
                return self._backend.decode(list(token_ids), skip_special_tokens)
            except (OverflowError, TypeError) as error:
                raise RequestError(f"token ids must be integers in [0, 2**32): {error}") from error

    def token_str(self, token_id: int) -> str:
        """Return the text of a single token, including a special one, for log-probabilities."""
        return self.decode([token_id], skip_special_tokens=False)

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
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def decoder_steps(self) -> tuple[dict[str, Any], ...]:
        """The flat list of decoder steps in ``tokenizer.json``, which turn tokens into text."""
        decoder = self._backend.decoder
        return () if decoder is None else tuple(_unnested(json.loads(decoder.__getstate__())))

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
        """Return the number of tokens, which may be less than `vocab_size`."""
        return int(self._backend.get_vocab_size(with_added_tokens=with_added_tokens))

    def vocabulary(self) -> dict[str, int]:
        """Return the id of every token, including added tokens."""
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def _added_tokens(self) -> dict[int, Any]:
        return dict(self._backend.get_added_tokens_decoder())

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
        bos = self._wanted(self.config.add_bos_token, "bos_token", self.bos_token_id)
        eos = self._wanted(self.config.add_eos_token, "eos_token", self.eos_token_id)
        return bos, eos

    def _wanted(self, wanted: bool, name: str, token_id: int | None) -> list[int]:
        if wanted and token_id is None:
            raise TokenizerError(f"tokenizer_config.json sets add_{name} but names no {name}")
        return [token_id] if wanted and token_id is not None else []

    def _check_vocabulary(self, vocab_size: int) -> None:
        if self.vocab_size > vocab_size:
            raise TokenizerError(
                f"{self._source} has token id {self.vocab_size - 1}, but the model's vocab_size is"
                f" {vocab_size} (ids 0 … {vocab_size - 1}): the tokenizer is for another model"
            )


@contextmanager
def library_errors(kind: type[MieError], what: str) -> Iterator[None]:
    """Convert any exception of the tokenizers library to ``kind``."""
    try:
        yield
    except BaseException as error:
        if not is_library_error(error):
            raise
        raise kind(f"{what}: {printable(str(error))}") from error


def is_library_error(error: BaseException) -> bool:
    """Return whether the tokenizers library raised ``error``, rather than the user or mie."""
    is_panic = type(error).__name__ == "PanicException"
    is_ours = isinstance(error, MieError) or not isinstance(error, Exception)
    return is_panic or (not is_ours and is_of_the_request(error))


def _parse(path: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    text = read_text(path, LARGEST_FILE)
    text = checked_tokenizer(text, str(path))
    with library_errors(TokenizerError, f"{path} is not a tokenizer"):
        backend = Backend.from_str(text)
        check_model(backend.model, str(path))
        try:
            backend.encode(_PROBE)
        except Exception:  # the vocabulary has no token for unknown text
            return backend
        return backend


def _missing(directory: Path) -> str:
    message = f"no {FILE_NAME} in {directory}"
    if (directory / "tokenizer.model").is_file():
        return (
            f"{message}: tokenizer.model alone is not supported (save the model's fast tokenizer"
            " with transformers' save_pretrained to get one)"
        )
    return f"{message}: is it a model directory in Hugging Face format?"


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
