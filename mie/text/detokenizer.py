"""Token ids to text, piece by piece.

    ids ─ id_to_token ─▶ tokens ─ step ─ step ─ … ─▶ text that no later token can change

A tokenizer's decoder is a list of steps. Each is followed here by a small machine that passes on
what is settled and holds back what a later token may still change: the first bytes of a character,
or (``ByteFallback``) a run of byte tokens, whose text depends on the whole run. So the join of all
deltas equals ``Tokenizer.decode`` of all ids, and every token is looked at once. The steps are
those of https://github.com/huggingface/tokenizers, ``tokenizers/src/decoders``.
"""

from __future__ import annotations

import copy
import re
from codecs import utf_8_decode
from collections.abc import Callable, Iterable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from mie.errors import RequestError
from mie.text.printable import printable
from mie.text.tokenizer import Tokenizer, is_library_error


class Detokenizer:
    """The text of one growing list of token ids.

    Without ``prompt_token_ids`` the deltas join to ``tokenizer.decode(ids, skip_special_tokens)``.
    With them the text continues the prompt's: the deltas join to what ``decode(prompt + ids)`` adds
    to ``decode(prompt)``. So a SentencePiece tokenizer keeps the space before the first new word. A
    character whose first bytes are the prompt's and whose last bytes are new is new.

    With ``spaces_between_special_tokens`` false, an added token that follows another one is spelled
    without the space that some decoders put before it. Like vLLM's setting of that name, this needs
    ``skip_special_tokens=False``, and the prompt's last token does not count.

    A decoder that rewrites whole words at once (CTC, ``</w>`` suffixes) yields its text at the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        *,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._steps = _build_steps(tokenizer, skip_special_tokens)
        self._joined: Mapping[int, str] = {}  # added tokens that get no space between them
        self._after_joined = False
        self.add(prompt_token_ids)
        for step in self._steps:
            step.end_prompt()
        if not spaces_between_special_tokens and not skip_special_tokens:
            self._joined = tokenizer.added_tokens

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that ``token_ids`` settle: never half a character, often nothing.

        Raises:
            RequestError: the tokenizer's own decoder fails.
        """
        try:
            if isinstance(self._steps[0], _WholeText):
                return self._steps[0].hold(token_ids)
            if self._joined:
                return "".join(map(self._add_one, token_ids))
            return "".join(_run(self._steps, self._tokens(token_ids)))
        except BaseException as error:
            if is_library_error(error):
                raise RequestError(_cannot_decode(error)) from error
            raise

    def finish(self) -> str:
        """Return the rest of the text; bytes that nothing completed become U+FFFD. Call it once,
        last.

        Raises:
            RequestError: the tokenizer's own decoder fails.
        """
        try:
            return "".join(_run(self._steps, [], is_last=True))
        except BaseException as error:
            if is_library_error(error):
                raise RequestError(_cannot_decode(error)) from error
            raise

    def pending(self) -> str:
        """Return what ``finish`` would give now: text that the next token may still change."""
        if not any(step.held for step in self._steps):
            return ""
        return self.fork().finish()

    def fork(self) -> Detokenizer:
        """Return a copy that goes its own way from here."""
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
    """One step of a decoder: tokens in, settled pieces of text out."""

    held = False
    """Whether anything is held back."""

    def add(self, pieces: list[str]) -> list[str]:
        """Return what ``pieces`` settle."""
        raise NotImplementedError

    def rest(self) -> list[str]:
        """Return what is held back, settled because nothing follows."""
        return []

    def end_prompt(self) -> None:
        """Everything so far is the prompt's: what is held back of it is no new text."""

    def take_prompt(self) -> list[str]:
        """Pieces of the prompt that settled since the last call, before all others."""
        return []

    def fork(self) -> _Step:
        """Return a copy that goes its own way from here."""
        return copy.copy(self)


def _run(steps: Sequence[_Step], pieces: list[str], is_last: bool = False) -> list[str]:
    for number, step in enumerate(steps, start=1):
        if not pieces and not is_last:
            break
        pieces = step.add(pieces)
        if is_last:
            pieces = pieces + step.rest()
        prompt = step.take_prompt()
        if prompt:  # later steps see it, and what they make of it is no new text
            _run(steps[number:], prompt)
            for later in steps[number:]:
                later.end_prompt()
    return pieces


