"""What the allocator counted."""

from __future__ import annotations

from collections import deque

WINDOW = 1000
"""Requests over which `MemoryStats.hit_rate` looks back."""


class MemoryStats:
    """Running totals. A request's query counts once, however often its admission was tried."""

    def __init__(self) -> None:
        self.num_queried_tokens = 0
        """Prompt tokens that were looked up in the prefix cache."""
        self.num_hit_tokens = 0
        """Of these, found in full blocks; and"""
        self.num_partial_hit_tokens = 0
        """found inside a block, and copied."""
        self.num_shared_blocks = 0
        """Times that a table got a block which others hold or held, instead of a new one: by prefix
        hits, forks, and the merging of equal blocks."""
        self.num_copies = 0
        self.num_evictions = 0
        self.num_exported = 0
        """Blocks swapped out to the host; and"""
        self.num_imported = 0
        """swapped in."""
        self._window: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def add_query(self, num_queried: int, num_full: int, num_partial: int) -> None:
        """A request was admitted for the first time."""
        self.num_queried_tokens += num_queried
        self.num_hit_tokens += num_full
        self.num_partial_hit_tokens += num_partial
        self._window.append((num_queried, num_full + num_partial))

    def reset_hit_rate(self) -> None:
        """Begin the window of `hit_rate` anew; the totals go on."""
        self._window.clear()

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were hits, over the last `WINDOW` requests since the
        prefix cache was reset; 0 … 1."""
        queried = sum(query for query, _ in self._window)
        return sum(hit for _, hit in self._window) / queried if queried else 0.0
