"""Count the blocks that layers with a sliding window need."""

from __future__ import annotations

from dataclasses import dataclass

from mie.base.arithmetic import ceil_div


@dataclass(frozen=True, kw_only=True)
class Window:
    """How far the layers with a window reach back, and how they share the blocks of a pool.

    A block holds the keys and values of as many layers as there are without a window. So the layers
    without a window have one block for ``block_size`` tokens, and the layers with a window have
    ``num_groups`` blocks.
    """

    size: int
    """Positions that a query reads, its own included: the widest of the layers' windows."""
    num_groups: int
    block_size: int
    max_chunk: int
    """Maximum number of tokens of a sequence that a step computes. It is at least 2."""

    def reach(self, position: int) -> int:
        """Return the index of the first block that queries at ``position`` and later read."""
        return max(0, position - self.size + 1) // self.block_size

    @property
    def longest(self) -> int:
        """The most entries of a table while a step computes a chunk of any length."""
        return self._most(self.max_chunk)

    @property
    def num_decoding(self) -> int:
        """The most entries of a table that is decoding, with a slot for the token after next."""
        return self._most(2)

    def _most(self, num_queries: int) -> int:
        num_seen = self.size - 1 + num_queries
        return ceil_div(num_seen - 1, self.block_size) + 1

    def num_entries(self, num_stored: int, num_tokens: int) -> int:
        """Return the most entries that a table has until all of ``num_tokens`` are computed."""
        num_left = ceil_div(num_tokens, self.block_size) - self.reach(num_stored)
        return min(num_left, self.longest)

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` tokens has at any time."""
        num_blocks = ceil_div(num_tokens, self.block_size)
        return num_blocks + self.num_groups * min(num_blocks, self.longest)

    def capacity(self, num_blocks: int) -> int:
        """Return how many tokens of one sequence fit in a pool of ``num_blocks``."""
        num_long = num_blocks - self.num_groups * self.longest
        num_short = num_blocks // (1 + self.num_groups)
        return max(num_long, min(num_short, self.longest)) * self.block_size
