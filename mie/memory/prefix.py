"""Cache prefixes in a tree of full blocks keyed by their tokens.

A path from a root spells a token sequence, so equal paths mean equal keys and values. Blocks
without a holder stay until they are evicted. Only leaves are evicted, least recently used first, so
a shared root outlives its branches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress, count, takewhile
from operator import attrgetter, ne
from typing import NamedTuple

from mie.base.stats.memory import MemoryStats
from mie.memory.pool import BlockPool
from mie.memory.table import BlockTable, Emit, HostTable


@dataclass(slots=True, eq=False)
class Node:
    """One full block in the tree. There is one root for each salt, and roots hold no block."""

    parent: Node | None
    tokens: tuple[int, ...]
    block_id: int | None
    salt: str | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    sorted_tokens: list[tuple[int, ...]] = field(default_factory=list)
    """The sorted keys of ``children``, for binary search.

    The key with the longest common prefix is next to the insertion point of a query.
    """
    tables: dict[BlockTable, None] = field(default_factory=dict)
    """The open tables with this as their last committed block (a dict keeps their order)."""


class PartialMatch(NamedTuple):
    """The block that begins with the longest prefix of the next tokens."""

    block_id: int
    num_tokens: int
    node: Node | None
    """The block's node, or None if a running sequence is still filling the block."""


class Allocation(NamedTuple):
    """How a table can be opened, from `KVCacheManager.find_allocation`. Nothing is taken yet."""

    token_ids: Sequence[int]
    salt: str | None
    path: list[Node]
    """The cached full blocks that match the start of the tokens."""
    partial: PartialMatch | None
    """A block to copy from after ``path``, because its start matches."""
    host: HostTable | None
    num_computed: int
    """Number of tokens that need not be computed."""
    num_new: int
    """Number of blocks to allocate."""
    num_taken: int
    """Number of available blocks that it takes: new, cached and reserved ones."""

    @property
    def is_imported(self) -> bool:
        """Whether the last computed token comes from the host, because no cached path has more."""
        return self.host is not None and self.host.num_tokens == self.num_computed


