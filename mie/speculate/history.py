"""Find the places in a list of tokens where the last tokens of a sequence occurred before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MOST_PLACES = 32
"""Maximum number of places that a lookup compares. The latest ones come first."""

BREAK = -1
"""Separates texts in a list. No text goes on over it."""


class History:
    """A list of tokens that grows, with the places of each run of ``width`` tokens.

    The places of a run form a chain from the latest to the first, as in a compressor of the LZ77
    family. A token takes one entry in the chain, and a new run one in the table.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self.token_ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # by run: the place after it
        self._before: list[int] = []  # by place: the place after the run's occurrence before

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        known, width = self.token_ids, self._width
        first = len(known) + 1
        known.extend(token_ids)
        latest, before = self._latest, self._before
        before.extend([0] * (len(known) + 1 - len(before)))
        for place in range(max(first, width), len(known) + 1):
            run = tuple(known[place - width : place])
            before[place] = latest.get(run, 0)
            latest[run] = place

    def places(self, last: Sequence[int], longest: int) -> Iterator[tuple[int, int]]:
        """Yield places after the run that ends ``last``, the latest one first.

        Each comes with the number of equal tokens before it, at most ``longest``. A place at the
        end of the list has nothing after it, and is left out.
        """
        width, known = self._width, self.token_ids
        place = self._latest.get(tuple(last[-width:]), 0) if len(last) >= width else 0
        for _ in range(MOST_PLACES):
            if not place:
                return
            if place < len(known):
                length = width
                most = min(longest, place, len(last))
                while length < most and known[place - length - 1] == last[-length - 1]:
                    length += 1
                yield place, length
            place = self._before[place]
