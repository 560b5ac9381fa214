"""Make the parts of a kept tokenizer that a text needs.

The tokenizers library takes a second for a large vocabulary, before the first text. But the tokens
of a text depend on few pieces: a BPE looks up pieces that are parts of the text, and merges whose
results are. So a short text gets a tokenizer of the library with these pieces and merges alone. It
gives the tokens that the whole one gives. The whole one is made when a caller needs more.
"""

from __future__ import annotations

import threading
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mie.checkpoint.gguf.kept_vocabulary import KeptVocabulary
from mie.text.library import built

if TYPE_CHECKING:
    import tokenizers

MAX_PARTS = 1 << 15
"""The most parts of a text that are looked up. The whole tokenizer encodes a longer text."""
MAX_TEXTS = 32
"""After so many texts, the whole tokenizer is made."""
SPACE = "▁"


class AddedToken(NamedTuple):
    """An added token of the vocabulary."""

    content: str
    special: bool


class PartialTokenizer:
    """A tokenizer of the library, made as far as it is needed. It has the same methods."""

    def __init__(self, kept: KeptVocabulary, path: Path) -> None:
        """Set the vocabulary. ``path`` is for messages."""
        self._kept, self._path = kept, path
        self._lock = threading.Lock()
        self._num_texts = 0
        self._whole: tokenizers.Tokenizer | None = None
        self._added = kept.parts["added_tokens"]

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the whole tokenizer."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.whole(), name)

    def whole(self) -> tokenizers.Tokenizer:
        """Return the tokenizer with all pieces. The first call takes a second if they are many."""
        with self._lock:
            if self._whole is None:
                self._whole = built(self._kept.all_parts(), self._path)
            return self._whole

    def no_truncation(self) -> None:
        """Do nothing, because it never truncates."""

    def no_padding(self) -> None:
        """Do nothing, because it never pads."""

    @property
    def decoder(self) -> Any:
        """The decoder. It needs no piece."""
        return self._made([]).decoder

    def num_special_tokens_to_add(self, is_pair: bool) -> int:
        """Return the number of tokens that the post-processor adds. GGUF files have none."""
        return int(self._made([]).num_special_tokens_to_add(is_pair))

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Return the added tokens by id."""
        return {each["id"]: AddedToken(each["content"], each["special"]) for each in self._added}

    def encode(self, text: str, add_special_tokens: bool = True) -> Any:
        """Return the library's encoding of a text."""
        parts = self._parts(text)
        if parts is None:
            return self.whole().encode(text, add_special_tokens=add_special_tokens)
        added = [each for each in self._added if each["content"] in text]
        return self._made(parts, added).encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        if self._is_used_often():
            return str(self.whole().decode(ids, skip_special_tokens))
        texts = {text for each in ids if (text := self.id_to_token(each)) is not None}
        added = [each for each in self._added if each["content"] in texts]
        return str(self._made(texts, added).decode(ids, skip_special_tokens))

    def id_to_token(self, token_id: int) -> str | None:
        """Return the piece of an id, or None.

        Raises:
            OverflowError: the id is negative, or does not fit 32 bits.
        """
        if not 0 <= token_id < 1 << 32:
            raise OverflowError("out of range of 32 bits")
        return self._kept.piece_of(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a piece, or None."""
        return self._kept.id_of(token)

    def _is_used_often(self) -> bool:
        self._num_texts += 1
        return self._whole is not None or self._num_texts > MAX_TEXTS

    def _made(self, texts: Iterable[str], added: Sequence[Any] = ()) -> tokenizers.Tokenizer:
        return built(self._kept.parts_of(texts, added), self._path)

    def _parts(self, text: str) -> Iterator[str] | None:
        """Yield all parts of a normal text that can be pieces. None: take the whole tokenizer.

        A word is a part of this text. An added token may begin a word anywhere.
        """
        if self._is_used_often():
            return None
        found = spelled(text, self._kept.parts)
        longest = self._kept.longest
        if found is None or len(found[0]) * longest > MAX_PARTS:
            return None
        return all_parts(*found, longest)


def spelled(text: str, parts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return a text with all words of a text as parts, and the beginnings of words. Or None.

    Only the normalizers and the pre-tokenizers of `mie.checkpoint.gguf.tokenizer` are covered.
    """
    from tokenizers import pre_tokenizers

    normalizer = parts["normalizer"]
    if parts["pre_tokenizer"] is None:  # SentencePiece
        prefixes = [each for each in normalizer["normalizers"] if each["type"] == "Prepend"]
        return text.replace(" ", SPACE), "".join(each["prepend"] for each in prefixes)
    if normalizer is not None:
        is_normal = normalizer == {"type": "NFC"} and unicodedata.is_normalized("NFC", text)
        if not is_normal:
            return None
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(word for word, _ in words.pre_tokenize_str(text)), ""


def all_parts(text: str, prefix: str, longest: int) -> Iterator[str]:
    """Yield all parts of a text of at most so many characters, also with the prefix before them."""
    for start in range(len(text)):
        for stop in range(start + 1, min(len(text), start + longest) + 1):
            yield text[start:stop]
            if prefix:
                yield prefix + text[start:stop]
    yield prefix
