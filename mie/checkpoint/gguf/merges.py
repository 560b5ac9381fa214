"""Find the merges of a vocabulary as arrays. A large one has half a million.

A merge makes a piece of two others. Pieces are found by checksums of 64 bits, and the checksum of
any part of a text follows from two sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.checkpoint.gguf.arrays import LENGTH, GgufArray

BATCH_BYTES = 1 << 18
"""Bytes of texts that are summed at once. The sums take 30 times as much."""
_BASE = 0x9E3779B97F4A7C15
_INVERSE = pow(_BASE, -1, 1 << 64)
_SPACE = 0x20

Ints = NDArray[np.int64]
Sums = NDArray[np.uint64]


class Checksums:
    """The checksums of all parts of a text: the sum of (byte + 1) * base**place, modulo 2**64."""

    def __init__(self, text: NDArray[np.uint8]) -> None:
        """Set the text."""
        self.powers = _powers(_BASE, len(text) + 1)
        self._inverse = _powers(_INVERSE, len(text) + 1)
        self._sums = np.zeros(len(text) + 1, np.uint64)
        np.cumsum((text.astype(np.uint64) + np.uint64(1)) * self.powers[:-1], out=self._sums[1:])

    def of(self, starts: Ints, ends: Ints) -> Sums:
        """Return the checksum of each part."""
        sums: Sums = (self._sums[ends] - self._sums[starts]) * self._inverse[starts]
        return sums

    def of_two(self, starts: Ints, ends: Ints, more: tuple[Ints, Ints]) -> Sums:
        """Return the checksum of each part with another part after it."""
        sums: Sums = self.of(starts, ends) + self.of(*more) * self.powers[ends - starts]
        return sums


def _powers(base: int, count: int) -> Sums:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The pieces of a vocabulary."""

    text: NDArray[np.uint8]
    """The UTF-8 of all pieces, one after the other."""
    ends: Ints  # [n + 1], where each piece begins, and where the last one ends
    sums: Sums  # [n], the checksums of pieces, in ascending order
    places: NDArray[np.int32]  # [n], the pieces of these checksums

    @classmethod
    def of(cls, texts: Sequence[str]) -> Pieces:
        """Return the pieces with these texts."""
        pieces = [*map(str.encode, texts)]
        text = np.frombuffer(b"".join(pieces), np.uint8)
        ends = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
        batches = [
            Checksums(text[own[0] : own[-1]]).of(own[:-1] - own[0], own[1:] - own[0])
            for own in (ends[batch] for batch in _batches(ends))
        ]
        sums = np.concatenate([np.empty(0, np.uint64), *batches])
        places = np.argsort(sums, kind="stable")
        return cls(text, ends, sums[places], places.astype(np.int32))

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.places)

    def piece(self, index: int) -> str:
        """Return the text of a piece."""
        return self.text[self.ends[index] : self.ends[index + 1]].tobytes().decode()

    @cached_property
    def begins_character(self) -> NDArray[np.bool_]:
        """Whether a byte of the text begins a character."""
        begins: NDArray[np.bool_] = (self.text & 0xC0) != 0x80
        return begins

    @cached_property
    def lengths(self) -> Ints:
        """The number of characters of each piece."""
        before = np.concatenate([[0], np.cumsum(self.begins_character, dtype=np.int64)])
        return np.diff(before[self.ends])

    @cached_property
    def same(self) -> tuple[str, str] | None:
        """Two pieces with the same checksum, or None."""
        found = np.flatnonzero(self.sums[1:] == self.sums[:-1])
        if not len(found):
            return None
        one, two = self.places[found[0] : found[0] + 2].tolist()
        return self.piece(one), self.piece(two)

    def find(self, sums: Sums) -> Ints:
        """Return the piece of each checksum, or -1."""
        order = np.argsort(sums)  # Neighbours are found in the same part of the CPU's cache.
        sums = sums[order]
        places = np.searchsorted(self.sums, sums)
        is_found = places < len(self)
        is_found[is_found] = self.sums[places[is_found]] == sums[is_found]
        found = np.full(len(sums), -1, np.int64)
        found[order[is_found]] = self.places[places[is_found]]
        return found

    def find_texts(self, texts: Iterable[str]) -> list[int]:
        """Return the pieces among some texts."""
        wanted = [*texts]
        encoded = [*map(str.encode, wanted)]
        ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        sums = Checksums(np.frombuffer(b"".join(encoded), np.uint8)).of(ends[:-1], ends[1:])
        return [
            place
            for text, place in zip(wanted, self.find(sums).tolist(), strict=True)
            if place >= 0 and self.piece(place) == text
        ]


