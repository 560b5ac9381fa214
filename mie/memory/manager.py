"""Manage block tables, the prefix cache, and the device and host pools behind one interface."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from mie.base.arithmetic import ceil_div
from mie.base.stats.memory import MemoryStats
from mie.memory.pool import BlockPool
from mie.memory.prefix import Allocation, Node, PrefixCache
from mie.memory.table import BlockTable, Emit, HostTable, Moves, Owner
from mie.memory.tiers.host import HostBlocks

if TYPE_CHECKING:
    from mie.memory.layers.part import BlockPart, Part

P = TypeVar("P")


class KVCacheManager:
    """Opens, grows, forks, swaps and closes the block tables of sequences.

    A block is held by the tables that contain it, by the prefix cache, and, during a step, by the
    copy that reads it. At all times free + cached (held by the prefix cache alone) + used =
    num_blocks.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        parts: Sequence[Part] = (),
        *,
        enable_prefix_caching: bool = True,
        partial_block_sharing: bool = True,
        max_cached_blocks: int | None = None,
        num_host_blocks: int = 0,
        emit: Emit = lambda record: None,
    ) -> None:
        """Manage ``num_blocks`` blocks, and the memory of other layers in ``parts``.

        A part holds the memory of layers with a window, or of recurrent layers. With parts, only
        full blocks are shared.
        """
        self.block_size, self.num_blocks = block_size, num_blocks
        self.num_host_blocks = num_host_blocks
        self.parts = tuple(parts)
        self.stats, self.emit = MemoryStats(), emit
        self.shares_full = enable_prefix_caching
        self._shares_partial = enable_prefix_caching and partial_block_sharing and not parts
        self.max_cached = num_blocks if max_cached_blocks is None else max_cached_blocks
        self.reset()

    def reset(self) -> None:
        """Drop all tables and cached blocks in any state. ``stats`` keeps counting."""
        self.pool = BlockPool(self.num_blocks)
        self.host = HostBlocks(self.num_host_blocks, self.stats, self.emit)
        # Without prefix caching, the tree has only empty roots.
        self.prefix = PrefixCache(self.block_size, self.pool, self.stats, self.emit)
        self._moves = Moves()
        # Sums over all open tables. A last block that several tables share counts for each of them.
        # The third number is how many of its empty slots are counted too often.
        self._num_entries = self._num_stored = self._num_counted_twice = 0
        self.block_parts: list[BlockPart] = []
        """The parts that take blocks of the pool."""
        for part in self.parts:
            part.reset(self)

    def part(self, kind: type[P]) -> P | None:
        """Return the part of that class, or None if the model has no such layers."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    # Numbers.

    @property
    def num_cached(self) -> int:
        """The number of blocks that only the prefix cache holds."""
        return self.pool.num_cached

    @property
    def num_available(self) -> int:
        """The number of blocks that a table can get: free and cached ones, without reservations."""
        pool = self.pool
        return pool.num_free + pool.num_cached - pool.num_reserved

    @property
    def num_used(self) -> int:
        """The number of blocks that are in a table or are being copied from."""
        return self.num_blocks - self.pool.num_free - self.pool.num_cached

    @property
    def num_saved(self) -> int:
        """The number of blocks saved by sharing: table entries minus distinct blocks in tables."""
        pinned = [block_id for block_id, node in self.prefix.pinned if node is not None]
        alone = {b for b in pinned if self.pool.refcount(b) == 1 + pinned.count(b)}
        num_entries = self._num_entries + sum([part.num_held for part in self.block_parts])
        return num_entries - (self.num_used - len(alone))

    @property
    def num_slots_empty(self) -> int:
        """The number of slots in used blocks that hold no token (internal fragmentation)."""
        num_slots = self._num_entries * self.block_size
        return num_slots - self._num_stored - self._num_counted_twice

    @property
    def capacity(self) -> int:
        """The maximum number of tokens of one sequence."""
        size, counts = self.block_size, range(1, self.num_blocks + 1)
        needed = lambda count: self.blocks_needed(count * size)  # noqa: E731
        return bisect_right(counts, self.num_blocks, key=needed) * size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` tokens need, rounded up."""
        return ceil_div(num_tokens, self.block_size)

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` tokens has at any time."""
        return self.blocks_for(num_tokens) + self._needed_by_parts(0, num_tokens)

    def _needed_by_parts(
        self, num_stored: int, num_tokens: int, table: BlockTable | None = None
    ) -> int:
        count = 0
        for part in self.block_parts:
            count += part.num_needed(num_stored, num_tokens, table)
        return count

    @property
    def blocks_per_fork(self) -> int:
        """Maximum number of blocks that a fork takes before more blocks need a preemption."""
        return 1 + sum([part.num_per_fork for part in self.block_parts])

    # Opening.

    def find_allocation(
        self,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        use_cache: bool = True,
        host: HostTable | None = None,
        num_reserved: int = 0,
    ) -> Allocation | None:
        """Find blocks for a table of all the tokens, or return None if there are too few.

        Nothing is allocated. After `open_table`, ``num_reserved`` blocks would still be available.
        The table shares the longest cached run of full blocks. It also copies the cached block that
        shares the longest prefix with the next tokens. Swapped-out blocks are restored from
        ``host`` where the cache does not have them. At least the last token is left to compute, so
        that there are logits.
        """
        limit = len(token_ids) - 1
        path: list[Node] = []
        partial = None
        if use_cache and self.shares_full:
            path = self._usable(self.prefix.match(token_ids, limit, salt), host)
            if self._shares_partial and host is None:
                partial = self.prefix.match_inside(path, token_ids, limit, salt)
        num_computed = len(path) * self.block_size
        if host is not None:
            num_computed = max(num_computed, host.num_tokens)
        num_new = self.blocks_for(len(token_ids)) - len(path)
        num_taken = num_new + len(self.prefix.unheld_end(path))
        num_taken += self._needed_by_parts(num_computed, len(token_ids))
        num_left = self.num_available - num_reserved - num_taken
        if num_left < 0:
            return None
        if partial and partial.node in self.prefix.unheld and num_left == 0:
            partial = None  # it is pinned for its copy, so it is unavailable as a block
        num_computed += partial.num_tokens if partial else 0
        return Allocation(token_ids, salt, path, partial, host, num_computed, num_new, num_taken)

    def _usable(self, path: list[Node], host: HostTable | None) -> list[Node]:
        """Return the longest beginning of a cached path that suits every part."""
        length = -1
        while len(path) != length:
            length = len(path)
            for part in self.parts:
                path = part.usable(path, host)
        return path

    def open_table(
        self,
        allocation: Allocation,
        owner: Owner,
        row: int,
        notes: dict[str, list[int]] | None = None,
    ) -> BlockTable:
        """Open the table that `find_allocation` just found, with blocks for all its tokens.

        All tables of a request share its ``notes``. Parts write and read them.
        """
        path, partial, host = allocation.path, allocation.partial, allocation.host
        table = BlockTable(owner, row, allocation.token_ids)
        self._put("share", table, 0, self.prefix.hold(*path))
        table.num_committed = len(path)
        self.prefix.enter(table, path[-1] if path else self.prefix.root(allocation.salt))
        for part in self.parts:
            part.reserve(table, allocation)
        if partial:  # pin before allocating, because allocating can evict it
            self.prefix.pin(partial)
        self._alloc(table, len(path), allocation.num_new)
        if partial:
            self.copy(partial.block_id, table.block_ids[len(path)], table, "prefix")
        if host:
            targets = self._restored(table, allocation) if allocation.is_imported else []
            self.host.restore(host, targets, self._moves)
        table.num_tokens = allocation.num_computed
        self._num_stored += table.num_tokens
        for part in self.parts:
            part.open(table, allocation, {} if notes is None else notes)
        return table

    def fork(
        self, table: BlockTable, owner: Owner, row: int, token_ids: Sequence[int]
    ) -> BlockTable:
        """Open a second table over the same blocks, including a partial last block.

        The table must have run since its last copy or import, and have no empty blocks.
        ``token_ids`` must begin with its stored tokens.
        """
        assert table.node is not None, "the table is closed"
        assert table.has_run, "cannot fork blocks whose copy or import is only planned"
        assert len(table.block_ids) == self.blocks_for(table.num_tokens), "cannot fork empty blocks"
        fork = BlockTable(owner, row, token_ids)
        self.pool.incref(*table.block_ids)
        self._moves.updates.append((row, 0, tuple(table.block_ids)))
        fork.block_ids = list(table.block_ids)
        self._num_entries += len(fork.block_ids)
        self.stats.num_shared_blocks += len(fork.block_ids)
        self._num_stored += table.num_tokens
        self._num_counted_twice += self._num_empty_in_last(table)
        fork.num_tokens = fork.num_writable = table.num_writable = table.num_tokens
        fork.num_committed, fork.has_run = table.num_committed, table.has_run
        self.prefix.enter(fork, table.node)
        for part in self.parts:
            part.fork(table, fork)
        return fork

    # Growing and filling.

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Grow the table to hold ``num_tokens`` tokens. Return False, unchanged, if blocks run out.

        The next token's block is about to be written. If it has other holders, it is replaced by a
        copy: allocate, copy, release. The last holder keeps the original.
        """
        assert table.node is not None, "the table is closed"
        index = table.num_tokens // self.block_size
        is_shared = (
            table.num_tokens < num_tokens
            and table.num_writable == table.num_tokens
            and index < len(table.block_ids)
            and self.pool.refcount(table.block_ids[index]) > 1
        )
        num_new = max(0, self.blocks_for(num_tokens) - len(table.block_ids))
        num_needed = self._needed_by_parts(table.num_tokens, num_tokens, table)
        if num_new + is_shared + num_needed > self.num_available:
            return False
        if is_shared:
            shared = table.block_ids[index]
            self._num_counted_twice -= self._num_empty_in_last(table)
            self._alloc(table, index, 1)
            self.copy(shared, table.block_ids[index], table, "fork")
            table.has_run = False
            self._release(table, shared)
        self._alloc(table, len(table.block_ids), num_new)
        table.num_writable = len(table.block_ids) * self.block_size
        for part in self.block_parts:
            part.grow(table, num_tokens)
        return True

    def reserve_drafts(self, table: BlockTable, num_tokens: int) -> bool:
        """Grow the table to hold draft tokens too, until `settle`.

        Return False, unchanged, if blocks run out, or a part cannot keep its contents.
        """
        if num_tokens > table.num_writable and not self.grow(table, num_tokens):
            return False
        is_kept = [part.keep(table) for part in self.parts]
        if not all(is_kept):
            self._trim(table, self.blocks_for(table.num_tokens + 1))
        return all(is_kept)

    def settle(self, table: BlockTable, num_tokens: int, *, is_whole: bool) -> None:
        """Keep the first ``num_tokens`` tokens of a step with drafts, and release unused blocks.

        If some of the step's tokens are dropped (not ``is_whole``), a part may drop them all.
        """
        table.has_run = True
        is_kept = [part.settle(table, is_whole=is_whole) for part in self.parts]
        if not all(is_kept):
            num_tokens = table.num_tokens
        self._trim(table, self.blocks_for(num_tokens))
        if num_tokens > table.num_tokens:
            self.commit(table, num_tokens)

    def _trim(self, table: BlockTable, num_blocks: int) -> None:
        """Release the empty blocks after the first ``num_blocks``."""
        empty = table.block_ids[num_blocks:]
        if not empty:
            return
        for part in self.block_parts:
            part.trim(table, num_blocks)
        del table.block_ids[num_blocks:]
        self._num_entries -= len(empty)
        table.num_writable = num_blocks * self.block_size
        self.emit(("trim", table.owner, num_blocks))
        self.pool.decref(*empty)

    def chunk_limit(self, table: BlockTable, count: int) -> int:
        """Return how many of the next ``count`` tokens a step may compute."""
        for part in self.parts:
            count = part.limit(table, count)
        return count

    def advance(self, tables: Sequence[BlockTable]) -> None:
        """Record one more stored token for each table. This is `commit` for a step's decodes.

        The full blocks of earlier tokens must be published. `commit` has done that.
        """
        size, parts = self.block_size, self.parts
        self._num_stored += len(tables)
        for table in tables:
            table.num_tokens += 1
            table.has_run = True
            if not table.num_tokens % size:
                self._publish(table)
            for part in parts:
                part.commit(table)

    def commit(self, table: BlockTable, num_tokens: int) -> None:
        """Record that the first ``num_tokens`` tokens are stored, and publish the blocks they fill.

        If another sequence published the same tokens first, the table switches to that block and
        releases its own.
        """
        assert table.node is not None, "the table is closed"
        assert num_tokens <= len(table.block_ids) * self.block_size, "stored beyond the table"
        self._num_stored += num_tokens - table.num_tokens
        table.num_tokens = num_tokens
        table.has_run = True
        self._publish(table)
        for part in self.parts:
            part.commit(table)

    def _publish(self, table: BlockTable) -> None:
        """Insert the new full blocks of a table in the prefix cache, or switch to equal ones."""
        if not self.shares_full:
            return
        size, node = self.block_size, table.node
        assert node is not None
        for index in range(table.num_committed, table.num_tokens // size):
            tokens = tuple(table.token_ids[index * size : (index + 1) * size])
            child = node.children.get(tokens)
            own = table.block_ids[index]
            if child is None:
                child = self.prefix.insert(node, tokens, own)
            else:
                self._put("share", table, index, self.prefix.hold(child))
                self._release(table, own)
            node = child
            table.num_committed += 1
        if node is not table.node:
            self.prefix.enter(table, node)

    # Leaving and swapping.

    def close_table(self, table: BlockTable) -> None:
        """Release every block. Blocks in the prefix cache stay there until they are evicted."""
        assert table.node is not None, "closed twice"
        assert not self.prefix.pinned, "closed with pending copies"
        for part in self.parts:
            part.close(table)
        if table.block_ids and self.pool.refcount(table.block_ids[-1]) > 1:
            self._num_counted_twice -= self._num_empty_in_last(table)
        self._num_entries -= len(table.block_ids)
        self._num_stored -= table.num_tokens
        self.emit(("close", table.owner))
        self.pool.decref(*table.block_ids)
        self.prefix.offer(table.node)
        self.prefix.leave(table)
        self.pool.evict(self.num_cached - self.max_cached)
        table.block_ids = []

    def reset_prefix_cache(self) -> bool:
        """Drop the cached blocks and the hit rate. Return False, unchanged, if tables are open."""
        if self._num_entries:
            return False
        self.pool.evict(self.num_cached)
        self.stats.reset_hit_rate()
        return True

    def swap_out(self, table: BlockTable) -> HostTable | None:
        """Swap out a table's stored tokens, including tokens in shared blocks.

        Return None if the host pool is too full. The table stays open, so the caller must close it.
        """
        assert table.node is not None, "the table is closed"
        stored = table.block_ids[: self.blocks_for(table.num_tokens)]
        for part in self.parts:
            own = part.stored(table)
            if own is None:
                return None
            stored += own
        table.host = self.host.export(table, stored, self._moves)
        return table.host

    def _restored(self, table: BlockTable, allocation: Allocation) -> list[int]:
        """Return the blocks of a new table that the last blocks on the host are copied to."""
        num_tokens = allocation.num_computed
        block_ids = table.block_ids[len(allocation.path) : self.blocks_for(num_tokens)]
        for part in self.block_parts:
            block_ids += part.restored(table, num_tokens)
        return block_ids

    def take_moves(self) -> Moves:
        """Return the moves that must happen before the step computes. Each is returned once."""
        moves, self._moves = self._moves, Moves()
        moves.parts = {part.name: part.take_moves() for part in self.parts}
        return moves

    def end_step(self, *, has_moved: bool = True) -> None:
        """Unpin the blocks that the moves read. A broken step may not have made the moves."""
        for part in self.parts:
            part.end_step(has_moved=has_moved)
        self._moves = Moves()
        self.pool.num_steps += 1
        self.prefix.unpin()

    # Parts of the above.

    def _put(self, kind: str, table: BlockTable, index: int, block_ids: tuple[int, ...]) -> None:
        """Set the table's entries index, index + 1, … to blocks that the table now holds."""
        if not block_ids:
            return
        self._num_entries += max(0, index + len(block_ids) - len(table.block_ids))
        table.block_ids[index : index + len(block_ids)] = block_ids
        table.num_writable = len(table.block_ids) * self.block_size
        self._moves.updates.append((table.row, index, block_ids))
        if kind == "share":
            self.stats.num_shared_blocks += len(block_ids)
        self.emit((kind, table.owner, index, block_ids))

    def _alloc(self, table: BlockTable, index: int, count: int) -> None:
        self.pool.make_free(count)
        last = table.block_ids[-1] if table.block_ids else None
        self._put("alloc", table, index, self.pool.take_run(count, last))

    def copy(self, source: int, target: int, table: BlockTable, cause: str) -> None:
        """Plan the copy of a block to a new block of a table."""
        self._moves.copies.append((source, target))
        self.emit(("copy", source, target, table.owner, cause))
        self.stats.num_copies += 1
        table.num_copies += 1

    def _release(self, table: BlockTable, block_id: int) -> None:
        self.emit(("release", table.owner, (block_id,)))
        self.pool.decref(block_id)

    def _num_empty_in_last(self, table: BlockTable) -> int:
        return -table.num_tokens % self.block_size
