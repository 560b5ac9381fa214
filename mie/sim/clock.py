"""Provide two clocks in whole nanoseconds: one driven by a cost model, and the wall clock."""

from __future__ import annotations

import time
from typing import Protocol

SECOND = 1_000_000_000
MILLISECOND = 1_000_000


class Clock(Protocol):
    """The clock that times a load."""

    def now_ns(self) -> int:
        """Return the nanoseconds since some moment. They never run backwards."""

    def wait_until(self, moment_ns: int) -> None:
        """Return at ``moment_ns``, or at once if it has passed."""


class SimClock:
    """A clock that moves only when it is told to."""

    def __init__(self) -> None:
        self._now = 0

    def now_ns(self) -> int:
        return self._now

    def seconds(self) -> float:
        """Return the same moment for an engine. Rounded to nanoseconds, it is exact for 52 days."""
        return self._now / SECOND

    def advance(self, duration_ns: int) -> None:
        """Let time pass."""
        self._now += duration_ns

    def wait_until(self, moment_ns: int) -> None:
        self._now = max(self._now, moment_ns)


class WallClock:
    """The clock that an engine reads by default."""

    def now_ns(self) -> int:
        return time.perf_counter_ns()

    def wait_until(self, moment_ns: int) -> None:
        time.sleep(max(0, moment_ns - self.now_ns()) / SECOND)
