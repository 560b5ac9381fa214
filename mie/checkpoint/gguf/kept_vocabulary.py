"""Keep the vocabulary of a BPE as arrays, and find pieces and merges one by one.

The file in the cache has the pieces with their checksums, and the merges with their results.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.cache_dir import map_kept, release, write_kept
from mie.checkpoint.gguf.merges import Merges, Pieces

CACHE = "tokenizers"
MAX_FILES = 32
"""The most vocabularies that are kept. A large one takes 15 MB."""
MIN_PIECES = 1 << 14
"""The least pieces of a vocabulary that is kept. The library builds a smaller one in no time."""
_OF_PIECES = ("text", "ends", "sums", "places")
_ARRAYS = ("ids", "merges", "order", "results")
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@dataclass(frozen=True, eq=False)
class KeptVocabulary:
    """The contents of a ``tokenizer.json`` with a BPE, as arrays."""

    parts: Mapping[str, Any]
    """The contents without vocabulary and merges."""
    longest: int
    """The most characters of a piece."""
    pieces: Pieces
    ids: NDArray[np.int32]  # [n], in ascending order
    merges: NDArray[np.int32]  # [m, 2], the pieces of each merge, the best merge first
    order: NDArray[np.int32]  # [m], the numbers of merges in the order of their results
    results: NDArray[np.int32]  # [m], the piece that each of these makes
    file: memoryview | None = None
    """The mapped file that has the arrays."""

    @classmethod
    def of(
        cls, parts: Mapping[str, Any], pieces: Pieces, ids: NDArray[Any], merges: Merges
    ) -> KeptVocabulary:
        """Return a vocabulary. ``parts`` is a ``tokenizer.json`` without pieces and merges."""
        order = np.argsort(merges.results, kind="stable")
        return cls(
            parts=parts,
            longest=int(pieces.lengths.max(initial=0)),
            pieces=pieces,
            ids=ids.astype(np.int32),
            merges=merges.pairs,
            order=order.astype(np.int32),
            results=merges.results[order],
        )

    def to_bytes(self) -> bytes:
        """Return the content of a file."""
        arrays = [getattr(self.pieces, name) for name in _OF_PIECES]
        arrays += [getattr(self, name) for name in _ARRAYS]
        sizes = [(array.dtype.str, array.shape) for array in arrays]
        head = json.dumps([self.parts, self.longest, sizes]).encode()
        data = [array.tobytes() for array in arrays]
        return b"".join([len(head).to_bytes(8, "little"), head, *data])

    @classmethod
    def of_file(cls, content: memoryview) -> KeptVocabulary:
        """Return the vocabulary in the content of a mapped file."""
        start = 8 + int.from_bytes(content[:8], "little")
        parts, longest, sizes = json.loads(bytes(content[8:start]))
        arrays: list[Any] = []
        for kind, shape in sizes:
            count = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(content, kind, count, start).reshape(shape))
            start += arrays[-1].nbytes
        pieces = Pieces(*arrays[: len(_OF_PIECES)])
        own = dict(zip(_ARRAYS, arrays[len(_OF_PIECES) :], strict=True))
        return cls(parts, longest, pieces, **own, file=content)

    @property
    def num_ids(self) -> int:
        """The largest id plus one."""
        return int(self.ids[-1]) + 1 if len(self.ids) else 0

    def piece_of(self, token_id: int) -> str | None:
        """Return the piece of an id, or None."""
        place = bisect_left(self.ids, token_id)
        is_found = place < len(self.ids) and self.ids[place] == token_id
        return self.pieces.piece(place) if is_found else None

    def id_of(self, text: str) -> int | None:
        """Return the id of a piece, or None."""
        found = self.pieces.find_texts([text])
        return int(self.ids[found[0]]) if found else None

    def all_parts(self) -> Mapping[str, Any]:
        """Return the contents of the ``tokenizer.json``."""
        raw, ends = self.pieces.text.tobytes(), self.pieces.ends.tolist()
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
        pieces = {place: self.pieces.piece(place) for place in self.pieces.find_texts(wanted)}
        own = np.array([*pieces], np.int32)  # with another dtype, the results would be copied
        first, stop = (np.searchsorted(self.results, own, side) for side in ("left", "right"))
        numbers = [self.order[one:two] for one, two in zip(first, stop, strict=True)]
        merges = self.merges[np.sort(np.concatenate([self.order[:0], *numbers]))].tolist()
        vocab = {text: int(self.ids[place]) for place, text in pieces.items()}
        if self.file is not None:
            release(self.file)
        # Other merges make pieces that are wanted, but are no parts of the text.
        own_merges = [(pieces[a], pieces[b]) for a, b in merges if {a, b} <= pieces.keys()]
        return self._with(vocab, own_merges, added)

    def _with(self, vocab: Any, merges: Any, added: Sequence[Any]) -> Mapping[str, Any]:
        model = {**self.parts["model"], "vocab": vocab, "merges": merges}
        return {**self.parts, "model": model, "added_tokens": added}


def kept_vocabulary(digest: str) -> KeptVocabulary | None:
    """Return a vocabulary of the cache, or None."""
    content = map_kept(CACHE, digest)
    return None if content is None else KeptVocabulary.of_file(content)


def keep_vocabulary(digest: str, vocabulary: KeptVocabulary) -> None:
    """Keep a vocabulary in the cache."""
    write_kept(CACHE, digest, vocabulary.to_bytes(), MAX_FILES)
