"""Manage block tables, the prefix cache, and the device and host pools behind one interface."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from mie.base.arithmetic import ceil_div
from mie.base.stats.memory import MemoryStats
from mie.memory.host import HostBlocks
from mie.memory.pool import BlockPool
from mie.memory.prefix import Node, PartialMatch, PrefixCache, Room, block_of
from mie.memory.table import BlockTable, Emit, HostTable, Moves, Owner


class KVCacheManager:
    """Opens, grows, forks, swaps and closes the block tables of sequences.

    A block is held by the tables that contain it, by the prefix cache, and, during a step, by the
    copy that reads it. At all times free + cached (held by the prefix cache alone) + used =
    num_blocks.
    """

    blocks_of_twin = 1  # that a fork may take before it asks for more
    num_claimed = 0  # blocks that open tables will take without asking

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        partial_block_sharing: bool = True,
        max_cached_blocks: int | None = None,
        num_host_blocks: int = 0,
        emit: Emit = lambda record: None,
    ) -> None:
        self.block_size, self.num_blocks = block_size, num_blocks
        self.stats, self._emit = MemoryStats(), emit
        self._num_host_blocks = num_host_blocks
        self.shares_full = enable_prefix_caching
        self._shares_partial = enable_prefix_caching and partial_block_sharing
        self._max_cached = num_blocks if max_cached_blocks is None else max_cached_blocks
        self.reset()

    def reset(self) -> None:
        """Drop all tables and cached blocks in any state. ``stats`` keeps counting."""
        self._pool = BlockPool(self.num_blocks)
        self._host = HostBlocks(self._num_host_blocks, self.stats, self._emit)
        self._prefix = PrefixCache(self.block_size)  # without prefix caching, only empty roots
        self._moves = Moves()
        self._pinned: list[tuple[int, Node | None]] = []
        self._num_steps = 0
        # Sums over all open tables. A last block that several tables share counts for each of them.
        # The third number is how many of its empty slots are counted too often.
        self._num_entries = self._num_stored = self._num_counted_twice = 0

    @property
    def num_cached(self) -> int:
        """The number of blocks that only the prefix cache holds."""
        return len(self._prefix.unheld)

    @property
    def num_available(self) -> int:
        """The number of blocks that a table can get beyond all claims: free and cached ones."""
        return self._pool.num_free + self.num_cached - self.num_claimed

    @property
    def num_used(self) -> int:
        """The number of blocks that are in a table or are being copied from."""
        return self.num_blocks - self._pool.num_free - self.num_cached

    @property
    def num_saved(self) -> int:
        """The number of blocks saved by sharing: table entries minus distinct blocks in tables."""
        pinned = [block_id for block_id, node in self._pinned if node is not None]
        alone = {b for b in pinned if self._pool.refcount(b) == 1 + pinned.count(b)}
        return self._num_entries - (self.num_used - len(alone))

    @property
    def num_slots_empty(self) -> int:
        """The number of slots in used blocks that hold no token (internal fragmentation)."""
        reserved = self._num_entries * self.block_size
        return reserved - self._num_stored - self._num_counted_twice

    @property
    def capacity(self) -> int:
        """The maximum number of tokens of one sequence."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` tokens need, rounded up."""
        return ceil_div(num_tokens, self.block_size)

    def blocks_needed(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` tokens has at any time."""
        return self.blocks_for(num_tokens)

    def find_room(
        self,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        use_cache: bool = True,
        host: HostTable | None = None,
        num_spare: int = 0,
    ) -> Room | None:
        """Find blocks for a table of all the tokens, with ``num_spare`` blocks left over.

        Return None if there are too few. Nothing is allocated. The table shares the longest cached
        run of full blocks. It also copies the cached block that shares the longest prefix with the
        next tokens. Swapped-out blocks are restored from ``host`` where the cache does not have
        them. At least the last token is left to compute, so that there are logits.
        """
        limit = len(token_ids) - 1
        path: list[Node] = []
        partial = None
        if use_cache and self.shares_full:
            path = self._usable(self._prefix.match(token_ids, limit, salt), host)
            if self._shares_partial and host is None:
                partial = self._prefix.match_inside(path, token_ids, limit, salt)
        num_computed = len(path) * self.block_size
        if host:
            num_computed = max(num_computed, host.num_tokens)
        num_new = self.blocks_for(len(token_ids)) - len(path)
        num_claimed = self._num_claimed_by(num_computed, len(token_ids))
        num_taken = num_new + num_claimed + len(self._prefix.unheld_end(path))
        num_left = self.num_available - num_spare - num_taken
        if num_left < 0:
            return None
        if partial and partial.node in self._prefix.unheld and num_left == 0:
            partial = None  # it is pinned for its copy, so it is unavailable as a block
        num_computed += partial.num_tokens if partial else 0
        return Room(token_ids, salt, path, partial, host, num_computed, num_new, num_taken)

    def _usable(self, path: list[Node], host: HostTable | None) -> list[Node]:
        """Return the part of a cached path that a table can share."""
        return path

    def _num_claimed_by(self, num_stored: int, num_tokens: int) -> int:
        """Return how many blocks a table may take later without asking."""
        return 0

    def open_table(self, room: Room, owner: Owner, row: int) -> BlockTable:
        """Open the table that `find_room` just found, with blocks for all its tokens."""
        table = BlockTable(owner, row, room.token_ids)
        self._put("share", table, 0, self._hold(*room.path))
        table.num_committed = len(room.path)
        self._prefix.enter(table, room.path[-1] if room.path else self._prefix.root(room.salt))
        if room.partial:  # pin before allocating, because allocating can evict it
            self._pin(room.partial)
        index = len(table.block_ids)
        self._alloc(table, index, room.num_new)
        if room.partial:
            self._copy(room.partial.block_id, table.block_ids[index], table, "prefix")
        if room.host:
            self._host.restore(room.host, self._swapped_in(room.host, table, index), self._moves)
        table.num_tokens = room.num_computed
        self._num_stored += room.num_computed
        return table

    def open_state(self, table: BlockTable, room: Room, kept: list[int]) -> None:
        """Give an opened table the slot of its state, if the model has states."""

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
        twin = BlockTable(owner, row, token_ids)
        self._pool.incref(*table.block_ids)
        self._moves.updates.append((row, 0, tuple(table.block_ids)))
        twin.block_ids = list(table.block_ids)
        self._num_entries += len(twin.block_ids)
        self.stats.num_shared_blocks += len(twin.block_ids)
        self._num_stored += table.num_tokens
        self._num_counted_twice += self._num_empty_in_last(table)
        twin.num_tokens = twin.num_writable = table.num_writable = table.num_tokens
        twin.num_committed, twin.has_run = table.num_committed, table.has_run
        self._prefix.enter(twin, table.node)
        return twin

    # Growing and filling.

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Grow the table to hold ``num_tokens`` tokens. Return False, unchanged, if blocks run out.

        The next token's block is about to be written. If it has other holders, it is replaced by a
        copy: copy, decref, swap. The last holder keeps the original.
        """
        assert table.node is not None, "the table is closed"
        index = table.num_tokens // self.block_size
        is_shared = (
            table.num_tokens < num_tokens
            and index < len(table.block_ids)
            and self._pool.refcount(table.block_ids[index]) > 1
        )
        num_new = max(0, self.blocks_for(num_tokens) - len(table.block_ids))
        if num_new + is_shared > self.num_available:
            return False
        if is_shared:
            shared = table.block_ids[index]
            self._num_counted_twice -= self._num_empty_in_last(table)
            self._alloc(table, index, 1)
            self._copy(shared, table.block_ids[index], table, "fork")
            table.has_run = False
            self._release(table, shared)
        self._alloc(table, len(table.block_ids), num_new)
        table.num_writable = len(table.block_ids) * self.block_size
        return True

    def chunk_limit(self, table: BlockTable, count: int) -> int:
        """Return how many of the next ``count`` tokens a step may compute."""
        return count

    def advance(self, tables: Sequence[BlockTable]) -> None:
        """Record one more stored token for each table. This is `commit` for a step's decodes.

        The full blocks of earlier tokens must be published, which `commit` has done.
        """
        size = self.block_size
        self._num_stored += len(tables)
        for table in tables:
            table.num_tokens += 1
            table.has_run = True
            if not table.num_tokens % size:
                self._publish(table)

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

    def _publish(self, table: BlockTable) -> None:
        if not self.shares_full:
            return
        size, node = self.block_size, table.node
        assert node is not None
        for index in range(table.num_committed, table.num_tokens // size):
            tokens = tuple(table.token_ids[index * size : (index + 1) * size])
            child = node.children.get(tokens)
            own = table.block_ids[index]
            if child is None:
                child = self._prefix.insert(node, tokens, own)
                self._pool.incref(own)
                self._emit(("seal", own, node.block_id, node.salt, tokens))
            else:
                self._put("share", table, index, self._hold(child))
                self._release(table, own)
            node = child
            table.num_committed += 1
        if node is not table.node:
            self._prefix.enter(table, node)

    # Leaving and swapping.

    def close_table(self, table: BlockTable) -> None:
        """Release every block. Blocks in the prefix cache stay there until they are evicted."""
        assert table.node is not None, "closed twice"
        assert not self._pinned, "closed with pending copies"
        if table.block_ids and self._pool.refcount(table.block_ids[-1]) > 1:
            self._num_counted_twice -= self._num_empty_in_last(table)
        self._num_entries -= len(table.block_ids)
        self._num_stored -= table.num_tokens
        self._emit(("close", table.owner))
        self._pool.decref(*table.block_ids)
        self._offer(table.node)
        self._prefix.leave(table)
        self._evict(self.num_cached - self._max_cached)
        table.block_ids = []

    def reset_prefix_cache(self) -> bool:
        """Drop the cached blocks and the hit rate. Return False, unchanged, if tables are open."""
        if self._num_entries:
            return False
        self._evict(self.num_cached)
        self.stats.reset_hit_rate()
        return True

    def swap_out(self, table: BlockTable) -> HostTable | None:
        """Swap out a table's stored tokens, including those in shared blocks.

        Return None if the host pool is too full. The table stays open, so the caller must close it.
        """
        assert table.node is not None, "the table is closed"
        num_blocks = self.blocks_for(table.num_tokens)
        entries = table.entries[: num_blocks - table.num_passed]
        stored = [*table.block_ids[:num_blocks], *chain(*entries)]
        return self._host.export(table, stored, self._moves)

    def drop_host(self, host: HostTable) -> None:
        """Discard swapped-out blocks."""
        self._host.drop(host)

    def _swapped_in(self, host: HostTable, table: BlockTable, index: int) -> list[tuple[int, int]]:
        """Return the host blocks from ``index`` on, each with the block that it goes to."""
        return list(zip(host.block_ids[index:], table.block_ids[index:], strict=False))

    def take_moves(self) -> Moves:
        """Return the moves that must happen before the step computes. Each is returned once."""
        moves, self._moves = self._moves, Moves()
        return moves

    def end_step(self, *, has_moved: bool = True) -> None:
        """Unpin the blocks that the moves read. A broken step may not have made the moves."""
        self._moves = Moves()
        self._num_steps += 1
        for block_id, node in self._pinned:
            self._emit(("unpin", block_id))
            self._pool.decref(block_id)
            self._offer(node)
        self._pinned.clear()

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
        self._emit((kind, table.owner, index, block_ids))

    def _alloc(self, table: BlockTable, index: int, count: int) -> None:
        self._evict(count - self._pool.num_free)
        last = table.block_ids[-1] if table.block_ids else None
        self._put("alloc", table, index, self._pool.take_run(count, last))

    def _evict(self, count: int) -> None:
        for _ in range(count):
            self._drop(self._prefix.evict())

    def _drop(self, node: Node) -> None:
        self._emit(("evict", block_of(node)))
        self._pool.decref(block_of(node))
        self.stats.num_evictions += 1

    def _hold(self, *path: Node) -> tuple[int, ...]:
        """Add a holder to the blocks of a path, or of its last node, and return their ids."""
        block_ids = tuple(map(block_of, path))
        self._pool.incref(*block_ids)
        for node in self._prefix.unheld_end(path):
            del self._prefix.unheld[node]
        return block_ids

    def _offer(self, node: Node | None) -> None:
        """Let a node and those above it be evicted, as far as only the prefix cache holds them."""
        while node and node.block_id is not None and self._pool.refcount(node.block_id) == 1:
            self._prefix.unheld[node] = self._num_steps
            node = node.parent

    def _pin(self, partial: PartialMatch) -> None:
        self._pool.incref(partial.block_id)
        if partial.node:
            self._prefix.unheld.pop(partial.node, None)
        self._pinned.append((partial.block_id, partial.node))
        self._emit(("pin", partial.block_id))

    def _copy(self, source: int, target: int, table: BlockTable, cause: str) -> None:
        self._moves.copies.append((source, target))
        self._emit(("copy", source, target, table.owner, cause))
        self.stats.num_copies += 1
        table.num_copies += 1

    def _release(self, table: BlockTable, block_id: int) -> None:
        self._emit(("release", table.owner, (block_id,)))
        self._pool.decref(block_id)

    def _num_empty_in_last(self, table: BlockTable) -> int:
        return -table.num_tokens % self.block_size
