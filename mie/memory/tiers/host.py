"""Keep the blocks of swapped-out sequences in a pool on the host."""

from __future__ import annotations

from collections.abc import Sequence

from mie.base.stats.memory import MemoryStats
from mie.memory.pool import BlockPool
from mie.memory.table import BlockTable, Emit, HostTable, Moves, Owner


class HostBlocks:
    """The blocks on the host, each free or in the table of one swapped-out sequence."""

    def __init__(self, num_blocks: int, stats: MemoryStats, emit: Emit) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: dict[HostTable, None] = {}
        """The tables of swapped-out sequences (a dict keeps their order)."""
        self._stats = stats
        self._emit = emit

    def export(self, table: BlockTable, block_ids: Sequence[int], moves: Moves) -> HostTable | None:
        """Copy the blocks of a table to the host. Return None if too few are free."""
        host = self._take(table.owner, len(block_ids), table.num_tokens)
        if host is not None:
            moves.exports.extend(zip(block_ids, host.block_ids, strict=True))
            self._stats.num_exported += len(block_ids)
            self._emit(("export", table.owner, host.block_ids))
        return host

    def receive(self, owner: Owner, num_blocks: int, num_tokens: int) -> HostTable | None:
        """Take blocks for tokens that come from elsewhere. Return None if too few are free."""
        host = self._take(owner, num_blocks, num_tokens)
        if host is not None:
            self._emit(("read", owner, host.block_ids, num_tokens))
        return host

    def _take(self, owner: Owner, num_blocks: int, num_tokens: int) -> HostTable | None:
        if num_blocks > self.pool.num_free:
            return None
        host = HostTable(owner, tuple([self.pool.take() for _ in range(num_blocks)]), num_tokens)
        self.tables[host] = None
        return host

    def restore(self, host: HostTable, block_ids: Sequence[int], moves: Moves) -> None:
        """Copy the last blocks of the host table to ``block_ids``, and free all of them.

        These may be blocks of a table that this step swaps out, because it exports first. No later
        table of this step is swapped out to the blocks of the host that are now free.
        """
        host_ids = host.block_ids[len(host.block_ids) - len(block_ids) :]
        being_read = {block_id for block_id, _ in moves.copies}
        assert being_read.isdisjoint(block_ids), "imports come before copies"
        moves.imports.extend(zip(host_ids, block_ids, strict=True))
        self._free(host)
        self._stats.num_imported += len(block_ids)
        self._emit(("import", host.owner, host_ids, tuple(block_ids)))

    def drop(self, host: HostTable) -> None:
        """Discard swapped-out blocks."""
        self._free(host)
        self._emit(("drop", host.owner))

    def _free(self, host: HostTable) -> None:
        del self.tables[host]
        self.pool.decref(*host.block_ids)
        for pool, slot in host.slots:
            pool.decref(slot)