class _PerToken(_Step):
    """A step that rewrites each token by itself: it holds back nothing."""

    def __init__(self, rewrite: Callable[[list[str]], list[str]]) -> None:
        self._rewrite = rewrite

    def add(self, pieces: list[str]) -> list[str]:
        return self._rewrite(pieces)


class _HoldsBytes(_Step):
    """A step that holds back bytes, of which the first may be the prompt's."""

    def __init__(self) -> None:
        self._bytes = b""
        self._prompt_bytes = 0  # how many of them are the prompt's
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
    """GPT-2's bytes spelled as letters: holds back the first bytes of a character."""

    def add(self, pieces: list[str]) -> list[str]:
        data = self._bytes + b"".join(map(_letters_to_bytes, pieces))
        return self._settle(data, *utf_8_decode(data, "replace", False))

    def rest(self) -> list[str]:
        return self._settle(self._bytes, self._bytes.decode("utf-8", "replace"), len(self._bytes))

    def _settle(self, data: bytes, text: str, used: int) -> list[str]:
        self._bytes = data[used:]
        if not text:
            return []
        if self._prompt_bytes and not data.startswith(text[0].encode()):
            self._prompt_pieces = [text[0]]  # U+FFFD: new bytes did not complete the character
            text = text[1:]
        self._prompt_bytes = 0
        return [text]


class _ByteFallback(_HoldsBytes):
    """SentencePiece's ``<0xE2>`` tokens: holds back a run of them.

    A run that is UTF-8 becomes its text. Of any other run every byte becomes U+FFFD, the valid
    characters in it too, which is why nothing of a run is settled before it ends.
    """

    _BYTE = re.compile(r"<0x([+0-9A-Fa-f][0-9A-Fa-f])>")

    def add(self, pieces: list[str]) -> list[str]:
        settled: list[str] = []
        run = bytearray(self._bytes)
        for piece in pieces:
            byte = self._BYTE.fullmatch(piece)
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
        """Return the text of a run that ended, without the characters that the prompt completed."""
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
    """A library decoder that rewrites each token by itself, but the first one differently."""

    _BEFORE = "x"  # a first token, so that the others are not

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
    """What the library does when a tokenizer has no decoder."""

    def __init__(self) -> None:
        self._started = False

    def add(self, pieces: list[str]) -> list[str]:
        if not pieces:
            return []
        before = " " if self._started else ""
        self._started = True
        return [before + " ".join(pieces)]


class _WholeText(_Step):
    """For decoders whose last word depends on all of the text: holds back everything."""

    held = True

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._prompt_text = ""
        self._token_ids: list[int] = []

    def hold(self, token_ids: Sequence[int]) -> str:
        """Nothing, after remembering ``token_ids``."""
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
    """Return the machines that follow a tokenizer's decoder, or one that waits for the whole text.
    """
    if not tokenizer.decoder_steps:
        return [_JoinWithSpaces()]
    steps: list[_Step] = []
    joined = False  # from some step on, the text is one piece and no token ends
    for spec in tokenizer.decoder_steps:
        kind = spec["type"]
        step = None if kind == "Fuse" else _build_step(spec, joined)
        if step is None and kind != "Fuse":
            return [_WholeText(tokenizer, skip_special_tokens)]
        joined = joined or kind in ("Fuse", "ByteLevel")
        steps += [step] if step else []
    return steps


def _build_step(spec: dict[str, Any], joined: bool) -> _Step | None:
    """Return the machine for one step, or None when there is none that need not wait for the end.
    """
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
    """``old`` to ``new``; None for a regular expression, or a pattern that may span two pieces."""
    if not old or (joined and len(old) > 1):
        return None
    return _PerToken(lambda pieces: [piece.replace(old, new) for piece in pieces])


def _cannot_decode(error: BaseException) -> str:
    return f"the tokenizer cannot decode the tokens: {printable(str(error))}"


def _letters_to_bytes(token: str) -> bytes:
    """Return the bytes a byte-level token spells; an added token that is plain text spells itself.
    """
    try:
        return bytes([_BYTE_OF_LETTER[letter] for letter in token])
    except KeyError:
        return token.encode("utf-8")


def _letter_table() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _letter_table()
