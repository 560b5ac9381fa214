"""Follow an output of JSON with lists of different items and objects of different names.

A matcher reads the output beside llguidance, and bans each token that would repeat an item or a
name. `mie.structured.unique_items` proves that another token is left.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mie.errors import RequestError
from mie.structured.matcher import Matcher
from mie.structured.unique_items import NOWHERE, Place

if TYPE_CHECKING:
    from mie.structured.grammars import Grammar

_OUT, _IN_STRING, _AFTER_BACKSLASH = range(3)
_BLANKS = frozenset(b" \t\r\n")
_ENDS = frozenset(b",]}")


class Tokens:
    """The bytes of a vocabulary's tokens, and the tokens that can end an item."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces
        self.closing: dict[bytes, list[int]] = defaultdict(list)
        """Tokens with a quote, by the bytes before it."""
        self.escaped: list[int] = []
        """Tokens with a quote after a backslash."""
        self.whole: list[int] = []
        """Tokens that may have a whole item: with two quotes, or the end of an object."""
        for token_id, piece in enumerate(pieces):
            before, quote, after = piece.partition(b'"')
            if quote:
                self.closing[before].append(token_id)
                if b"\\" in before:
                    self.escaped.append(token_id)
            if b'"' in after or b"}" in piece:
                self.whole.append(token_id)


class Frame(NamedTuple):
    """A list or an object that is not at its end, or the output itself."""

    place: int
    is_object: bool
    child: int
    """The place of the current value."""
    is_name: bool = False
    """Whether the name of a property comes."""
    begun: int = -1
    """Offset of the current value or name, if it has begun."""
    items: frozenset[str] = frozenset()
    """The items or names so far that must differ."""


class Reading(NamedTuple):
    """The state after some text of JSON."""

    frames: tuple[Frame, ...] = (Frame(NOWHERE, False, 0),)
    string: int = _OUT
    """Whether the text ends within a string, or after a backslash in it."""


class UniqueItems:
    """The lists of a description that have different items."""

    def __init__(self, places: Sequence[Mapping[str, Any]], tokens: Tokens) -> None:
        self._places = [Place(**each) for each in places]
        self.tokens = tokens
        self._spelled = [
            {_normal(text): text for text in map(_spelled, each.values or ())}
            for each in self._places
        ]

    def read(self, reading: Reading, before: bytes, piece: bytes) -> Reading | None:
        """Return the state after a piece of text, or None if it repeats an item."""
        frames, string = list(reading.frames), reading.string
        text = before + piece
        for offset in range(len(before), len(text)):
            byte, top = text[offset], frames[-1]
            if string:
                if string == _AFTER_BACKSLASH or byte not in b'"\\':
                    string = _IN_STRING
                elif byte == 0x5C:
                    string = _AFTER_BACKSLASH
                else:
                    string = _OUT
                    if not self._end_value(frames, text, offset + 1):
                        return None
                continue
            if top.begun >= 0 and (byte in _BLANKS or byte in _ENDS):
                if not self._end_value(frames, text, offset):
                    return None
                top = frames[-1]
            if byte in b"]}" and len(frames) > 1:
                frames.pop()
                if not self._end_value(frames, text, offset + 1):
                    return None
            elif byte == 0x2C:
                frames[-1] = top._replace(is_name=top.is_object)
                if self._left(top) == []:
                    return None
            elif byte not in _BLANKS and byte != 0x3A:
                if top.begun < 0:
                    frames[-1] = top = top._replace(begun=offset)
                string = _IN_STRING if byte == 0x22 else _OUT
                if byte in b"[{":
                    frames.append(self._begun(top.child, byte == 0x7B))
        top = frames[-1]
        left = self._left(top)
        if left is not None and top.begun >= 0:
            part = text[top.begun :].decode(errors="ignore")
            if not any(each.startswith(part) for each in left):
                return None
        return Reading(tuple(frames), string)

    def candidates(self, reading: Reading, before: bytes) -> Iterable[int] | None:
        """Return the tokens that may repeat an item, or None if all tokens may."""
        lists = [each for each in reading.frames if self._is_unique(each)]
        if any(self._left(each) is not None for each in lists):
            return None
        return self._candidates(reading, before) if lists else ()

    def _candidates(self, reading: Reading, before: bytes) -> Iterator[int]:
        yield from self.tokens.whole
        top = reading.frames[-1]
        if reading.string and self._is_unique(top) and top.is_name == top.is_object:
            part = before[top.begun + 1 :]
            if b"\\" in part:
                for some in self.tokens.closing.values():
                    yield from some
                return
            begun = json.dumps(part.decode(errors="ignore"))[:-1]
            items = [json.loads(each) for each in top.items if each.startswith(begun)]
            given = [each.encode(errors="surrogatepass") for each in items]
            rests = [each[len(part) :] for each in given if each.startswith(part)]
            for rest in rests:
                yield from self.tokens.closing.get(rest, ())
            if rests:
                yield from self.tokens.escaped

    def _is_unique(self, frame: Frame) -> bool:
        if frame.place == NOWHERE:
            return False
        place = self._places[frame.place]
        return place.has_different_names if frame.is_object else place.is_unique

    def _left(self, frame: Frame) -> list[str] | None:
        """Return the spellings of the listed items that a list may still have, if it has such."""
        if frame.is_object or not self._is_unique(frame):
            return None
        if self._places[frame.place].values is None:
            return None
        spelled = self._spelled[frame.place]
        return [text for key, text in spelled.items() if key not in frame.items]

    def _begun(self, place: int, is_object: bool) -> Frame:
        child = NOWHERE
        if place != NOWHERE and not is_object:
            child = self._places[place].items
        return Frame(place, is_object, child, is_name=is_object)

    def _end_value(self, frames: list[Frame], text: bytes, end: int) -> bool:
        """End the current value or name, and return whether it is not repeated."""
        top = frames[-1]
        frames[-1] = top._replace(begun=-1)
        if top.is_name:
            if top.place == NOWHERE:
                frames[-1] = frames[-1]._replace(is_name=False)
                return True
            place, name = self._places[top.place], json.loads(text[top.begun : end])
            child, items = place.names.get(name, place.others), top.items
            if place.has_different_names:
                items |= {json.dumps(name)}
            frames[-1] = frames[-1]._replace(is_name=False, child=child, items=items)
            return items is top.items or len(items) > len(top.items)
        if not top.is_object and self._is_unique(top):
            raw = text[top.begun : end]
            if self._places[top.place].values is None and raw[:1] not in b'"{':
                return True
            item = _normal(raw)
            frames[-1] = frames[-1]._replace(items=top.items | {item})
            return item not in top.items
        return True


