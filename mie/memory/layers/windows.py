"""Keep the blocks of layers with a sliding window, beside the blocks of layers without one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from mie.memory.layers.window import Window
from mie.memory.manager import KVCacheManager
from mie.memory.prefix import Allocation, Node
from mie.memory.table import BlockTable, HostTable, Moves

Entry = tuple[int, ...]
"""The blocks of the layers with a window for the tokens of one block, in the groups' order."""


@dataclass(slots=True, eq=False)
class Entries:
    """The entries of an open table that are within reach of a window."""

    num_passed: int
    """Number of entries that no later token can reach. The table has those after them."""
    num_committed: int
    """Number of leading entries that were offered to the prefix cache."""
    entries: list[Entry] = field(default_factory=list)
    num_reserved: int = 0
    """Number of entries that the table may have at once."""

    @property
    def block_ids(self) -> Iterator[int]:
        """The blocks of all entries."""
        return chain.from_iterable(self.entries)


class Windows:
    """Keeps the blocks of layers with a window, while a later token can reach them.

    A table has an *entry* for each of its blocks within reach, and reserves the most entries that
    it will have at once. A reservation counts shared entries too. So the chunks of an admitted
    prompt always find their blocks, and only decodes may have to wait for some.

    A node of the prefix tree may have an entry. A hit ends where the nodes within reach have them.
    The entries that only the tree holds are a cache of the pool.
    """

    name = "windows"

    def __init__(self, window: Window) -> None:
        self.window = window
        self.num_per_fork = window.num_groups * window.num_decoding

    def reset(self, manager: KVCacheManager) -> None:
        """Begin with nothing."""
        self._manager, self._pool = manager, manager.pool
        manager.block_parts.append(self)
        self._pool.caches.insert(0, self)  # an entry goes before its node
        self.tables: dict[BlockTable, Entries] = {}
        """The entries of each open table."""
        self.nodes: dict[Node, Entry] = {}
        """The entry of each node that has one."""
        self._node_of: dict[int, Node] = {}  # by the first block of their entries
        # Oldest release first, as in `PrefixCache`.
        self._unheld: OrderedDict[Node, int] = OrderedDict()
        self._moves = Moves()

    @property
    def num_held(self) -> int:
        """The number of blocks of all open tables. A shared one counts for each table."""
        num_entries = sum([len(own.entries) for own in self.tables.values()])
        return num_entries * self.window.num_groups

    # Opening.

    def usable(self, path: list[Node], host: HostTable | None) -> list[Node]:
        """Return the part of a path that ends where all nodes within reach have entries."""
        num_usable = run = 0
        for count, node in enumerate(path, 1):
            run = run + 1 if node in self.nodes else 0
            if run >= count - self.window.reach(count * self.window.block_size):
                num_usable = count
        return path[:num_usable]

    def num_needed(self, num_stored: int, num_tokens: int, table: BlockTable | None = None) -> int:
        """Return how many blocks of entries a table must reserve."""
        num_entries = self.window.num_entries(num_stored, num_tokens)
        if table is not None:
            num_entries = max(0, num_entries - self.tables[table].num_reserved)
        return num_entries * self.window.num_groups

    def reserve(self, table: BlockTable, allocation: Allocation) -> None:
        """Hold the entries of the path, so that they are not evicted."""
        first = self.window.reach(allocation.num_computed)
        own = self.tables[table] = Entries(num_passed=first, num_committed=table.num_committed)
        table.parts.append(own)
        if not allocation.is_imported:
            for node in allocation.path[first:]:
                self._hold(node)

    def restored(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Take the entries that those on the host are copied to."""
        own = self.tables[table]
        count = self._manager.blocks_for(num_tokens) - own.num_passed
        self._alloc(table, own.num_passed, count, None)
        return [*own.block_ids]

    def open(self, table: BlockTable, allocation: Allocation, notes: dict[str, list[int]]) -> None:
        """Take the entries of the path, and the entries of the first chunk."""
        own = self.tables[table]
        if not allocation.is_imported:
            shared = [self.nodes[node] for node in allocation.path[own.num_passed :]]
            self._put("share_window", table, own.num_passed, shared)
        num_tokens = len(allocation.token_ids)
        self._reserve(own, self.window.num_entries(allocation.num_computed, num_tokens))
        self._extend(table, num_tokens)

    def fork(self, parent: BlockTable, table: BlockTable) -> None:
        """Share all entries."""
        own = self.tables[parent]
        shared = Entries(own.num_passed, own.num_committed, list(own.entries))
        self.tables[table] = shared
        table.parts.append(shared)
        self._pool.incref(*shared.block_ids)
        self._manager.stats.num_shared_blocks += len(shared.entries) * self.window.num_groups
        self._moves.updates.extend(
            (table.row, index, entry) for index, entry in enumerate(own.entries, own.num_passed)
        )
        self._reserve(shared, len(shared.entries))

    # Growing and filling.

    def limit(self, table: BlockTable, count: int) -> int:
        """Return the length of the longest chunk that the reservation is made for."""
        return min(count, self.window.max_chunk)

    def grow(self, table: BlockTable, num_tokens: int) -> None:
        """Replace a shared entry that is about to be written, and take the entries of a chunk."""
        own, stored = self.tables[table], table.num_tokens
        wanted = self.window.num_entries(stored, num_tokens)
        self._reserve(own, max(own.num_reserved, wanted))
        index = stored // self.window.block_size
        at = index - own.num_passed
        if stored < num_tokens and at < len(own.entries):
            shared = own.entries[at]
            if self._pool.refcount(shared[0]) > 1:
                self._alloc(table, index, 1, shared)
                for source, target in zip(shared, own.entries[at], strict=True):
                    self._manager.copy(source, target, table, "fork")
                self._release(table, shared)
        self._extend(table, num_tokens)

    def keep(self, table: BlockTable) -> bool:
        """Do nothing: a step overwrites no entry that an earlier token wrote."""
        return True

    def settle(self, table: BlockTable, *, is_whole: bool) -> bool:
        """Do nothing. Entries are released when the kept tokens are recorded."""
        return True

    def trim(self, table: BlockTable, num_blocks: int) -> None:
        """Release the entries after the first ``num_blocks`` blocks."""
        own = self.tables[table]
        empty = own.entries[max(0, num_blocks - own.num_passed) :]
        for entry in empty:
            self._let_go(entry)
        del own.entries[len(own.entries) - len(empty) :]

    def commit(self, table: BlockTable) -> None:
        """Publish entries with their blocks, pass those out of reach, and take the next ones."""
        own, node = self.tables[table], table.node
        for index in range(table.num_committed - 1, max(own.num_committed, own.num_passed) - 1, -1):
            assert node is not None
            self._publish(table, index, node)
            node = node.parent
        own.num_committed = table.num_committed
        self._pass(table)
        num_left = self.window.num_entries(table.num_tokens, len(table.token_ids))
        self._reserve(own, max(len(own.entries), num_left))
        self._extend(table, len(table.token_ids))

    def _extend(self, table: BlockTable, num_tokens: int) -> None:
        """Take the reserved entries of the next chunk of these tokens."""
        own = self.tables[table]
        end = min(num_tokens, table.num_tokens + self.window.max_chunk)
        index = own.num_passed + len(own.entries)
        count = max(0, self._manager.blocks_for(end) - index)
        if count:
            self._alloc(table, index, count, own.entries[-1] if own.entries else None)
        table.num_writable = min(table.num_writable, (index + count) * self.window.block_size)

    def _pass(self, table: BlockTable) -> None:
        """Release the entries that no later token can reach."""
        own = self.tables[table]
        count = self.window.reach(table.num_tokens) - own.num_passed
        if count <= 0:
            return
        own.num_passed += count
        passed = own.entries[:count]
        self._manager.emit(("pass", table.owner, own.num_passed, tuple(chain(*passed))))
        for entry in passed:
            self._let_go(entry)
        del own.entries[:count]
        self._pool.evict(self._pool.num_cached - self._manager.max_cached)

    def _publish(self, table: BlockTable, index: int, node: Node) -> None:
        """Give the node the table's entry, or the table the node's."""
        own = self.tables[table]
        entry = own.entries[index - own.num_passed]
        if node in self.nodes:
            self._hold(node)
            self._put("share_window", table, index, [self.nodes[node]])
            self._manager.stats.num_shared_blocks += self.window.num_groups
            self._release(table, entry)
        else:
            self._pool.incref(*entry)
            self.nodes[node], self._node_of[entry[0]] = entry, node
            self._manager.emit(("seal_window", node.block_id, entry))

    # Leaving and swapping.

    def close(self, table: BlockTable) -> None:
        """Release all entries."""
        own = self.tables.pop(table)
        for entry in reversed(own.entries):
            self._let_go(entry)
        self._reserve(own, 0)

    def stored(self, table: BlockTable) -> list[int]:
        """Return the blocks of the entries that have stored tokens."""
        own = self.tables[table]
        count = self._manager.blocks_for(table.num_tokens) - own.num_passed
        return [*chain.from_iterable(own.entries[:count])]

    # A step.

    def take_moves(self) -> Moves:
        """Return the entries that were put in tables, in ``updates``."""
        moves, self._moves = self._moves, Moves()
        return moves

    def end_step(self, *, has_moved: bool) -> None:
        """Discard moves that were not taken."""
        self._moves = Moves()

    # A cache of the pool.

    @property
    def oldest(self) -> int | None:
        """The step in which the least recently used unheld entry was released, or None."""
        return next(iter(self._unheld.values()), None)

    def evict(self) -> int:
        """Evict the entry that was used least recently, and return the number of its blocks."""
        node, _ = self._unheld.popitem(last=False)
        self._pool.num_cached -= self.window.num_groups
        entry = self.nodes.pop(node)
        del self._node_of[entry[0]]
        self._manager.emit(("evict_window", node.block_id, entry))
        self._pool.decref(*entry)
        self._manager.stats.num_evictions += self.window.num_groups
        return self.window.num_groups

    # Parts of the above.

    def _reserve(self, own: Entries, num_entries: int) -> None:
        self._pool.num_reserved += (num_entries - own.num_reserved) * self.window.num_groups
        own.num_reserved = num_entries

    def _alloc(self, table: BlockTable, index: int, count: int, last: Entry | None) -> None:
        """Set the entries from ``index`` on to new blocks, those after ``last`` if possible."""
        num_groups = self.window.num_groups
        self._pool.make_free(count * num_groups)
        self._pool.num_reserved -= count * num_groups
        runs = [self._pool.take_run(count, after) for after in last or [None] * num_groups]
        self._put("alloc_window", table, index, zip(*runs, strict=True))

    def _put(self, kind: str, table: BlockTable, index: int, entries: Iterable[Entry]) -> None:
        """Set the entries from ``index`` on to blocks that the table now holds."""
        own = self.tables[table]
        for at, entry in enumerate(entries, index - own.num_passed):
            own.entries[at : at + 1] = [entry]
            self._moves.updates.append((table.row, own.num_passed + at, entry))
            self._manager.emit((kind, table.owner, own.num_passed + at, entry))

    def _hold(self, node: Node) -> None:
        """Add a table as a holder of a node's entry."""
        self._pool.incref(*self.nodes[node])
        if self._unheld.pop(node, None) is not None:
            self._pool.num_cached -= self.window.num_groups
            self._pool.num_reserved -= self.window.num_groups

    def _release(self, table: BlockTable, entry: Entry) -> None:
        self._manager.emit(("release", table.owner, entry))
        self._let_go(entry)

    def _let_go(self, entry: Entry) -> None:
        """Remove a table from an entry's holders."""
        self._pool.decref(*entry)
        node = self._node_of.get(entry[0])
        if self._pool.refcount(entry[0]) == (node is not None):
            self._pool.num_reserved += self.window.num_groups
            if node is not None:
                self._unheld[node] = self._pool.num_steps
                self._pool.num_cached += self.window.num_groups
