"""Convert token ids to text incrementally.

    ids ─ id_to_token ─▶ tokens ─ step ─ step ─ … ─▶ text that no later token can change

A tokenizer's decoder is a list of steps. A small state machine for each step emits settled text and
holds back the text that a later token may still change: the first bytes of a character, or a run of
byte tokens (``ByteFallback``). The joined deltas therefore equal ``Tokenizer.decode`` of all ids,
and every token is processed once. The steps are those of the tokenizers library
(https://github.com/huggingface/tokenizers, ``tokenizers/src/decoders``).
"""

from __future__ import annotations

import copy
import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from mie.errors import RequestError
from mie.text.tokenizer import Tokenizer, library_errors

BYTE_TOKEN = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")
_CANNOT_DECODE = "the tokenizer cannot decode the tokens"


class Detokenizer:
    """Incremental text of one growing list of token ids.

    Without ``prompt_token_ids`` the deltas join to ``tokenizer.decode(ids, skip_special_tokens)``.
    With them the text continues the prompt: the deltas join to ``decode(prompt + ids)`` without its
    beginning ``decode(prompt)``. A SentencePiece tokenizer then keeps the space before the first
    new word. A character that the prompt begins and new tokens complete counts as new.

    If ``spaces_between_special_tokens`` is false, no space is put between two consecutive added
    tokens, where some decoders put one. As in vLLM, this requires ``skip_special_tokens=False``,
    and the prompt's last token does not count. Special tokens in ``kept_tokens`` are never skipped.

    A decoder that rewrites whole words (CTC, ``</w>`` suffixes) yields its text at the end. A
    tokenizer whose own decoder fails raises `RequestError`.
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
        self._tokenizer = tokenizer
        kept = {tokenizer.token_to_id(token) for token in kept_tokens}
        self._skipped = tokenizer.special_ids - kept if skip_special_tokens else frozenset()
        self._steps = _build_steps(tokenizer, skip_special_tokens)
        self._joined: Mapping[int, str] = {}  # Added tokens without a space between them.
        self._after_joined = False
        self.add(prompt_token_ids)
        for step in self._steps:
            step.end_prompt()
        if not spaces_between_special_tokens and not skip_special_tokens:
            self._joined = tokenizer.added_tokens

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that ``token_ids`` settle, which is often empty."""
        with library_errors(RequestError, _CANNOT_DECODE):
            if isinstance(self._steps[0], _WholeText):
                return self._steps[0].hold(token_ids)
            if self._joined:
                return "".join(map(self._add_one, token_ids))
            return "".join(_run(self._steps, self._tokens(token_ids)))

    def finish(self) -> str:
        """Return the rest of the text. Incomplete characters become U+FFFD. Call it once, last."""
        with library_errors(RequestError, _CANNOT_DECODE):
            return "".join(_run(self._steps, [], is_last=True))

    def pending(self) -> str:
        """Return the text that the next token may still change, as ``finish`` would."""
        if not any(step.held for step in self._steps):
            return ""
        return self.fork().finish()

    def fork(self) -> Detokenizer:
        """Return an independent copy."""
        fork = copy.copy(self)
        fork._steps = [step.fork() for step in self._steps]
        return fork

    def _add_one(self, token_id: int) -> str:
        follows, self._after_joined = self._after_joined, token_id in self._joined
        if follows and self._after_joined and not any(step.held for step in self._steps):
            return self._joined[token_id]
        return "".join(_run(self._steps, self._tokens([token_id])))

    def _tokens(self, token_ids: Iterable[int]) -> list[str]:
        spell = self._tokenizer.id_to_token
        tokens = (spell(token_id) for token_id in token_ids if token_id not in self._skipped)
        return [token for token in tokens if token is not None]


class _Step:
    """One step of a decoder, which turns tokens into settled pieces of text."""

    held = False
    """Whether anything is held back."""

    def add(self, pieces: list[str]) -> list[str]:
        """Return the pieces that are settled after ``pieces``."""
        raise NotImplementedError

    def rest(self) -> list[str]:
        """Return the held-back pieces, because no token follows."""
        return []

    def end_prompt(self) -> None:
        """Mark everything so far, including held-back bytes, as part of the prompt."""

    def take_prompt(self) -> list[str]:
        """Return and clear the prompt's pieces that have settled since the last call."""
        return []

    def fork(self) -> _Step:
        """Return an independent copy."""
        return copy.copy(self)


def _run(steps: Sequence[_Step], pieces: list[str], is_last: bool = False) -> list[str]:
    for number, step in enumerate(steps, start=1):
        if not pieces and not is_last:
            break
        pieces = step.add(pieces)
        if is_last:
            pieces = pieces + step.rest()
        prompt = step.take_prompt()
        if prompt:  # Later steps see it, but it gives no new text.
            _run(steps[number:], prompt)
            for later in steps[number:]:
                later.end_prompt()
    return pieces


class _PerToken(_Step):
    """A step that rewrites each token independently and holds back nothing."""

    def __init__(self, rewrite: Callable[[list[str]], list[str]]) -> None:
        self._rewrite = rewrite

    def add(self, pieces: list[str]) -> list[str]:
        return self._rewrite(pieces)


class _HoldsBytes(_Step):
    """A step that holds back bytes, the first of which may belong to the prompt."""

    def __init__(self) -> None:
        self._bytes = b""
        self._prompt_bytes = 0  # How many held bytes belong to the prompt.
        self._prompt_pieces: list[str] = []

    @property
    def held(self) -> bool:  # type: ignore[override]  # a constant in the other steps
        return bool(self._bytes)

    def end_prompt(self) -> None:
        self._prompt_bytes = len(self._bytes)

    def take_prompt(self) -> list[str]:
        pieces, self._prompt_pieces = self._prompt_pieces, []
        return pieces


