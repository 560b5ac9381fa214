"""Decode the arrays of a GGUF file's metadata. A vocabulary has hundreds of thousands of texts.

NumPy is imported where it is used: ``mie --help`` imports this module.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from mmap import mmap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SCALARS = {**dict(enumerate("BbHhIif?")), **dict(enumerate("Qqd", 10))}
"""The codes of `struct` by the numbers of types of values."""
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
_WINDOW = 1 << 20
"""Bytes in which short texts are found at once."""
_SLOW = 4096
"""Texts that are found one by one where a text is long, empty or has a zero byte."""


@dataclass(frozen=True, eq=False)
class GgufArray:
    """An array in the metadata. It is decoded when it is needed."""

    kind: int
    count: int
    data: bytes
    places: NDArray[np.int64] | None = None
    """For texts: where the length of each begins in ``data``."""

    @cached_property
    def values(self) -> list[Any]:
        """The elements: numbers, booleans or texts.

        Raises:
            UnicodeDecodeError: a text is not UTF-8.
        """
        if self.places is None:
            return list(struct.unpack(f"<{self.count}{SCALARS[self.kind]}", self.data))
        import numpy as np

        starts = self.places + LENGTH.size
        raw = np.frombuffer(self.data, np.uint8)
        is_kept = np.ones(len(raw), bool)
        for place in range(1, LENGTH.size):
            is_kept[starts - 1 - place] = False
        raw = raw.copy()
        raw[starts - 1] = 0  # a zero byte before each text
        texts: list[Any] = raw[is_kept].tobytes().decode().split("\0")[1:]
        if len(texts) == self.count:
            return texts
        ends = [*self.places[1:].tolist(), len(self.data)]  # a text has a zero byte
        pairs = zip(starts.tolist(), ends, strict=True)
        return [self.data[start:end].decode() for start, end in pairs]

    def text(self, index: int) -> str:
        """Return one text, without the others.

        Raises:
            UnicodeDecodeError: it is not UTF-8.
        """
        assert self.places is not None, "an array of texts"
        start = int(self.places[index])
        size = LENGTH.unpack_from(self.data, start)[0]
        return self.data[start + LENGTH.size : start + LENGTH.size + size].decode()

    def find(self, text: str) -> int | None:
        """Return the last index of a text, or None."""
        assert self.places is not None, "an array of texts"
        wanted = text.encode()
        wanted = LENGTH.pack(len(wanted)) + wanted
        place = self.data.rfind(wanted)
        while place >= 0:
            index = int(self.places.searchsorted(place))
            if index < self.count and self.places[index] == place:
                return index
            place = self.data.rfind(wanted, 0, place + len(wanted) - 1)
        return None

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the elements."""
        return iter(self.values)


def places_of_texts(
    data: mmap | bytes, start: int, count: int, end: int
) -> tuple[NDArray[np.int64], int] | None:
    """Return where ``count`` texts begin, relative to ``start``, and where the last one ends.

    Each text has its length before it. The data ends at ``end``. The texts may end later, but
    their lengths do not. None: they do.
    """
    import numpy as np

    found: list[NDArray[np.int64]] = []
    at, num_left = start, count
    while num_left:
        places, stop = _short_texts(data, at, num_left, end)
        if not len(places):
            own = []
            stop = at
            for _ in range(min(num_left, _SLOW)):
                if stop + LENGTH.size > end:
                    return None
                own.append(stop)
                stop += LENGTH.size + LENGTH.unpack_from(data, stop)[0]
            places = np.array(own, np.int64)
        found.append(places)
        at, num_left = stop, num_left - len(places)
    return np.concatenate([np.empty(0, np.int64), *found]) - start, at


def _short_texts(
    data: mmap | bytes, at: int, count: int, end: int
) -> tuple[NDArray[np.int64], int]:
    """Return where the next texts begin and where they end, as far as that is plain.

    The length of a text of less than 256 bytes is a byte and seven zeros. Only texts with zero
    bytes, and empty texts, have such bytes anywhere else.
    """
    import numpy as np

    size = min(end - at, _WINDOW)
    if size < LENGTH.size:
        return np.empty(0, np.int64), at
    window = np.frombuffer(data, np.uint8, size, at)
    is_zero = window == 0
    num_places = size - LENGTH.size + 1
    is_length = is_zero[1 : num_places + 1]
    for place in range(2, LENGTH.size):
        is_length = is_length & is_zero[place : place + num_places]
    places = np.flatnonzero(is_length)[:count]
    ends = places + LENGTH.size + window[places]
    expected = np.concatenate([[0], ends[:-1]])
    breaks = np.flatnonzero(places != expected[: len(places)])
    num_plain = int(breaks[0]) if len(breaks) else len(places)
    if not num_plain:
        return np.empty(0, np.int64), at
    return at + places[:num_plain].astype(np.int64), at + int(ends[num_plain - 1])
