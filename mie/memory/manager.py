"""The one door to the blocks: tables, the prefix cache, the pools of device and host together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mie.memory.audit import check_counts, count_empty_slots, holders_and_tree
from mie.memory.moves import Emit, Moves, Room
from mie.memory.pool import BlockPool
from mie.memory.prefix import Node, PartialMatch, PrefixCache, block_of, path_to, unheld
from mie.memory.stats import MemoryStats
from mie.memory.swap import SwapSpace
from mie.memory.table import BlockTable, HostTable, Owner


class KVCacheManager:
    """Opens, grows, forks, swaps and closes the block tables of sequences.

    The holders of a block are the tables it stands in, the prefix cache, and for the length of a
    step the copy that reads it. At every moment
    free + cached (held by the prefix cache alone) + used = num_blocks.
    """

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
        self.stats = MemoryStats()
        self._num_host_blocks = num_host_blocks
        self._has_prefix = enable_prefix_caching
        self._shares_partial = partial_block_sharing
        self._max_cached = num_blocks if max_cached_blocks is None else max_cached_blocks
        self._emit = emit
        self.reset()

    def reset(self) -> None:
        """Forget every table and cached block, whatever state they are in; ``stats`` goes on."""
        self._pool = BlockPool(self.num_blocks)
        self._swap = SwapSpace(self._num_host_blocks)
        self._prefix = PrefixCache(self.block_size) if self._has_prefix else None
        self._updates: list[tuple[int, int, tuple[int, ...]]] = []
        self._copies: list[tuple[int, int]] = []
        self._pinned: list[tuple[int, Node | None]] = []
        self._num_entries = 0  # of all open tables together, as the next two
        self._num_stored = 0
        self._num_counted_twice = 0  # empty slots of a last block, for each holder but one

    @property
    def num_cached(self) -> int:
        """Blocks that only the prefix cache holds."""
        return self._prefix.num_unheld if self._prefix else 0

    @property
    def num_available(self) -> int:
        """Blocks that a table can get: the free and the cached ones."""
        return self._pool.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        """Blocks that stand in a table, or are being copied from."""
        return self.num_blocks - self.num_available

    @property
    def num_saved(self) -> int:
        """Blocks that sharing saves at this moment: entries of tables minus blocks in tables."""
        pinned = [block_id for block_id, node in self._pinned if node is not None]
        alone = {b for b in pinned if self._pool.refcount(b) == 1 + pinned.count(b)}
        return self._num_entries - (self.num_used - len(alone))

    @property
    def num_slots_empty(self) -> int:
        """Slots in used blocks that hold no token: internal fragmentation."""
        reserved = self._num_entries * self.block_size
        return reserved - self._num_stored - self._num_counted_twice

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens fill, the last one in part."""
        return -(-num_tokens // self.block_size)

    # Opening: first look, then take.

    def find_room(
        self,
        token_ids: Sequence[int],
        *,
        salt: str | None = None,
        use_cache: bool = True,
        host: HostTable | None = None,
        num_spare: int = 0,
    ) -> Room | None:
        """How a table for all the tokens could be had with ``num_spare`` blocks left over; None if
        it cannot. Takes nothing.

        It shares the longest cached run of full blocks, and a copy of the block that begins with
        most of what follows. What was swapped out to ``host`` comes back where the cache does not
        have it. At least the last token is left to compute, so that there are logits.
        """
        limit = len(token_ids) - 1
        path: list[Node] = []
        partial = None
        if self._prefix and use_cache:
            path = self._prefix.match(token_ids, limit, salt)
            if self._shares_partial and host is None:
                partial = self._prefix.match_inside(path, token_ids, limit, salt)
        num_new = self.blocks_for(len(token_ids)) - len(path)
        room = self.num_available - num_spare - len(unheld(path))
        if num_new > room:
            return None
        if partial and partial.node and not partial.node.is_held and num_new == room:
            partial = None  # pinned for its copy, it would be missing as a block
        num_computed = len(path) * self.block_size + (partial.num_tokens if partial else 0)
        num_computed = max(num_computed, host.num_tokens if host else 0)
        return Room(token_ids, salt, path, partial, host, num_computed, num_new)

    def open_table(self, room: Room, owner: Owner, row: int) -> BlockTable:
        """The table that was found, with blocks for all its tokens. Nothing may have happened in
        between."""
        table = BlockTable(owner, row, room.token_ids)
        if room.path:
            self._put("share", table, 0, self._hold(*room.path))
            table.num_committed = len(room.path)
        if self._prefix:
            self._prefix.enter(table, room.path[-1] if room.path else None, room.salt)
        if room.partial:  # pinned before a block is taken, which could evict it
            self._pin(room.partial)
        index = len(table.block_ids)
        self._put("alloc", table, index, self._take_blocks(room.num_new, table))
        if room.partial:
            self._copy(room.partial.block_id, index, table, "prefix")
        if room.host:
            self._import(room.host, table, index)
        table.num_tokens = table.num_cached = room.num_computed
        self._num_stored += room.num_computed
        return table

    def fork(
        self, table: BlockTable, owner: Owner, row: int, token_ids: Sequence[int]
    ) -> BlockTable:
        """A second table over the same blocks, a partial last one included.

        The table must have no empty blocks, and ``token_ids`` must begin with its stored tokens.
        """
        assert table.is_open
        assert len(table.block_ids) == self.blocks_for(table.num_tokens), "empty blocks are forked"
        twin = BlockTable(owner, row, token_ids)
        self._pool.incref(*table.block_ids)
        self._updates.append((row, 0, tuple(table.block_ids)))
        twin.block_ids = list(table.block_ids)
        self._num_entries += len(twin.block_ids)
        self.stats.num_shared_blocks += len(twin.block_ids)
        self._num_stored += table.num_tokens
        self._num_counted_twice += self._num_empty_in_last(table)
        twin.num_tokens = twin.num_writable = table.num_writable = table.num_tokens
        twin.num_cached, twin.num_committed = table.num_cached, table.num_committed
        twin.has_run = table.has_run
        if self._prefix:
            self._prefix.enter(twin, table.node)
        return twin

    # Growing and filling.

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` tokens in all; False, and nothing done, if there is none.

        The block of the next token is about to be written, so if others hold it too it is replaced
        by a copy: copy, decref, swap. The last holder keeps it.
        """
        assert table.is_open
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
            self._put("alloc", table, index, self._take_blocks(1, table))
            self._copy(shared, index, table, "fork")
            table.has_run = False
            self._release(table, shared)
        self._put("alloc", table, len(table.block_ids), self._take_blocks(num_new, table))
        table.num_writable = len(table.block_ids) * self.block_size
        return True

    def advance(self, tables: Sequence[BlockTable]) -> None:
        """One more token of each table is stored: `commit`, for a step's decodes."""
        size = self.block_size
        self._num_stored += len(tables)
        for table in tables:
            table.num_tokens += 1
            table.has_run = True
            if not table.num_tokens % size and self._prefix:
                self._publish(table, self._prefix)

    def commit(self, table: BlockTable, num_tokens: int) -> None:
        """The first ``num_tokens`` tokens are stored: publish the blocks they fill.

        If another sequence published the same tokens first, the table takes that block and gives
        its own back.
        """
        assert table.is_open
        assert num_tokens <= len(table.block_ids) * self.block_size, "stored beyond the table"
        self._num_stored += num_tokens - table.num_tokens
        table.num_tokens = num_tokens
        table.has_run = True
        if self._prefix:
            self._publish(table, self._prefix)

    def _publish(self, table: BlockTable, prefix: PrefixCache) -> None:
        size = self.block_size
        node = table.node
        assert node is not None
        for index in range(table.num_committed, table.num_tokens // size):
            tokens = tuple(table.token_ids[index * size : (index + 1) * size])
            child = node.children.get(tokens)
            own = table.block_ids[index]
            if child is None:
                child = prefix.insert(node, tokens, own)
                self._pool.incref(own)
                self._emit(("seal", own, node.block_id, node.salt, tokens))
            else:
                self._put("share", table, index, self._hold(child))
                self._release(table, own)
            node = child
            table.num_committed += 1
        if node is not table.node:
            prefix.enter(table, node)

    # Leaving.

    def close_table(self, table: BlockTable) -> None:
        """Give every block back. What the prefix cache holds stays there until evicted."""
        assert table.is_open, "closed twice"
        assert not self._pinned, "closed while copies wait to be made"
        table.is_open = False
        if table.block_ids and self._pool.refcount(table.block_ids[-1]) > 1:
            self._num_counted_twice -= self._num_empty_in_last(table)
        self._num_entries -= len(table.block_ids)
        self._num_stored -= table.num_tokens
        self._emit(("close", table.owner))
        self._pool.decref(*table.block_ids)
        if self._prefix and table.node is not None:
            path = path_to(table.node)
            self._prefix.leave(table)
            self._prefix.release([n for n in path if self._pool.refcount(block_of(n)) == 1])
            self._evict(self.num_cached - self._max_cached)
        table.block_ids = []

    def reset_prefix_cache(self) -> bool:
        """Forget the cached blocks and the hit rate; False, and nothing done, with tables open."""
        if self._num_entries:
            return False
        self._evict(self.num_cached)
        self.stats.reset_hit_rate()
        return True

    # Swapping.

    def swap_out(self, table: BlockTable) -> HostTable | None:
        """Export a table's stored tokens, those in shared blocks too; None if the host's pool is
        too full. The table stays open: close it."""
        assert table.is_open
        host = self._swap.take_out(table, self.blocks_for(table.num_tokens))
        if host is not None:
            self.stats.num_exported += len(host.block_ids)
            self._emit(("export", table.owner, host.block_ids))
        return host

    def drop_host(self, host: HostTable) -> None:
        """Give up what was swapped out."""
        self._swap.free(host)
        self._emit(("drop", host.owner))

    def _import(self, host: HostTable, table: BlockTable, index: int) -> None:
        pairs = self._swap.take_in(host, table, index)
        being_read = {block_id for block_id, _ in [*self._copies, *self._swap.exports]}
        assert being_read.isdisjoint(block_id for _, block_id in pairs), "imports come first"
        self.stats.num_imported += len(pairs)
        self._emit(("import", table.owner, *(tuple(p[side] for p in pairs) for side in (0, 1))))

    # A step.

    def take_moves(self) -> Moves:
        """What has to be done before the step computes; each is handed out once."""
        moves = Moves(
            tuple(self._updates),
            tuple(self._swap.imports),
            tuple(self._swap.exports),
            tuple(self._copies),
        )
        self._clear_moves()
        return moves

    def end_step(self) -> None:
        """The moves are done, or the step was broken off: what they read is no longer pinned."""
        self._clear_moves()
        for block_id, node in self._pinned:
            self._emit(("unpin", block_id))
            self._pool.decref(block_id)
            if self._prefix and node is not None and self._pool.refcount(block_id) == 1:
                self._prefix.release([node])
        self._pinned.clear()

    # For tests and the event log.

    def check_invariants(
        self, tables: Iterable[BlockTable], host_tables: Iterable[HostTable] = ()
    ) -> None:
        """Assert, between steps, that every count equals what the open tables, the swapped-out ones
        and the prefix cache hold."""
        assert not self._pinned, "a block is pinned between steps"
        tables = list(tables)
        check_counts(self._pool, self._prefix, tables)
        self._swap.check_invariants(host_tables)
        assert self.num_cached <= self._max_cached, "the cache is over its budget"
        assert self._num_entries == sum(len(table.block_ids) for table in tables)
        assert self.num_slots_empty == count_empty_slots(tables, self.block_size)

    def snapshot(self) -> dict[str, Any]:
        """The blocks with a holder and the tree, as plain data."""
        return {
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "num_host_blocks": self._num_host_blocks,
            **holders_and_tree(self._pool, self._prefix),
        }

    # Parts of the above.

    def _put(self, kind: str, table: BlockTable, index: int, block_ids: tuple[int, ...]) -> None:
        """Blocks that the table now holds become its entries index, index + 1, …"""
        if not block_ids:
            return
        self._num_entries += max(0, index + len(block_ids) - len(table.block_ids))
        table.block_ids[index : index + len(block_ids)] = block_ids
        table.num_writable = len(table.block_ids) * self.block_size
        self._updates.append((table.row, index, block_ids))
        if kind == "share":
            self.stats.num_shared_blocks += len(block_ids)
        self._emit((kind, table.owner, index, block_ids))

    def _take_blocks(self, count: int, table: BlockTable) -> tuple[int, ...]:
        self._evict(count - self._pool.num_free)
        return self._pool.take_row(count, table.block_ids)

    def _evict(self, count: int) -> None:
        for _ in range(count):
            assert self._prefix is not None, "the caller checked num_available"
            block_id = self._prefix.evict()
            self._emit(("evict", block_id))
            self._pool.decref(block_id)
            self.stats.num_evictions += 1

    def _hold(self, *path: Node) -> tuple[int, ...]:
        """One more holder for the blocks of a path, or of its last node; their ids."""
        assert self._prefix is not None
        block_ids = tuple(map(block_of, path))
        self._pool.incref(*block_ids)
        self._prefix.hold(unheld(path))
        return block_ids

    def _pin(self, partial: PartialMatch) -> None:
        if partial.node is None:
            self._pool.incref(partial.block_id)
        else:
            self._hold(partial.node)
        self._pinned.append((partial.block_id, partial.node))
        self._emit(("pin", partial.block_id))

    def _copy(self, source: int, index: int, table: BlockTable, cause: str) -> None:
        target = table.block_ids[index]
        self._copies.append((source, target))
        self._emit(("copy", source, target, table.owner, cause))
        self.stats.num_copies += 1
        table.num_copies += 1

    def _release(self, table: BlockTable, block_id: int) -> None:
        self._emit(("release", table.owner, (block_id,)))
        self._pool.decref(block_id)

    def _clear_moves(self) -> None:
        self._updates.clear()
        for pairs in (self._swap.imports, self._swap.exports, self._copies):
            pairs.clear()

    def _num_empty_in_last(self, table: BlockTable) -> int:
        return -table.num_tokens % self.block_size