class _ByteLevel(_HoldsBytes):
    """Decodes GPT-2's byte letters and holds back the first bytes of a character."""

    def add(self, pieces: list[str]) -> list[str]:
        data = self._bytes + b"".join(map(letters_to_bytes, pieces))
        return self._settle(data, *utf_8_decode(data, "replace", False))

    def rest(self) -> list[str]:
        return self._settle(self._bytes, self._bytes.decode("utf-8", "replace"), len(self._bytes))

    def _settle(self, data: bytes, text: str, used: int) -> list[str]:
        self._bytes = data[used:]
        if not text:
            return []
        if self._prompt_bytes and not data.startswith(text[0].encode()):
            self._prompt_pieces = [text[0]]  # U+FFFD: no new bytes completed the character
            text = text[1:]
        self._prompt_bytes = 0
        return [text]


class _ByteFallback(_HoldsBytes):
    """Decodes SentencePiece's ``<0xE2>`` tokens and holds back a run of them.

    A run of valid UTF-8 becomes its text. In any other run every byte becomes U+FFFD, even bytes of
    valid characters, so nothing is settled before the run ends.
    """

    def add(self, pieces: list[str]) -> list[str]:
        settled: list[str] = []
        run = bytearray(self._bytes)
        for piece in pieces:
            byte = BYTE_TOKEN.fullmatch(piece)
            if byte:
                run.append(int(byte[1], 16))
                continue
            settled += self._settle(run)
            run.clear()
            settled.append(piece)
        self._bytes = bytes(run)
        return settled

    def rest(self) -> list[str]:
        run, self._bytes = self._bytes, b""
        return self._settle(run)

    def _settle(self, run: bytes | bytearray) -> list[str]:
        """Return the text of a complete run, without the characters that end in the prompt."""
        prompt, self._prompt_bytes = self._prompt_bytes, 0
        try:
            text = run.decode("utf-8")
        except UnicodeDecodeError:
            pieces = ["\ufffd"] * len(run)
            self._prompt_pieces += pieces[:prompt]
            return pieces[prompt:]
        old = len(run[:prompt].decode("utf-8", "ignore"))
        self._prompt_pieces += [text[:old]] if old else []
        return [text[old:]] if len(text) > old else []


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
        if not pieces:
            return []
        before = " " if self._started else ""
        self._started = True
        return [before + " ".join(pieces)]


class _WholeText(_Step):
    """Holds back everything, for decoders whose last word depends on the whole text."""

    held = True

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._prompt_text = ""
        self._token_ids: list[int] = []

    def hold(self, token_ids: Sequence[int]) -> str:
        """Store ``token_ids`` and return an empty text."""
        self._token_ids += token_ids
        return ""

    def add(self, pieces: list[str]) -> list[str]:
        return pieces

    def rest(self) -> list[str]:
        text = self._decoded()
        return [text[len(commonprefix([self._prompt_text, text])) :]]  # noqa: RUF071  # of characters

    def end_prompt(self) -> None:
        self._prompt_text = self._decoded()

    def fork(self) -> _Step:
        fork = copy.copy(self)
        fork._token_ids = [*self._token_ids]
        return fork

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._token_ids, self._skip_special_tokens)


def _build_steps(tokenizer: Tokenizer, skip_special_tokens: bool) -> list[_Step]:
    """Return the machines for a tokenizer's decoder, or one that waits for the whole text."""
    if not tokenizer.decoder_steps:
        return [_JoinWithSpaces()]
    steps: list[_Step] = []
    joined = False  # True from the step that joins all tokens to one piece.
    for spec in tokenizer.decoder_steps:
        kind = spec["type"]
        step = None if kind == "Fuse" else _build_step(spec, joined)
        if step is None and kind != "Fuse":
            return [_WholeText(tokenizer, skip_special_tokens)]
        joined = joined or kind in ("Fuse", "ByteLevel")
        steps += [step] if step else []
    return steps


def _build_step(spec: dict[str, Any], joined: bool) -> _Step | None:
    """Return the machine for one step, or None if the step needs the whole text."""
    from tokenizers import decoders

    kind = spec["type"]
    if kind == "Replace":
        return _replace(spec["pattern"].get("String"), spec["content"], joined)
    if kind == "Strip" and joined and spec["stop"] == 0:
        return _StripStart(spec["content"], spec["start"])
    if joined:
        return None
    if kind == "ByteLevel":
        return _ByteLevel()
    if kind == "ByteFallback":
        return _ByteFallback()
    if kind == "Metaspace":
        scheme = spec["prepend_scheme"]
        return _Continued(decoders.Metaspace(spec["replacement"], scheme))
    if kind == "WordPiece":
        return _Continued(decoders.WordPiece(spec["prefix"], spec["cleanup"]))
    return None


def _replace(old: str | None, new: str, joined: bool) -> _Step | None:
    """Return a step that replaces ``old``, or None for a regular expression or a joined text."""
    if not old or (joined and len(old) > 1):
        return None
    return _PerToken(lambda pieces: [piece.replace(old, new) for piece in pieces])


def letters_to_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token. Plain text in an added token is encoded as it is."""
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode("utf-8")


def _letter_table() -> dict[str, int]:
    """Return GPT-2's table: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _letter_table()