class PrefixCache:
    """A tree of blocks of ``block_size`` tokens. It is one holder of the block of each node.

    Other holders of a node's block also hold the blocks of its ancestors. So the nodes below an
    unheld node are unheld too, and were released before it. The first node of ``unheld`` is
    therefore a leaf, and evicting one after another can free them all.
    """

    def __init__(self, block_size: int, pool: BlockPool, stats: MemoryStats, emit: Emit) -> None:
        self._block_size = block_size
        self._pool, self._stats, self._emit = pool, stats, emit
        pool.caches.append(self)
        self.on_evict: list[Callable[[Node], None]] = []
        """Functions that are called with each node before it leaves the tree."""
        self.pinned: list[tuple[int, Node | None]] = []
        """The sources of this step's copies, each with its node."""
        self.roots: dict[str | None, Node] = {}
        self.unheld: OrderedDict[Node, int] = OrderedDict()
        """The nodes with blocks that only the tree holds, oldest release first."""

    def match(self, token_ids: Sequence[int], limit: int, salt: str | None) -> list[Node]:
        """Return the longest path of full blocks that match at most ``limit`` tokens."""
        node = self.roots.get(salt)
        path: list[Node] = []
        size = self._block_size
        for start in range(0, limit - size + 1, size):
            node = node and node.children.get(tuple(token_ids[start : start + size]))
            if node is None:
                break
            path.append(node)
        return path

    def match_inside(
        self, path: Sequence[Node], token_ids: Sequence[int], limit: int, salt: str | None
    ) -> PartialMatch | None:
        """Return the block after ``path`` with the longest common prefix with the next tokens.

        The prefix ends at ``limit`` at most. The block is a child, or the next block of a
        running sequence, as far as it is written.
        """
        node = path[-1] if path else self.roots.get(salt)
        start = len(path) * self._block_size
        wanted = tuple(token_ids[start : min(limit, start + self._block_size)])
        if node is None or not wanted:
            return None
        found: list[PartialMatch] = []
        place = bisect_left(node.sorted_tokens, wanted)
        for tokens in node.sorted_tokens[max(0, place - 1) : place + 1]:
            child = node.children[tokens]
            found.append(PartialMatch(block_of(child), num_common(tokens, wanted), child))
        for table in node.tables:
            written = table.token_ids[start : min(table.num_tokens, start + len(wanted))]
            # A table that has not run yet holds a copy that is only planned.
            if table.has_run and written and written[0] == wanted[0]:
                block_id = table.block_ids[table.num_committed]
                found.append(PartialMatch(block_id, num_common(written, wanted), None))
        best = max(found, key=attrgetter("num_tokens"), default=None)
        return best if best and best.num_tokens else None

    def root(self, salt: str | None) -> Node:
        """Return the salt's root. It is dropped when its last table or child leaves."""
        return self.roots.setdefault(salt, Node(None, (), None, salt))

    def enter(self, table: BlockTable, node: Node) -> None:
        """Register ``node``, perhaps a root, as an open table's last committed block."""
        if table.node is not None:
            self.leave(table)
        node.tables[table] = None
        table.node = node

    def leave(self, table: BlockTable) -> None:
        """Unregister a table that is closed or moves on to the next node."""
        assert table.node is not None
        del table.node.tables[table]
        self._drop_empty_root(table.node)
        table.node = None

    # Holders.

    def insert(self, parent: Node, tokens: tuple[int, ...], block_id: int) -> Node:
        """Insert a new node under ``parent`` for a block that a table holds."""
        assert tokens not in parent.children, "the tree already contains these tokens"
        node = parent.children[tokens] = Node(parent, tokens, block_id, parent.salt)
        insort(parent.sorted_tokens, tokens)
        self._pool.incref(block_id)
        self._emit(("seal", block_id, parent.block_id, parent.salt, tokens))
        return node

    def hold(self, *path: Node) -> tuple[int, ...]:
        """Add a holder to the blocks of a path, or of its last node, and return their ids."""
        block_ids = tuple(map(block_of, path))
        self._pool.incref(*block_ids)
        unheld = self.unheld_end(path)
        self._pool.num_cached -= len(unheld)
        for node in unheld:
            del self.unheld[node]
        return block_ids

    def offer(self, node: Node | None) -> None:
        """Make a node and the nodes above it evictable, as far as only the tree holds them."""
        while node and node.block_id is not None and self._pool.refcount(node.block_id) == 1:
            self._pool.num_cached += node not in self.unheld
            self.unheld[node] = self._pool.num_steps
            node = node.parent

    def pin(self, partial: PartialMatch) -> None:
        """Hold the source of a copy until the copy is made."""
        self._pool.incref(partial.block_id)
        if partial.node and self.unheld.pop(partial.node, None) is not None:
            self._pool.num_cached -= 1
        self.pinned.append((partial.block_id, partial.node))
        self._emit(("pin", partial.block_id))

    def unpin(self) -> None:
        """Release the sources of all copies."""
        for block_id, node in self.pinned:
            self._emit(("unpin", block_id))
            self._pool.decref(block_id)
            self.offer(node)
        self.pinned.clear()

    def unheld_end(self, path: Sequence[Node]) -> list[Node]:
        """Return the unheld nodes at the end of a path, the last one first."""
        return list(takewhile(self.unheld.__contains__, reversed(path)))

    # A cache of the pool.

    @property
    def oldest(self) -> int | None:
        """The step in which the least recently used unheld leaf was released, or None."""
        return next(iter(self.unheld.values()), None)

    def evict(self) -> int:
        """Evict the least recently used unheld leaf. There must be one."""
        node, _ = self.unheld.popitem(last=False)
        self._pool.num_cached -= 1
        parent = node.parent
        assert parent is not None
        assert not node.children, "a node was released before a node below it"
        for notice in self.on_evict:
            notice(node)
        del parent.children[node.tokens]
        del parent.sorted_tokens[bisect_left(parent.sorted_tokens, node.tokens)]
        self._drop_empty_root(parent)
        self._emit(("evict", block_of(node)))
        self._pool.decref(block_of(node))
        self._stats.num_evictions += 1
        return 1

    def _drop_empty_root(self, node: Node) -> None:
        if node.block_id is None and not node.children and not node.tables:
            del self.roots[node.salt]


def block_of(node: Node) -> int:
    """Return the block of a node that is not a root."""
    assert node.block_id is not None
    return node.block_id


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))
