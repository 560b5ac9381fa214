"""Describe the place where a prompt departs from the prefix cache."""

from typing import NamedTuple


class Departure(NamedTuple):
    """The first token that is not cached, and the reason."""

    position: int
    """Position of the token in the prompt."""
    num_prompt: int
    """Number of tokens of the prompt."""
    reason: str
    """One of `REASONS`."""
    cached: tuple[int, ...]
    """The next tokens of the cached prompt that is nearest, if the reason is "other tokens"."""
    got: tuple[int, ...]
    """The next tokens of the prompt."""
    nearest: int | None = None
    """The block that has the tokens of the cached prompt."""


REASONS = (
    "other tokens",
    "evicted",
    "other salt",
    "window passed",
    "no snapshot",
    "slow disk",
    "new",
)
"""Why a prompt departs from the cache.

A cached prompt goes on with other tokens; the next block was evicted; it is there for another salt;
a block of layers with a window was let go; no state was kept there;
it is on a disk, and computing it is faster than reading it; or nothing follows.
"""
