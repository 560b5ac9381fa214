"""Learn how to share one kind of call among threads, from the times of the calls."""

from __future__ import annotations

NUM_TRIALS = 5
"""Number of calls with each number of threads, in turns, of which the median counts."""
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


class ThreadCount:
    """The number of threads for one kind of call, from the times of the calls themselves.

    A hand-over costs 5 µs on one machine and 100 µs on another. One thread reads memory at a half
    of the bandwidth or at nearly all of it. So constants would be wrong somewhere. Results do
    not depend on the number.
    """

    def __init__(self, least: int, most: int) -> None:
        """Choose among ``most``, and ``least`` times 1, 2, 4 …, with ``most`` first."""
        self.most = most
        self._choices = [most]
        while least < most:
            self._choices.append(least)
            least *= 2
        self._seconds: list[list[float]] = [[] for _ in self._choices]
        self._num_calls = 0
        self._best = most
        self.is_trial = len(self._choices) > 1
        """Whether the call that `choose` returned a number for is a trial, which `note` times."""

    def choose(self) -> int:
        """Return the number of threads for the next call."""
        if not self.is_trial:
            if self._num_calls < NUM_CALLS:
                self._num_calls += 1
                return self._best
            self._num_calls = 0
            self.is_trial = len(self._choices) > 1
        return self._choices[self._num_calls % len(self._choices)]

    def note(self, seconds: float) -> None:
        """Note the time of a trial with the number that `choose` returned."""
        self._seconds[self._num_calls % len(self._choices)].append(seconds)
        self._num_calls += 1
        if self._num_calls == NUM_TRIALS * len(self._choices):
            medians = [sorted(each)[NUM_TRIALS // 2] for each in self._seconds]
            self._best = self._choices[medians.index(min(medians))]
            self._seconds = [[] for _ in self._choices]
            self.is_trial = False


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
