"""Allocate from a fixed set of blocks with reference counts."""

from typing import Protocol

REGION = 16
"""Size of a region. A new table starts in a wholly free region if possible, so it can grow."""


class Cache(Protocol):
    """Blocks that stay only until a table needs them, counted in `BlockPool.num_cached`."""

    @property
    def oldest(self) -> int | None:
        """The step in which the next block to evict was released, or None without a block."""

    def evict(self) -> int:
        """Release the blocks that were used least recently, and return their number."""


class BlockPool:
    """A pool of ``num_blocks`` blocks, 0 … num_blocks - 1, each free or held.

    A block returns to the free list only when `decref` brings its count to zero. Counting errors
    are our own bugs, so they are asserted: they raise at once and cost nothing under python -O.

    The pool prefers contiguous blocks, because some backends read a run of blocks faster than
    scattered ones. Block i + 1 follows block i if it is free, and a table begins in a region that
    is wholly free. All operations take amortised constant time.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.caches: list[Cache] = []
        """The caches that blocks are evicted from. Of equally old blocks, the first cache's go."""
        self.num_cached = 0
        """Number of blocks that only caches hold."""
        self.num_steps = 0
        """Number of steps so far. Caches order their blocks by it."""
        self.num_reserved = 0
        """Number of blocks that open tables will take later and must find."""
        self._refcounts = [0] * num_blocks
        # Ordered sets. The last freed is taken first, and lower ids come first at the start.
        self._free = dict.fromkeys(reversed(range(num_blocks)))
        self._free_regions = dict.fromkeys(reversed(range(num_blocks // REGION)))
        self._num_held = [0] * (num_blocks // REGION + 1)  # number of held blocks by region

    @property
    def num_free(self) -> int:
        """The number of free blocks."""
        return len(self._free)

    def refcount(self, block_id: int) -> int:
        """Return the number of holders of the block, or 0 for a free block."""
        return self._refcounts[block_id]

    def take(self, after: int | None = None) -> int:
        """Allocate a block with one holder, next to block ``after`` if possible.

        Without ``after`` the block begins a new run. The caller checks that a block is free.
        """
        block_id = self._begin() if after is None else after + 1
        if block_id is not None and block_id in self._free:
            del self._free[block_id]
        else:
            block_id, _ = self._free.popitem()
        assert self._refcounts[block_id] == 0, f"block {block_id} is both free and held"
        self._refcounts[block_id] = 1
        self._num_held[block_id // REGION] += 1
        self._free_regions.pop(block_id // REGION, None)
        return block_id

    def take_run(self, count: int, after: int | None) -> tuple[int, ...]:
        """Allocate free blocks, each next to the block before it if possible."""
        return tuple([after := self.take(after) for _ in range(count)])

    def make_free(self, count: int) -> None:
        """Evict until ``count`` blocks are free. The caller checks that enough are available."""
        self.evict(count - self.num_free)

    def evict(self, count: int) -> None:
        """Evict at least ``count`` cached blocks, the least recently used first."""
        while count > 0:
            ages = [cache.oldest for cache in self.caches]
            age = min([age for age in ages if age is not None])
            count -= self.caches[ages.index(age)].evict()

    def _begin(self) -> int | None:
        """Return the first block of a wholly free region, or None."""
        return self._free_regions.popitem()[0] * REGION if self._free_regions else None

    def incref(self, *block_ids: int) -> None:
        """Add a holder to blocks that already have one."""
        refcounts = self._refcounts
        for block_id in block_ids:
            assert refcounts[block_id] > 0, f"incref of free block {block_id}"
            refcounts[block_id] += 1

    def decref(self, *block_ids: int) -> None:
        """Remove a holder from each block. A block without holders is free."""
        refcounts = self._refcounts
        for block_id in block_ids:
            assert refcounts[block_id] > 0, f"decref of free block {block_id}"
            refcounts[block_id] -= 1
            if refcounts[block_id] == 0:
                self._free[block_id] = None
                region = block_id // REGION
                self._num_held[region] -= 1
                if self._num_held[region] == 0 and (region + 1) * REGION <= self.num_blocks:
                    self._free_regions[region] = None
