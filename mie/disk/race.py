"""Decide whether reading blocks beats computing them."""

from __future__ import annotations

import math

WINDOW = 64 << 20
"""Bytes of the latest reads that count. So one small read that had to wait decides nothing."""
SECONDS_PER_BYTE = 1e-9
"""The time of reading that is assumed at first."""
FADE = 0.9
"""A lost race multiplies the measured time of reading, so that a slow disk is tried again."""


class Race:
    """The measured times of reading a byte and of computing a token.

    Bits do not depend on the winner, so clocks may decide.
    """

    def __init__(self) -> None:
        self._token_seconds = math.inf
        self._byte_seconds = SECONDS_PER_BYTE

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Note the time of a step. The fastest step counts."""
        self._token_seconds = min(self._token_seconds, seconds / num_tokens)

    def read(self, num_bytes: int, seconds: float) -> None:
        """Note the time of a read. A read counts in proportion to the bytes."""
        if num_bytes:
            part = min(1.0, num_bytes / WINDOW)
            self._byte_seconds += part * (seconds / num_bytes - self._byte_seconds)

    def is_lost(self, num_bytes: int, num_tokens: int) -> bool:
        """Return whether reading bytes takes longer than computing tokens.

        Reading wins until a step was measured.
        """
        is_lost = num_bytes * self._byte_seconds > num_tokens * self._token_seconds
        self._byte_seconds *= FADE if is_lost else 1.0
        return is_lost