@dataclass(frozen=True, eq=False)
class Merges:
    """The merges of a vocabulary, the best first."""

    pairs: NDArray[np.int32]  # [m, 2], the pieces of each merge
    results: NDArray[np.int32]  # [m], the piece that it makes


def merges_of_cuts(pieces: Pieces, is_normal: NDArray[np.bool_], scores: NDArray[Any]) -> Merges:
    """Return the pairs that make up normal pieces, in the order of transformers.

    ``is_normal`` and ``scores`` have an element for each piece.
    """
    found = [np.empty((3, 0), np.int64)]
    filled = np.zeros(1 << 22, bool)
    filled[pieces.sums >> np.uint64(42)] = True  # so few other parts are looked up
    for batch in _batches(pieces.ends):
        ends = pieces.ends[batch]
        whole = slice(ends[0], ends[-1])
        starts, stops = ends[:-1] - ends[0], ends[1:] - ends[0]
        can_cut = pieces.begins_character[whole] & np.repeat(
            is_normal[batch][: len(starts)], stops - starts
        )
        can_cut[starts] = False
        cuts = np.flatnonzero(can_cut)
        numbers = np.searchsorted(stops, cuts, "right")
        checksums = Checksums(pieces.text[whole])
        sums = checksums.of(starts[numbers], cuts), checksums.of(cuts, stops[numbers])
        is_likely = filled[sums[0] >> np.uint64(42)] & filled[sums[1] >> np.uint64(42)]
        one, two = (pieces.find(each[is_likely]) for each in sums)
        is_found = (one >= 0) & (two >= 0)
        parts = numbers[is_likely] + batch.start, one, two
        found.append(np.stack([each[is_found] for each in parts]))
    results, one, two = np.concatenate(found, axis=1)
    lengths = pieces.lengths
    # Among equal scores and lengths, the order of the pieces remains.
    order = np.lexsort((-lengths[two], -lengths[one], -scores[results]))
    return _ordered(one[order], two[order], results[order])


def merges_of_texts(pieces: Pieces, texts: GgufArray) -> Merges | int:
    """Return the merges in texts of two pieces with a space between them.

    The result is the number of a text instead if the text is no merge of pieces.
    """
    assert texts.places is not None, "an array of texts"
    borders = np.append(texts.places, len(texts.data))
    longest = 2 * int(np.diff(pieces.ends).max(initial=0)) + 1
    too_long = np.flatnonzero(np.diff(borders) > LENGTH.size + longest)
    if len(too_long):
        return int(too_long[0])
    raw = np.frombuffer(texts.data, np.uint8)
    found = [np.empty((3, 0), np.int64)]
    for batch in _batches(borders):
        own = borders[batch]
        text = raw[own[0] : own[-1]]
        starts, ends = own[:-1] - own[0] + LENGTH.size, own[1:] - own[0]
        spaces = np.append(np.flatnonzero(text == _SPACE), len(text))
        space = spaces[np.searchsorted(spaces, np.minimum(starts + 1, len(text)))]
        space = np.minimum(space, ends)
        second = np.minimum(space + 1, ends), ends
        checksums = Checksums(text)
        sums = checksums.of(starts, space), checksums.of(*second)
        parts = *sums, checksums.of_two(starts, space, second)
        numbers = np.stack([pieces.find(each) for each in parts])
        wrong = np.flatnonzero((numbers < 0).any(axis=0) | (space == ends)).tolist()
        if wrong:
            return int(batch.start + wrong[0])
        found.append(numbers)
    return _ordered(*np.concatenate(found, axis=1))


def _ordered(one: Ints, two: Ints, results: Ints) -> Merges:
    return Merges(np.stack((one, two), axis=1).astype(np.int32), results.astype(np.int32))


def _batches(borders: Ints) -> Iterator[slice]:
    """Yield the borders of the texts of at most `BATCH_BYTES`. A longer text is alone.

    Neighbours share a border.
    """
    start = 0
    while start < len(borders) - 1:
        stop = int(np.searchsorted(borders, borders[start] + BATCH_BYTES, "right"))
        stop = max(stop - 1, start + 1)
        yield slice(start, stop + 1)
        start = stop
