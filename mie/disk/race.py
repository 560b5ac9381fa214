"""Decide whether reading blocks beats computing them."""

from __future__ import annotations

FADE = 0.9
"""A lost race multiplies the measured time of reading, so that a slow disk is tried again."""


class Race:
    """The measured times of reading a byte and of computing a token.

    Bits do not depend on the winner, so clocks may decide.
    """

    def __init__(self) -> None:
        self._token_seconds: float | None = None
        self._bytes = self._seconds = 0.0

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a step. The fastest step counts."""
        time = seconds / num_tokens
        self._token_seconds = (
            time if self._token_seconds is None else min(time, self._token_seconds)
        )

    def read(self, num_bytes: int, seconds: float) -> None:
        """Note the time of a read. Late reads count more than early ones."""
        self._bytes = self._bytes / 2 + num_bytes
        self._seconds = self._seconds / 2 + seconds

    def is_lost(self, num_bytes: int, num_tokens: int) -> bool:
        """Return whether reading bytes takes longer than computing tokens.

        Reading wins until both were measured.
        """
        if self._token_seconds is None or not self._bytes:
            return False
        is_lost = num_bytes * self._seconds / self._bytes > num_tokens * self._token_seconds
        self._seconds *= FADE if is_lost else 1.0
        return is_lost
