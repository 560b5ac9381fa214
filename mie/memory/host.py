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

    def restore(
        self,
        host: HostTable,
        table: BlockTable,
        host_ids: Sequence[int],
        block_ids: Sequence[int],
        moves: Moves,
    ) -> None:
        """Copy some of a sequence's blocks on the host to blocks of its table, and free them all.

        The targets may be blocks of a table that this step swaps out, because it exports first. No
        later table of this step is swapped out to the blocks that are now free.
        """
        being_read = {block_id for block_id, _ in moves.copies}
        assert being_read.isdisjoint(block_ids), "imports come before copies"
        moves.imports.extend(zip(host_ids, block_ids, strict=True))
        self.pool.decref(*host.block_ids)
        self._stats.num_imported += len(host_ids)
        self._emit(("import", table.owner, tuple(host_ids), tuple(block_ids)))

    def drop(self, host: HostTable) -> None:
        """Discard swapped-out blocks."""
        self.pool.decref(*host.block_ids)
        self._emit(("drop", host.owner))
