"""Count the lookups, copies and evictions of the allocator."""

from __future__ import annotations

from collections import deque

WINDOW = 1000
"""Number of most recent requests that `MemoryStats.hit_rate` covers."""


class MemoryStats:
    """Running totals. A request's lookup counts once, however often its admission is retried."""

    def __init__(self) -> None:
        self.num_queried_tokens = 0
        """Prompt tokens that were looked up in the prefix cache."""
        self.num_hit_tokens = 0
        """Queried tokens that were found in full blocks."""
        self.num_partial_hit_tokens = 0
        """Queried tokens that were found inside a block and copied."""
        self.num_shared_blocks = 0
        """Times that a table got an existing block instead of a new one.

        Prefix hits, forks and the merging of equal blocks count.
        """
        self.num_copies = 0
        self.num_evictions = 0
        self.num_exported = 0
        """Blocks that were swapped out to the host."""
        self.num_imported = 0
        """Blocks that were swapped in from the host."""
        self.num_snapshots = 0
        """Snapshots of recurrent states that were taken."""
        self.num_snapshot_evictions = 0
        self._window: deque[tuple[int, int]] = deque(maxlen=WINDOW)

    def add_query(self, num_queried: int, num_full: int, num_partial: int) -> None:
        """Record the lookup of a request that was admitted for the first time."""
        self.num_queried_tokens += num_queried
        self.num_hit_tokens += num_full
        self.num_partial_hit_tokens += num_partial
        self._window.append((num_queried, num_full + num_partial))

    def reset_hit_rate(self) -> None:
        """Clear the window of `hit_rate`. The totals are kept."""
        self._window.clear()

    @property
    def hit_rate(self) -> float:
        """The fraction of queried tokens that were hits (0 … 1).

        It covers the last `WINDOW` requests, or those since the prefix cache was reset.
        """
        queried = sum(query for query, _ in self._window)
        return sum(hit for _, hit in self._window) / queried if queried else 0.0
