"""Convert token ids to text incrementally.

    ids ─ ByteTable ─▶ bytes ─ UTF-8 ─▶ text                           most tokenizers
    ids ─ id_to_token ─▶ tokens ─ step ─ step ─ … ─▶ text              other decoders
    ids ─▶ text, at the end                                            decoders of whole texts

Only text that a later token may still change is held back: the first bytes of a character. The
joined deltas equal ``Tokenizer.decode`` of all ids, and every token is processed once. The steps
follow the tokenizers library (https://github.com/huggingface/tokenizers,
``tokenizers/src/decoders``).
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from codecs import utf_8_decode
from collections.abc import Iterable, Mapping, Sequence, Set
from os.path import commonprefix
from typing import Any

from mie.errors import RequestError
from mie.text.byte_table import ByteTable
from mie.text.library import library_errors
from mie.text.tokenizer import Tokenizer

_CANNOT_DECODE = "the tokenizer cannot decode the tokens"
_MOST_HELD = 3  # bytes of a character without its last one


class Detokenizer:
    """Incremental text of one growing list of token ids.

    Without ``prompt_token_ids`` the deltas join to ``tokenizer.decode(ids, skip_special_tokens)``.
    With them the text continues the prompt: the deltas join to ``decode(prompt + ids)`` without its
    beginning ``decode(prompt)``. A SentencePiece tokenizer then keeps the space before the first
    new word. A character that the prompt begins and new tokens complete counts as new.

    If ``spaces_between_special_tokens`` is false, no space is put between two consecutive added
    tokens, where some decoders put one. As in vLLM, this requires ``skip_special_tokens=False``,
    and the prompt's last token does not count. Special tokens in ``kept_tokens`` are never skipped.

    A decoder that rewrites whole words (CTC, ``</w>`` suffixes) yields its text at the end. If the
    tokenizer's own decoder fails, `RequestError` is raised.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        *,
        spaces_between_special_tokens: bool = True,
        kept_tokens: Sequence[str] = (),
    ) -> None:
        kept = {tokenizer.token_to_id(token) for token in kept_tokens}
        skipped = tokenizer.special_ids - kept if skip_special_tokens else frozenset()
        self._text: _Text
        if tokenizer.byte_table is not None:
            self._text = _Bytes(tokenizer.byte_table, skipped, prompt_token_ids)
        elif (steps := _build_steps(tokenizer)) is not None:
            has_joined = not spaces_between_special_tokens and not skip_special_tokens
            joined = tokenizer.added_tokens if has_joined else {}
            self._text = _Steps(tokenizer, steps, skipped, prompt_token_ids, joined)
        else:
            self._text = _WholeText(tokenizer, skipped, prompt_token_ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that ``token_ids`` settle. It may be empty."""
        return self._text.add(token_ids)

    def finish(self) -> str:
        """Return the rest of the text. Incomplete characters become U+FFFD. Call it once, last."""
        return self._text.finish()

    def pending(self) -> str:
        """Return the text that the next token may still change, as ``finish`` would."""
        return self._text.pending()

    def fork(self) -> Detokenizer:
        """Return an independent copy."""
        fork = copy.copy(self)
        fork._text = self._text.fork()
        return fork


class _Text(ABC):
    """The text of a growing list of token ids."""

    @abstractmethod
    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that ``token_ids`` settle."""

    def finish(self) -> str:
        """Return the text that is held back, because no token follows."""
        return ""

    def pending(self) -> str:
        """Return the text that ``finish`` would return."""
        return ""

    def fork(self) -> _Text:
        """Return an independent copy."""
        return copy.copy(self)


class _Bytes(_Text):
    """Joins the bytes of tokens, and holds back the first bytes of a character."""

    def __init__(self, table: ByteTable, skipped: Set[int], prompt: Sequence[int]) -> None:
        self._table = table
        self._skipped = skipped
        self._num_left = table.num_stripped
        for token_id in prompt:
            if not self._num_left:
                break
            _, self._num_left = table.strip(self._data([token_id]), self._num_left)
        end = b""
        for token_id in reversed(prompt):
            if len(end) >= _MOST_HELD:
                break
            end = self._data([token_id]) + end
        self._held = end[utf_8_decode(end, "replace", False)[1] :]
        self._is_of_prompt = bool(self._held)

    def add(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:  # as in most steps, and twice as fast
            [token_id] = token_ids
            data = b"" if token_id in self._skipped else self._table[token_id]
        else:
            data = self._data(token_ids)
        if self._num_left:
            data, self._num_left = self._table.strip(data, self._num_left)
        if self._held:
            data = self._held + data
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return self._without_prompt(data, text) if self._is_of_prompt else text

    def finish(self) -> str:
        data, self._held = self._held, b""
        text = data.decode("utf-8", "replace")
        return self._without_prompt(data, text) if self._is_of_prompt else text

    def pending(self) -> str:
        return self.fork().finish() if self._held else ""

    def _data(self, token_ids: Sequence[int]) -> bytes:
        table, skipped = self._table, self._skipped
        return b"".join([table[each] for each in token_ids if each not in skipped])

    def _without_prompt(self, data: bytes, text: str) -> str:
        """Return the text that is new, after a character that the prompt began."""
        self._is_of_prompt = not text
        is_broken = text and not data.startswith(text[0].encode())  # no new bytes completed it
        return text[1:] if is_broken else text


class _Steps(_Text):
    """Runs the steps of a decoder. Each step settles its text at once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        steps: Sequence[_Step],
        skipped: Set[int],
        prompt: Sequence[int],
        joined: Mapping[int, str],
    ) -> None:
        self._tokenizer = tokenizer
        self._steps = steps
        self._skipped = skipped
        self._joined: Mapping[int, str] = {}  # added tokens without a space between them
        self._after_joined = False
        self.add(prompt)
        self._joined = joined

    def add(self, token_ids: Sequence[int]) -> str:
        with library_errors(RequestError, _CANNOT_DECODE):
            if self._joined:
                return "".join(map(self._add_one, token_ids))
            return self._run(token_ids)

    def fork(self) -> _Text:
        fork = copy.copy(self)
        fork._steps = [copy.copy(step) for step in self._steps]
        return fork

    def _add_one(self, token_id: int) -> str:
        follows, self._after_joined = self._after_joined, token_id in self._joined
        if follows and self._after_joined:
            return self._joined[token_id]
        return self._run([token_id])

    def _run(self, token_ids: Iterable[int]) -> str:
        spell = self._tokenizer.id_to_token
        tokens = (spell(token_id) for token_id in token_ids if token_id not in self._skipped)
        pieces = [token for token in tokens if token is not None]
        for step in self._steps if pieces else ():
            pieces = step.add(pieces)
        return "".join(pieces)


class _WholeText(_Text):
    """Holds back everything, for decoders with a last word that depends on the whole text."""

    def __init__(self, tokenizer: Tokenizer, skipped: Set[int], prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._token_ids = [*prompt]
        self._prompt_text = self._decoded()

    def add(self, token_ids: Sequence[int]) -> str:
        self._token_ids += token_ids
        return ""

    def finish(self) -> str:
        text = self._decoded()
        return text[len(commonprefix([self._prompt_text, text])) :]  # noqa: RUF071  # of characters

    pending = finish

    def fork(self) -> _Text:
        fork = copy.copy(self)
        fork._token_ids = [*self._token_ids]
        return fork

    def _decoded(self) -> str:
        kept = [token_id for token_id in self._token_ids if token_id not in self._skipped]
        return self._tokenizer.decode(kept, skip_special_tokens=False)


class _Step(ABC):
    """One step of a decoder. It rewrites pieces of text and holds back nothing."""

    @abstractmethod
    def add(self, pieces: list[str]) -> list[str]:
        """Return the text of ``pieces``. They follow the pieces before."""


class _Replace(_Step):
    """Replaces a text in each piece."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def add(self, pieces: list[str]) -> list[str]:
        return [piece.replace(self._old, self._new) for piece in pieces]


class _StripStart(_Step):
    """Removes up to ``count`` characters ``content`` from the start of the whole text."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def add(self, pieces: list[str]) -> list[str]:
        text = "".join(pieces)
        start = 0
        while start < min(self._left, len(text)) and text[start] == self._content:
            start += 1
        self._left = self._left - start if start == len(text) else 0
        return [text[start:]]


class _Continued(_Step):
    """A library decoder that rewrites each token independently, except the first."""

    _BEFORE = "x"  # Comes first, so that no real token does.

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._started = False

    def add(self, pieces: list[str]) -> list[str]:
        return [self._rewritten(piece) for piece in pieces]

    def _rewritten(self, piece: str) -> str:
        if not self._started:
            self._started = True
            return str(self._decoder.decode([piece]))
        return str(self._decoder.decode([self._BEFORE, piece]))[len(self._BEFORE) :]


class _JoinWithSpaces(_Step):
    """Joins tokens with spaces, as the library does for a tokenizer without a decoder."""

    def __init__(self) -> None:
        self._started = False

    def add(self, pieces: list[str]) -> list[str]:
        before = " " if self._started else ""
        self._started = True
        return [before + " ".join(pieces)]


def _build_steps(tokenizer: Tokenizer) -> list[_Step] | None:
    """Return the steps of a tokenizer's decoder, or None if a step needs the whole text."""
    if not tokenizer.decoder_steps:
        return [_JoinWithSpaces()]
    steps: list[_Step] = []
    joined = False  # True from the step that joins all tokens to one piece.
    for spec in tokenizer.decoder_steps:
        if spec["type"] == "Fuse":
            joined = True
            continue
        step = _build_step(spec, joined)
        if step is None:
            return None
        steps.append(step)
    return steps


def _build_step(spec: dict[str, Any], joined: bool) -> _Step | None:
    """Return a step, or None if it needs the whole text."""
    from tokenizers import decoders

    kind = spec["type"]
    if kind == "Replace":
        old, new = spec["pattern"].get("String"), spec["content"]
        return _Replace(old, new) if old and (not joined or len(old) == 1) else None
    if kind == "Strip" and joined and spec["stop"] == 0:
        return _StripStart(spec["content"], spec["start"])
    if joined:
        return None
    if kind == "Metaspace":
        scheme = spec["prepend_scheme"]
        return _Continued(decoders.Metaspace(spec["replacement"], scheme))
    if kind == "WordPiece":
        return _Continued(decoders.WordPiece(spec["prefix"], spec["cleanup"]))
    return None
