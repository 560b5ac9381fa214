"""Manage the host pool, which keeps the blocks of preempted sequences."""

from __future__ import annotations

from mie.memory.pool import BlockPool
from mie.memory.table import BlockTable, HostTable


class SwapSpace:
    """A host pool of ``num_blocks`` blocks, and the pending block moves."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks)
        self.imports: list[tuple[int, int]] = []
        self.exports: list[tuple[int, int]] = []

    def take_out(self, table: BlockTable, num_blocks: int) -> HostTable | None:
        """Reserve host blocks for the table's first ``num_blocks`` blocks, or return None."""
        if num_blocks > self._pool.num_free:
            return None
        host_ids = [self._pool.take() for _ in range(num_blocks)]
        self.exports.extend(zip(table.block_ids, host_ids, strict=False))
        return HostTable(table.owner, host_ids, table.num_tokens)

    def take_in(
        self, host: HostTable, table: BlockTable, index: int
    ) -> tuple[tuple[int, int], ...]:
        """Swap in the blocks from ``index`` on.

        The host blocks are free at once, because a step imports before it exports.
        """
        pairs = tuple(zip(host.block_ids[index:], table.block_ids[index:], strict=False))
        self.imports.extend(pairs)
        self.free(host)
        return pairs

    def free(self, host: HostTable) -> None:
        """Free swapped-out blocks."""
        self._pool.decref(*host.block_ids)
