"""Manage the blocks of a model that has layers with a sliding window beside others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from mie.memory.layers.window import Window
from mie.memory.manager import KVCacheManager
from mie.memory.prefix import Node, Room
from mie.memory.table import BlockTable, Entry, HostTable, Owner


class WindowedManager(KVCacheManager):
    """Also keeps the blocks of layers with a window, while a later token can reach them.

    A table has an *entry* for each of its blocks within reach, and a claim on the most entries that
    it will have at once. A claim counts shared entries too. So the chunks of an admitted prompt
    always find their blocks, and only decodes may have to wait for some.

    A node of the prefix tree may have an entry. A hit ends where the nodes within reach have them.
    """

    def __init__(self, num_blocks: int, block_size: int, *, window: Window, **options: Any) -> None:
        """Take the other options of `KVCacheManager`. Only full blocks are shared."""
        self.window, self._num_groups = window, window.num_groups
        super().__init__(num_blocks, block_size, **{**options, "partial_block_sharing": False})
        self.blocks_of_twin = 1 + window.num_groups * window.num_decoding

    def reset(self) -> None:
        super().reset()
        self._nodes: dict[int, Node] = {}  # by the first block of their entries
        self._unheld: OrderedDict[Node, int] = OrderedDict()  # as in `PrefixCache`
        self._num_in_tables = 0  # blocks of all tables' entries
        self.num_claimed = 0  # blocks of claims, without those that tables have

    @property
    def num_cached(self) -> int:
        return super().num_cached + len(self._unheld) * self._num_groups

    @property
    def num_saved(self) -> int:
        return super().num_saved + self._num_in_tables

    @property
    def capacity(self) -> int:
        return self.window.capacity(self.num_blocks)

    def blocks_needed(self, num_tokens: int) -> int:
        return self.window.blocks_needed(num_tokens)

    # Opening.

    def _usable(self, path: list[Node], host: HostTable | None) -> list[Node]:
        num_usable = run = 0
        for count, node in enumerate(path, 1):
            run = run + 1 if node.entry else 0
            if run >= count - self.window.reach(count * self.block_size):
                num_usable = count
        return path[:num_usable]

    def _num_claimed_by(self, num_stored: int, num_tokens: int) -> int:
        return self.window.num_entries(num_stored, num_tokens) * self._num_groups

    def open_table(self, room: Room, owner: Owner, row: int) -> BlockTable:
        first, entries = self.window.reach(room.num_computed), []
        if not _is_imported(room.host, len(room.path) * self.block_size):
            entries = [self._hold_entry(node) for node in room.path[first:]]  # before any eviction
        table = super().open_table(room, owner, row)
        table.num_passed = first
        self._put_entries("share_window", table, first, entries)
        self._claim(table, self.window.num_entries(room.num_computed, len(room.token_ids)))
        self._extend(table, len(table.token_ids))
        return table

    def fork(
        self, table: BlockTable, owner: Owner, row: int, token_ids: Sequence[int]
    ) -> BlockTable:
        twin = super().fork(table, owner, row, token_ids)
        twin.num_passed, twin.entries = table.num_passed, list(table.entries)
        self._pool.incref(*chain(*twin.entries))
        num_shared = len(twin.entries) * self._num_groups
        self._num_in_tables += num_shared
        self.stats.num_shared_blocks += num_shared
        self._moves.windows.extend(
            (row, index, entry) for index, entry in enumerate(twin.entries, twin.num_passed)
        )
        self._claim(twin, len(twin.entries))
        return twin

    # Growing and filling.

    def grow(self, table: BlockTable, num_tokens: int) -> bool:
        stored, before = table.num_tokens, table.claim
        claim = max(before, self.window.num_entries(stored, num_tokens))
        if (claim - before) * self._num_groups > self.num_available:
            return False
        self._claim(table, claim)
        if not super().grow(table, num_tokens):
            self._claim(table, before)
            return False
        index = stored // self.block_size
        at = index - table.num_passed
        if stored < num_tokens and at < len(table.entries):
            shared = table.entries[at]
            if self._pool.refcount(shared[0]) > 1:
                self._alloc_entries(table, index, 1, shared)
                for source, target in zip(shared, table.entries[at], strict=True):
                    self._copy(source, target, table, "fork")
                self._release_entry(table, shared)
        self._extend(table, num_tokens)
        return True

    def advance(self, tables: Sequence[BlockTable]) -> None:
        super().advance(tables)
        for table in tables:
            self._pass(table)

    def commit(self, table: BlockTable, num_tokens: int) -> None:
        super().commit(table, num_tokens)
        self._pass(table)
        num_left = self.window.num_entries(table.num_tokens, len(table.token_ids))
        self._claim(table, max(len(table.entries), num_left))
        self._extend(table, len(table.token_ids))

    def _extend(self, table: BlockTable, num_tokens: int) -> None:
        """Take the entries of the next chunk of these tokens, which the table has a claim on."""
        end = min(num_tokens, table.num_tokens + self.window.max_chunk)
        index = table.num_passed + len(table.entries)
        count = max(0, self.blocks_for(end) - index)
        if count:
            last = table.entries[-1] if table.entries else None
            self._alloc_entries(table, index, count, last)
        table.num_writable = min(table.num_writable, (index + count) * self.block_size)

    def _pass(self, table: BlockTable) -> None:
        """Let go of the entries that no later token can reach."""
        count = self.window.reach(table.num_tokens) - table.num_passed
        if count <= 0:
            return
        table.num_passed += count
        passed = table.entries[:count]
        self._emit(("pass", table.owner, table.num_passed, tuple(chain(*passed))))
        for entry in passed:
            self._let_go(entry)
        del table.entries[:count]
        self._num_in_tables -= count * self._num_groups
        num_left = self.window.num_entries(table.num_tokens, len(table.token_ids))
        self._claim(table, max(len(table.entries), num_left))
        self._evict(self.num_cached - self._max_cached)

    def _publish(self, table: BlockTable) -> None:
        start = table.num_committed
        super()._publish(table)
        node = table.node
        for index in range(table.num_committed - 1, max(start, table.num_passed) - 1, -1):
            assert node is not None
            self._publish_entry(table, index, node)
            node = node.parent

    def _publish_entry(self, table: BlockTable, index: int, node: Node) -> None:
        """Give the node the table's entry, or the table the node's."""
        own = table.entries[index - table.num_passed]
        if node.entry:
            self._put_entries("share_window", table, index, [self._hold_entry(node)])
            self.stats.num_shared_blocks += self._num_groups
            self._release_entry(table, own)
        else:
            self._pool.incref(*own)
            node.entry, self._nodes[own[0]] = own, node
            self._emit(("seal_window", node.block_id, own))

    # Leaving and swapping.

    def close_table(self, table: BlockTable) -> None:
        for entry in reversed(table.entries):
            self._let_go(entry)
        self._num_in_tables -= len(table.entries) * self._num_groups
        self._claim(table, 0)
        table.entries = []
        super().close_table(table)

    def _swapped_in(self, host: HostTable, table: BlockTable, index: int) -> list[tuple[int, int]]:
        num_full = self.blocks_for(host.num_tokens)
        if not _is_imported(host, index * self.block_size):
            return []
        table.num_passed = first = self.window.reach(host.num_tokens)
        self._alloc_entries(table, first, num_full - first, None)
        block_ids = (*table.block_ids[index:num_full], *chain(*table.entries))
        return list(zip(host.block_ids[index:], block_ids, strict=True))

    # Parts of the above.

    def _claim(self, table: BlockTable, claim: int) -> None:
        self.num_claimed += (claim - table.claim) * self._num_groups
        table.claim = claim

    def _alloc_entries(self, table: BlockTable, index: int, count: int, last: Entry | None) -> None:
        """Set the entries from ``index`` on to new blocks, those after ``last`` if possible."""
        self._evict(count * self._num_groups - self._pool.num_free)
        self.num_claimed -= count * self._num_groups
        runs = [self._pool.take_run(count, after) for after in last or [None] * self._num_groups]
        self._put_entries("alloc_window", table, index, zip(*runs, strict=True))

    def _put_entries(
        self, kind: str, table: BlockTable, index: int, entries: Iterable[Entry]
    ) -> None:
        """Set the entries from ``index`` on to blocks that the table now holds."""
        for at, entry in enumerate(entries, index - table.num_passed):
            self._num_in_tables += (at == len(table.entries)) * self._num_groups
            table.entries[at : at + 1] = [entry]
            self._moves.windows.append((table.row, table.num_passed + at, entry))
            self._emit((kind, table.owner, table.num_passed + at, entry))

    def _hold_entry(self, node: Node) -> Entry:
        """Add a table as a holder of a node's entry."""
        entry = _entry_of(node)
        self._pool.incref(*entry)
        if self._unheld.pop(node, None) is not None:
            self.num_claimed -= self._num_groups
        return entry

    def _release_entry(self, table: BlockTable, entry: Entry) -> None:
        self._emit(("release", table.owner, entry))
        self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        """Remove a table from an entry's holders."""
        self._pool.decref(*entry)
        node = self._nodes.get(entry[0])
        if self._pool.refcount(entry[0]) == (node is not None):
            self.num_claimed += self._num_groups
            if node is not None:
                self._unheld[node] = self._num_steps

    def _evict(self, count: int) -> None:
        """Evict the entries and leaves that were used least recently.

        An entry is used with its node, or passed before. So it goes first.
        """
        while count > 0:
            leaf, of_entry = next(iter(self._prefix.unheld), None), next(iter(self._unheld), None)
            if of_entry is not None and (
                leaf is None or self._unheld[of_entry] <= self._prefix.unheld[leaf]
            ):
                count -= self._drop_entry(of_entry)
                continue
            assert leaf is None or leaf.entry is None, "an entry was released after its node"
            super()._evict(1)
            count -= 1

    def _drop_entry(self, node: Node) -> int:
        """Evict a node's entry. Return the number of its blocks, which are now free."""
        entry, node.entry = _entry_of(node), None
        del self._nodes[entry[0]], self._unheld[node]
        self._emit(("evict_window", node.block_id, entry))
        self._pool.decref(*entry)
        self.stats.num_evictions += self._num_groups
        return self._num_groups


def _is_imported(host: HostTable | None, num_hit: int) -> bool:
    """Whether the entries come from the host, because the tree has no more tokens."""
    return host is not None and host.num_tokens >= num_hit


def _entry_of(node: Node) -> Entry:
    """Return the entry of a node that has one."""
    assert node.entry is not None
    return node.entry
