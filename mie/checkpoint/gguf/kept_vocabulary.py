"""Keep the vocabulary of a BPE as arrays, from which pieces and merges are found one by one.

The file in the cache has the pieces, the merges with their results, and checksums of pieces in
order: a piece is found by its checksum, and then compared.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.cache_dir import read_kept, write_kept

CACHE = "tokenizers"
MAX_FILES = 32
"""The most vocabularies that are kept. A large one takes 15 MB."""
MIN_PIECES = 1 << 14
"""The least pieces of a vocabulary that is kept. A smaller one is read in no time."""
_ARRAYS = ("text", "ends", "ids", "sums", "places", "merges", "order", "results")
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True, eq=False)
class KeptVocabulary:
    """The contents of a ``tokenizer.json`` with a BPE, as arrays."""

    parts: Mapping[str, Any]
    """The contents without vocabulary and merges."""
    longest: int
    """The most characters of a piece."""
    text: NDArray[np.uint8]
    """The UTF-8 of all pieces, one after the other."""
    ends: NDArray[np.int64]  # [n + 1], where each piece begins, and where the last one ends
    ids: NDArray[np.int32]  # [n]
    sums: NDArray[np.uint32]  # [n], the checksums of pieces, in ascending order
    places: NDArray[np.int32]  # [n], the pieces of these checksums
    merges: NDArray[np.int32]  # [m, 2], the pieces of each merge, the best merge first
    order: NDArray[np.int32]  # [m], the numbers of merges in the order of their results
    results: NDArray[np.int32]  # [m], the piece that each of these makes

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> KeptVocabulary:
        """Return the vocabulary of the contents of a ``tokenizer.json``."""
        model = parts["model"]
        pieces = [each.encode() for each in model["vocab"]]
        number = {piece: index for index, piece in enumerate(model["vocab"])}
        sums = np.array([*map(zlib.crc32, pieces)], np.uint32)
        places = np.argsort(sums, kind="stable")
        merges, count = model["merges"], len(model["merges"])
        columns = [
            np.fromiter(map(number.__getitem__, texts), np.int32, count)
            for texts in (
                (one for one, _ in merges),
                (two for _, two in merges),
                (one + two for one, two in merges),
            )
        ]
        order = np.argsort(columns[2], kind="stable")
        return cls(
            parts={**parts, "model": {**model, "vocab": {}, "merges": []}},
            longest=max(map(len, number), default=0),
            text=np.frombuffer(b"".join(pieces), np.uint8),
            ends=np.cumsum([0, *map(len, pieces)], dtype=np.int64),
            ids=np.array([*model["vocab"].values()], np.int32),
            sums=sums[places],
            places=places.astype(np.int32),
            merges=np.stack(columns[:2], axis=1),
            order=order.astype(np.int32),
            results=columns[2][order],
        )

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        arrays = [getattr(self, name) for name in _ARRAYS]
        sizes = [(array.dtype.str, array.shape) for array in arrays]
        head = json.dumps([self.parts, self.longest, sizes]).encode()
        data = [array.tobytes() for array in arrays]
        return b"".join([len(head).to_bytes(8, "little"), head, *data])

    @classmethod
    def of_bytes(cls, content: bytes) -> KeptVocabulary:
        """Return the vocabulary in the content of a file."""
        start = 8 + int.from_bytes(content[:8], "little")
        parts, longest, sizes = json.loads(content[8:start])
        arrays = []
        for kind, shape in sizes:
            count = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(content, kind, count, start).reshape(shape))
            start += arrays[-1].nbytes
        return cls(parts, longest, *arrays)

    def piece(self, index: int) -> str:
        """Return the text of a piece."""
        return self.text[self.ends[index] : self.ends[index + 1]].tobytes().decode()

    def find(self, texts: Iterable[str]) -> list[int]:
        """Return the pieces among some texts."""
        wanted = list(texts)
        sums = np.array([zlib.crc32(text.encode()) for text in wanted], np.uint32)
        first, stop = (np.searchsorted(self.sums, sums, side) for side in ("left", "right"))
        return [
            place
            for number in np.flatnonzero(first < stop)
            for place in self.places[first[number] : stop[number]].tolist()
            if self.piece(place) == wanted[number]
        ]

    @cached_property
    def numbers(self) -> NDArray[np.int32]:
        """The piece of each id, or -1."""
        numbers = np.full(self.num_ids, -1, np.int32)
        numbers[self.ids] = np.arange(len(self.ids), dtype=np.int32)
        return numbers

    @property
    def num_ids(self) -> int:
        """The largest id plus one."""
        return int(self.ids.max(initial=-1)) + 1

    def piece_of(self, token_id: int) -> str | None:
        """Return the piece of an id, or None."""
        if not 0 <= token_id < len(self.numbers) or self.numbers[token_id] < 0:
            return None
        return self.piece(int(self.numbers[token_id]))

    def id_of(self, text: str) -> int | None:
        """Return the id of a piece, or None."""
        found = self.find([text])
        return int(self.ids[found[0]]) if found else None

    def all_parts(self) -> Mapping[str, Any]:
        """Return the contents of the ``tokenizer.json``."""
        raw, ends = self.text.tobytes(), self.ends.tolist()
        pieces = [raw[start:end].decode() for start, end in pairwise(ends)]
        one, two = (map(pieces.__getitem__, part) for part in self.merges.T.tolist())
        vocab = dict(zip(pieces, self.ids.tolist(), strict=True))
        return self._with(vocab, [*zip(one, two, strict=True)], self.parts["added_tokens"])

    def parts_of(self, texts: Iterable[str], added: Sequence[Any]) -> Mapping[str, Any]:
        """Return the contents with the pieces among some texts, their merges, and added tokens."""
        model = self.parts["model"]
        always = [*(_BYTES if model["byte_fallback"] else []), model.get("unk_token")]
        contents = (each["content"] for each in added)
        wanted = {*texts, *(each for each in always if each), *contents}
        pieces = {place: self.piece(place) for place in self.find(wanted)}
        first, stop = (np.searchsorted(self.results, [*pieces], side) for side in ("left", "right"))
        numbers = [self.order[one:two] for one, two in zip(first, stop, strict=True)]
        merges = self.merges[np.sort(np.concatenate([self.order[:0], *numbers]))].tolist()
        return self._with(
            {text: int(self.ids[place]) for place, text in pieces.items()},
            # Other merges make pieces that are wanted, but are no parts of the text.
            [(pieces[one], pieces[two]) for one, two in merges if {one, two} <= pieces.keys()],
            added,
        )

    def _with(self, vocab: Any, merges: Any, added: Sequence[Any]) -> Mapping[str, Any]:
        model = {**self.parts["model"], "vocab": vocab, "merges": merges}
        return {**self.parts, "model": model, "added_tokens": added}


def kept_vocabulary(digest: str) -> KeptVocabulary | None:
    """Return a vocabulary of the cache, or None."""
    content = read_kept(CACHE, digest)
    return None if content is None else KeptVocabulary.of_bytes(content)


def keep_vocabulary(digest: str, parts: Mapping[str, Any]) -> None:
    """Keep the contents of a ``tokenizer.json`` with a BPE, if it has many pieces."""
    if len(parts["model"]["vocab"]) >= MIN_PIECES:
        write_kept(CACHE, digest, KeptVocabulary.of(parts).to_bytes(), MAX_FILES)
