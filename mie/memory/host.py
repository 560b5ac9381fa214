"""Keep the blocks of swapped-out sequences in a pool on the host."""

from __future__ import annotations

from collections.abc import Sequence

from mie.base.stats.memory import MemoryStats
from mie.memory.pool import BlockPool
from mie.memory.table import BlockTable, Emit, HostTable, Moves


class HostBlocks:
    """The blocks on the host, each free or in the table of one swapped-out sequence."""

    def __init__(self, num_blocks: int, stats: MemoryStats, emit: Emit) -> None:
        self.pool = BlockPool(num_blocks)
        self._stats = stats
        self._emit = emit

    def export(self, table: BlockTable, block_ids: Sequence[int], moves: Moves) -> HostTable | None:
        """Copy the blocks of a table to the host. Return None if too few are free."""
        if len(block_ids) > self.pool.num_free:
            return None
        host_ids = tuple([self.pool.take() for _ in block_ids])
        moves.exports.extend(zip(block_ids, host_ids, strict=True))
        self._stats.num_exported += len(block_ids)
        self._emit(("export", table.owner, host_ids))
        return HostTable(table.owner, host_ids, table.num_tokens)

    def restore(self, host: HostTable, pairs: Sequence[tuple[int, int]], moves: Moves) -> None:
        """Copy each block of the host to the one beside it, and free all blocks of the host table.

        The targets may be blocks of a table that this step swaps out, because it exports first. No
        later table of this step is swapped out to the blocks that are now free.
        """
        host_ids, block_ids = (tuple([pair[side] for pair in pairs]) for side in (0, 1))
        being_read = {block_id for block_id, _ in moves.copies}
        assert being_read.isdisjoint(block_ids), "imports come before copies"
        moves.imports.extend(pairs)
        self.pool.decref(*host.block_ids)
        self._stats.num_imported += len(pairs)
        self._emit(("import", host.owner, host_ids, block_ids))

    def drop(self, host: HostTable) -> None:
        """Discard swapped-out blocks."""
        self.pool.decref(*host.block_ids)
        self._emit(("drop", host.owner))
