"""A fixed set of blocks with reference counts."""


class BlockPool:
    """``num_blocks`` blocks, 0 … num_blocks - 1, each free or held by some number of holders.

    A block returns to the free list only when `decref` brings its count to zero. Counting errors
    are our own bugs, so they are asserted: they raise at once and cost nothing under python -O.
    """

    def __init__(self, num_blocks: int) -> None:
        self._refcounts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # taken from the end: block 0 first

    @property
    def num_blocks(self) -> int:
        return len(self._refcounts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def refcount(self, block_id: int) -> int:
        """How many holders the block has; 0 for a free block."""
        return self._refcounts[block_id]

    def allocate(self) -> int | None:
        """A free block, now with one holder, or None when there is none."""
        return self.take() if self._free else None

    def take(self) -> int:
        """`allocate` for a caller who knows that a block is free."""
        block_id = self._free.pop()
        assert self._refcounts[block_id] == 0, f"block {block_id} is free and held"
        self._refcounts[block_id] = 1
        return block_id

    def incref(self, *block_ids: int) -> None:
        """Add a holder to blocks that have one already."""
        refcounts = self._refcounts
        for block_id in block_ids:
            assert refcounts[block_id] > 0, f"incref of free block {block_id}"
            refcounts[block_id] += 1

    def decref(self, *block_ids: int) -> None:
        """Take a holder away from each; without any left a block is free."""
        refcounts = self._refcounts
        for block_id in block_ids:
            assert refcounts[block_id] > 0, f"decref of free block {block_id}"
            refcounts[block_id] -= 1
            if refcounts[block_id] == 0:
                self._free.append(block_id)

    def check_invariants(self) -> None:
        """Assert that the free list is exactly the blocks without a holder."""
        unheld = {i for i, count in enumerate(self._refcounts) if count == 0}
        assert len(self._free) == len(unheld), "a block is on the free list twice"
        assert set(self._free) == unheld, "the free list and the counts disagree"
        assert min(self._refcounts, default=0) >= 0, "a count is negative"