def _spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _normal(text: str | bytes) -> str:
    """Return the text of a value that equal values have, such as 1 and 1.0."""
    try:
        return json.dumps(json.loads(text, parse_int=float), sort_keys=True)
    except RecursionError:
        raise RequestError(
            "structured_outputs cannot be followed: an item of a list with uniqueItems nests too "
            "deep to be compared"
        ) from None


class UniqueMatcher(Matcher):
    """The state of an output that has lists of different items."""

    def __init__(
        self,
        grammar: Grammar,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        unique_items: UniqueItems,
    ) -> None:
        super().__init__(grammar, eos_token_ids, vocab_size)
        self._unique = unique_items
        self._text = b""
        self._readings = [Reading()]
        self._lengths = [0]

    def mask(self) -> bytes:
        """Return a bit for each token, as `Matcher.mask`."""
        mask = super().mask()
        candidates = self._unique.candidates(self._readings[-1], self._text)
        if candidates is None:
            candidates = [
                8 * index + bit
                for index, byte in enumerate(mask)
                if byte
                for bit in range(8)
                if byte >> bit & 1
            ]
        kept = bytearray(mask)
        for token_id in candidates:
            if kept[token_id // 8] >> token_id % 8 & 1 and self._after(token_id) is None:
                kept[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(kept)

    def allows(self, token_id: int) -> bool:
        """Return whether the mask has a token."""
        return super().allows(token_id) and self._after(token_id) is not None

    def accept(self, token_id: int) -> None:
        """Advance by a token. A token that may not come next is a `RequestError`."""
        super().accept(token_id)
        reading = self._after(token_id)
        if reading is None:
            raise RequestError("structured_outputs cannot be followed: an item is repeated")
        self._text += self._piece(token_id)
        self._readings.append(reading)
        self._lengths.append(len(self._text))

    def validate(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens may come next, one after another. Nothing changes."""
        count = super().validate(token_ids)
        reading, text = self._readings[-1], self._text
        for index, token_id in enumerate(token_ids[:count]):
            piece = self._piece(token_id)
            after = self._unique.read(reading, text, piece)
            if after is None:
                return index
            reading, text = after, text + piece
        return count

    def rollback(self, num_tokens: int) -> None:
        """Return to the state before the last accepted tokens."""
        super().rollback(num_tokens)
        if num_tokens > 0:
            del self._readings[-num_tokens:], self._lengths[-num_tokens:]
            self._text = self._text[: self._lengths[-1]]

    def _piece(self, token_id: int) -> bytes:
        return b"" if token_id in self._eos_token_ids else self._unique.tokens.pieces[token_id]

    def _after(self, token_id: int) -> Reading | None:
        return self._unique.read(self._readings[-1], self._text, self._piece(token_id))
