"""Decide how many guesses a step computes for a sequence.

A guess pays if the tokens that it is expected to add are worth the time of its row. The time of
rows comes from a table of the backend, and the share of right guesses from the guesses so far. So
the decision depends on tokens alone, and a replay repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

MOST_EQUAL = 8
"""Runs of equal tokens that are longer count as this long."""

PRIOR = (0.25, 0.35, 0.45, 0.55, 0.65, 0.72, 0.78, 0.83, 0.87)
"""The share of right guesses by the length of the run, before the first guess."""
PRIOR_WEIGHT = 6.0
OWN_WEIGHT = 2.0
DECAY = 0.95
"""Factor of a sequence's earlier guesses with each step that has guesses."""
MOST_CHANCE = 0.97
"""The largest expected share of right guesses."""
RETRY = 24
"""Steps without guesses after which a sequence tries again."""


@dataclass(slots=True)
class Share:
    """The right guesses, and the guesses that were drawn, or expected to be right."""

    right: float = 0.0
    drawn: float = 0.0

    def add(self, right: float, drawn: float, decay: float) -> None:
        """Add guesses, after the earlier ones are multiplied by ``decay``."""
        self.right = self.right * decay + right
        self.drawn = self.drawn * decay + drawn


@dataclass(slots=True)
class Record:
    """How well a sequence was guessed so far."""

    own: Share = field(default_factory=Share)
    """Its right guesses, and the number that was expected from all sequences."""
    num_equal: int = 0
    """The length of the run of the latest guesses."""
    num_idle: int = 0
    """Steps since guesses were last computed although there were some."""


class RowCosts:
    """The time of a step by its number of rows, relative to a step of one row."""

    def __init__(self, first: Sequence[float]) -> None:
        """``first`` has the times of 1, 2, … rows. Each further row costs as much as the last."""
        self._first = tuple(first)
        self._more = self._first[-1] - self._first[-2]

    def of(self, num_rows: int) -> float:
        """Return the relative time of a step."""
        count = len(self._first)
        if num_rows <= count:
            return self._first[max(1, num_rows) - 1]
        return self._first[-1] + (num_rows - count) * self._more


class Rule:
    """Chooses the number of guesses with the most tokens for the time of a step."""

    def __init__(self, costs: RowCosts) -> None:
        self._costs = costs
        self._by_run = [Share() for _ in range(MOST_EQUAL + 1)]

    def chance(self, record: Record, num_equal: int) -> float:
        """Return the expected share of right guesses after a run of equal tokens."""
        own = record.own
        better = (own.right + OWN_WEIGHT) / (own.drawn + OWN_WEIGHT)
        return min(MOST_CHANCE, self._general(num_equal) * better)

    def _general(self, num_equal: int) -> float:
        """Return the share of right guesses after such a run, in all sequences."""
        num_equal = min(num_equal, MOST_EQUAL)
        seen = self._by_run[num_equal]
        return (seen.right + PRIOR_WEIGHT * PRIOR[num_equal]) / (seen.drawn + PRIOR_WEIGHT)

    def length(
        self, record: Record, num_equal: int, most: int, num_rows: int, num_tokens: float
    ) -> int:
        """Return the number of guesses, at most ``most``, for a step of ``num_rows`` other rows.

        Without the guesses the step gives ``num_tokens`` tokens.
        """
        chance = self.chance(record, num_equal)
        best, best_rate = 0, num_tokens / self._costs.of(num_rows)
        expected, each = num_tokens, 1.0
        for count in range(1, most + 1):
            each *= chance
            expected += each
            rate = expected / self._costs.of(num_rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        if best:
            record.num_idle, record.num_equal = 0, num_equal
            return best
        record.num_idle += 1
        if record.num_idle >= RETRY and num_rows <= 2:
            record.num_idle, record.num_equal = 0, num_equal
            return 1
        return 0

    def learn(self, record: Record, num_guesses: int, num_right: int) -> None:
        """Count the guesses of a step. Those after a wrong one were not drawn."""
        num_drawn = min(num_right + 1, num_guesses)
        record.own.add(num_right, num_drawn * self._general(record.num_equal), DECAY)
        run = self._by_run[min(record.num_equal, MOST_EQUAL)]
        run.add(num_right, num_drawn, 0.999)
