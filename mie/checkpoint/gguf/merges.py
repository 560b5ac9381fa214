"""Find the merges of a SentencePiece vocabulary, once for each vocabulary.

A file has pieces and scores. A merge makes a piece of two others. To find all merges of 262,144
pieces takes a second, so they are kept in the user's cache. The file there is named by a digest of
the vocabulary and of the sources that read it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mie.base.cache_dir import read_kept, write_kept
from mie.checkpoint.gguf.arrays import GgufArray

CACHE = "merges"
MAX_FILES = 32
"""The most vocabularies that are kept. The merges of a large one take 4 MB."""
SOURCES = ("arrays.py", "merges.py", "tokenizer.py")
"""The sources that decide the merges of a vocabulary."""
_NORMAL = 1

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Merges = NDArray[np.int32]  # [n, 2], the ids of both parts


def kept_merges(arrays: Sequence[GgufArray], find: Callable[[], Merges]) -> Merges:
    """Return the merges of the vocabulary in ``arrays``, from the cache if it has them.

    ``find`` returns them otherwise.
    """
    import numpy as np  # which `mie --help` does not need

    name = _digest(arrays)
    if (content := read_kept(CACHE, name)) is None:
        merges = find()
        write_kept(CACHE, name, merges.astype("<i4").tobytes(), MAX_FILES)
        return merges
    return np.frombuffer(content, "<i4").reshape(-1, 2)


def find_merges(
    tokens: Sequence[str], kinds: Sequence[int], scores: Sequence[float], ids: Mapping[str, int]
) -> Merges:
    """Return the pairs that make up normal pieces, the best first, in the order of transformers."""
    import numpy as np

    found = [
        (index, ids[one], ids[two])
        for index, (piece, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == _NORMAL
        for one, two in cuts(piece, ids)
    ]
    pieces, one, two = np.array(found, np.int32).reshape(-1, 3).T
    lengths = np.array([*map(len, tokens)])
    # Among equal scores and lengths, the order of the pieces remains.
    order = np.lexsort((-lengths[two], -lengths[one], -np.array(scores)[pieces]))
    return np.stack((one, two), axis=1)[order]


def cuts(piece: str, ids: Container[str]) -> list[tuple[str, str]]:
    """Return each cut of a piece into two pieces of the vocabulary."""
    return [
        (one, two)
        for place in range(1, len(piece))
        if (one := piece[:place]) in ids and (two := piece[place:]) in ids
    ]


def _digest(arrays: Sequence[GgufArray]) -> str:
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update(Path(__file__).with_name(source).read_bytes())
    for array in arrays:
        digest.update(f"{array.kind} {array.count} {len(array.data)}:".encode() + array.data)
    return digest.hexdigest()[:40]
