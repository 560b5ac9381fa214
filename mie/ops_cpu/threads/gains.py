"""Decide whether helper threads pay, from their recent gains and losses."""

from __future__ import annotations

CREDIT = 2e-4
"""Seconds that helpers may lose before they pause.

The first calls after a pause have to wake them up, which costs the caller some microseconds each
time.
"""
MOST_KEPT = 1e-3
"""Maximum seconds of gains that offset later losses.

A machine that becomes busy is noticed within this time and one loss.
"""
SHORTEST_PAUSE = 16.0
LONGEST_PAUSE = 256.0
"""Seconds of a pause for each second lost.

It doubles with each trial that fails, so trials cost less than one percent in the long run.
"""
MOST_SECONDS = 1.0
"""Maximum seconds of a pause. A machine that is no longer busy is noticed within this time."""


class Gains:
    """The balance of shared work: seconds gained by helper threads, less seconds lost.

    Other programs may keep the CPUs busy. A helper that is not scheduled then holds up the caller,
    for milliseconds where its task takes microseconds. One thread alone does not have this problem,
    so helpers pause whenever the balance falls below zero.
    """

    def __init__(self, credit: float = CREDIT, most_kept: float = MOST_KEPT) -> None:
        self._credit, self._most_kept = credit, most_kept
        self._balance = credit
        self._pause_per_loss = SHORTEST_PAUSE
        self._resume_at = float("-inf")

    def are_paused(self, now: float) -> bool:
        """Return whether to work without helpers at the time ``now``, in seconds."""
        return now < self._resume_at

    def add(self, gained: float, now: float) -> None:
        """Add the seconds that shared work was faster than one thread (negative if slower)."""
        self._balance += gained
        if self._balance >= self._most_kept:
            self._balance = self._most_kept
            self._pause_per_loss = SHORTEST_PAUSE
        elif self._balance < 0:
            lost = self._credit - self._balance
            self._resume_at = now + min(lost * self._pause_per_loss, MOST_SECONDS)
            self._pause_per_loss = min(2 * self._pause_per_loss, LONGEST_PAUSE)
            self._balance = self._credit
