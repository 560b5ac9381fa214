"""Learn how to share one kind of call, from the times of the calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

Choice = TypeVar("Choice")
NUM_TRIALS = 5
"""Number of calls with each choice, in turns, of which the median counts."""
NUM_CALLS = 1 << 10
"""Number of calls after which all are tried again, because the machine may have changed."""
GAIN = 0.125
"""Share of a helper's lag that a call corrects. The lag varies from call to call."""
LARGEST_CHANGE = 1 / 64
"""Maximum change in a call, as a share of the whole work."""
EARLIER = 1e-5
"""Seconds by which the helpers should end before the caller.

A caller that waits for a helper then waits for the GIL as well, which takes twice as long.
"""


class Trials(Generic[Choice]):
    """Finds the fastest way to make one kind of call, from the times of the calls themselves."""

    def __init__(self, choices: Sequence[Choice], num_turns: int = NUM_TRIALS, length: int = 1):
        """Try each of the choices in ``num_turns`` turns of ``length`` calls.

        A change may make the first calls of a turn slower, so only the last half of them counts.
        """
        self._choices = choices
        self._num_turns, self._length = num_turns, length
        self._seconds: list[list[float]] = [[] for _ in choices]
        self._num_calls = 0
        self._best = choices[0]
        self.is_trial = len(choices) > 1
        """Whether the call that `choose` returned a choice for is a trial, which `note` times."""

    def choose(self) -> Choice:
        """Return how to make the next call."""
        if not self.is_trial:
            if self._num_calls < NUM_CALLS:
                self._num_calls += 1
                return self._best
            self._num_calls = 0
            self.is_trial = len(self._choices) > 1
        return self._choices[self._index]

    def note(self, seconds: float) -> None:
        """Note the time of a trial of what `choose` returned."""
        if self._num_calls % self._length >= self._length // 2:
            self._seconds[self._index].append(seconds)
        self._num_calls += 1
        if self._num_calls == self._num_turns * self._length * len(self._choices):
            medians = [sorted(each)[len(each) // 2] for each in self._seconds]
            self._best = self._choices[medians.index(min(medians))]
            self._seconds = [[] for _ in self._choices]
            self.is_trial = False

    @property
    def _index(self) -> int:
        return self._num_calls // self._length % len(self._choices)


class ThreadCount(Trials[int]):
    """The number of threads for one kind of call.

    A hand-over costs 5 µs on one machine and 100 µs on another. One thread reads memory at a half
    of the bandwidth or at nearly all of it. So constants would be wrong somewhere. Results do
    not depend on the number.
    """

    def __init__(self, least: int, most: int) -> None:
        """Choose among ``most``, and ``least`` times 1, 2, 4 …, with ``most`` first."""
        choices = [most]
        while least < most:
            choices.append(least)
            least *= 2
        super().__init__(choices)


class HeadStart:
    """How much more work the caller takes than each helper, so that they end at the same time.

    A helper begins later, because it has to get the GIL, and the time of that differs by machine.
    """

    def __init__(self, size: int, num_threads: int) -> None:
        """Divide work of this size among ``num_threads``."""
        self.extra = 0.0
        """The size of what the caller takes in addition to an equal share."""
        self._size, self._num_threads = size, num_threads

    def note(self, lag: float, seconds: float) -> None:
        """Note how long the call took, and how much later than the caller the helpers ended."""
        change = (lag + EARLIER) / seconds * self._size / self._num_threads * GAIN
        most = self._size * LARGEST_CHANGE
        extra = self.extra + max(-most, min(change, most))
        # Every thread keeps at least half of an equal share.
        self.extra = max(-self._size / (2 * self._num_threads), min(extra, self._size / 2))
