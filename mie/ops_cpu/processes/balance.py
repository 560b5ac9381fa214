"""Give slower processes less to do, from how long the others wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from statistics import median

UNITS = 64
"""Equal parts that work is cut into."""
NUM_STEPS = 15
"""Steps after which shares may change, and of whose times the median counts."""
LEAST_CHANGE = 2
"""Units that a border moves at least. A change costs as long as a step, and times vary."""
LARGEST_CHANGE = 1.25
"""Maximum factor of one change of a share."""
MOST_UNEQUAL = 4
"""Maximum factor between a share and an equal one."""


class Balance:
    """The shares of work among processes that wait for each other after each piece of it.

    A CPU may be slower than another for good, or for a while, where other programs or virtual
    machines run on the same core.
    """

    def __init__(self, number: int) -> None:
        self._shares = [1 / number] * number
        self.ends = self._round()
        """Where each share begins, in units, and the end of the last one."""
        self._works: list[Sequence[float]] = []
        self._waits: list[Sequence[float]] = []

    def note(self, works: Sequence[float], waits: Sequence[float]) -> None:
        """Note how many seconds each process worked on its shares in a step, and waited."""
        self._works.append(works)
        self._waits.append(waits)
        if len(self._works) < NUM_STEPS:
            return
        works, waits = (
            [median(each) for each in zip(*noted, strict=True)]
            for noted in (self._works, self._waits)
        )
        self._works, self._waits = [], []
        if min(works) > 0:
            self._change(works, waits)

    def _change(self, works: Sequence[float], waits: Sequence[float]) -> None:
        """Let each process work as much longer as it waited longer than the others."""
        mean, equal = sum(waits) / len(waits), 1 / len(waits)
        longer = [(waited - mean) / work for work, waited in zip(works, waits, strict=True)]
        widths = [(stop - start) / UNITS for start, stop in pairwise(self.ends)]
        moves = accumulate(width * each for width, each in zip(widths, longer, strict=True))
        if UNITS * max(map(abs, moves)) < LEAST_CHANGE:
            # Otherwise a small lasting difference would add up, and move a border back and forth.
            self._shares = widths
            return
        shares = []
        for share, each in zip(self._shares, longer, strict=True):
            factor = 1 + each
            factor = max(1 / LARGEST_CHANGE, min(factor, LARGEST_CHANGE))
            shares.append(max(equal / MOST_UNEQUAL, min(share * factor, equal * MOST_UNEQUAL)))
        self._shares = [share / sum(shares) for share in shares]
        ends = self._round()
        if max(abs(a - b) for a, b in zip(ends, self.ends, strict=True)) >= LEAST_CHANGE:
            self.ends = ends

    def _round(self) -> list[int]:
        return [0, *(round(UNITS * end) for end in accumulate(self._shares))]
