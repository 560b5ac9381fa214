"""Cache prefixes in a tree of full blocks keyed by their tokens.

A path from a root spells a token sequence, so equal paths mean equal keys and values. Blocks
without a holder stay until they are evicted. Only leaves are evicted, least recently used first, so
a shared root outlives its branches.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mie.memory.table import BlockTable


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
    """The open tables whose last committed block this is (a dict keeps their order)."""
    is_held: bool = True
    last_used: int = 0


class PartialMatch(NamedTuple):
    """The block whose start matches most of the following tokens."""

    block_id: int
    num_tokens: int
    node: Node | None
    """Its node, or None if a running sequence is still filling the block."""


class PrefixCache:
    """A tree of blocks of ``block_size`` tokens. `KVCacheManager` does the reference counting.

    A holder of a node's block also holds the blocks of its ancestors. So the nodes below an unheld
    node are unheld too, and evicting leaf after leaf can free them all. `num_unheld` is the number
    of blocks that eviction can free.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[str | None, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # a heap; stale entries are skipped
        self._clock = 0
        self.num_unheld = 0

    def match(self, token_ids: Sequence[int], limit: int, salt: str | None) -> list[Node]:
        """Return the longest path of full blocks that match at most ``limit`` tokens."""
        node = self._roots.get(salt)
        path: list[Node] = []
        size = self._block_size
        if node is None:
            return path
        for start in range(0, limit - size + 1, size):
            node = node.children.get(tuple(token_ids[start : start + size]))
            if node is None:
                break
            path.append(node)
        return path

    def match_inside(
        self, path: Sequence[Node], token_ids: Sequence[int], limit: int, salt: str | None
    ) -> PartialMatch | None:
        """Return the block after ``path`` with the longest common prefix with the next tokens.

        The prefix ends at ``limit`` at most. The block is a child, or what a running sequence has
        written of its next block.
        """
        node = path[-1] if path else self._roots.get(salt)
        start = len(path) * self._block_size
        wanted = tuple(token_ids[start : min(limit, start + self._block_size)])
        if node is None or not wanted:
            return None
        best = PartialMatch(-1, 0, None)
        place = bisect_left(node.sorted_tokens, wanted)
        for tokens in node.sorted_tokens[max(0, place - 1) : place + 1]:
            count = _num_common(tokens, wanted)
            if count > best.num_tokens:
                child = node.children[tokens]
                best = PartialMatch(block_of(child), count, child)
        for table in node.tables:
            written = table.token_ids[start : min(table.num_tokens, start + len(wanted))]
            # A table that has not run yet holds a copy that is only planned.
            if table.has_run and written and written[0] == wanted[0]:
                count = _num_common(written, wanted)
                if count > best.num_tokens:
                    index = table.num_committed
                    best = PartialMatch(table.block_ids[index], count, None)
        return best if best.num_tokens else None

    def root(self, salt: str | None) -> Node:
        """Return the salt's root. It is dropped when its last table or child leaves."""
        return self._roots.setdefault(salt, Node(None, (), None, salt))

    def enter(self, table: BlockTable, node: Node) -> None:
        """Register ``node``, which may be a root, as an open table's last committed block."""
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

    def insert(self, parent: Node, tokens: tuple[int, ...], block_id: int) -> Node:
        """Insert a new, held node under ``parent``."""
        assert tokens not in parent.children, "the tree already contains these tokens"
        node = parent.children[tokens] = Node(parent, tokens, block_id, parent.salt)
        insort(parent.sorted_tokens, tokens)
        return node

    def hold(self, nodes: Sequence[Node]) -> None:
        """Mark unheld nodes as held."""
        for node in nodes:
            assert not node.is_held
            node.is_held = True
        self.num_unheld -= len(nodes)

    def release(self, path: Sequence[Node]) -> None:
        """Mark nodes as unheld and as just used, after their last holder left."""
        self._clock += 1
        for node in path:
            assert node.is_held
            node.is_held = False
            node.last_used = self._clock
            self.num_unheld += 1
            self._offer(node)

    def evict(self) -> int:
        """Evict the least recently used unheld leaf and return its block id.

        The caller checks that there is one (`num_unheld`).
        """
        while True:
            last_used, _, node = heapq.heappop(self._leaves)
            if self._is_evictable(node, last_used):
                break
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        del parent.sorted_tokens[bisect_left(parent.sorted_tokens, node.tokens)]
        node.parent = None
        self.num_unheld -= 1
        if parent.block_id is None:
            self._drop_empty_root(parent)
        elif not parent.is_held:
            self._offer(parent)
        return block_of(node)

    def _drop_empty_root(self, node: Node) -> None:
        if node.block_id is None and not node.children and not node.tables:
            del self._roots[node.salt]

    def _is_evictable(self, node: Node, last_used: int) -> bool:
        # A node gets children only while it is held, so an entry from before is stale.
        return node.parent is not None and node.last_used == last_used and not node.is_held

    def _offer(self, node: Node) -> None:
        if node.children:
            return
        heapq.heappush(self._leaves, (node.last_used, block_of(node), node))
        if len(self._leaves) > 2 * self.num_unheld + 64:  # most entries are stale: rebuild the heap
            self._leaves = [e for e in self._leaves if self._is_evictable(e[2], e[0])]
            heapq.heapify(self._leaves)


def block_of(node: Node) -> int:
    """Return the block of a node that is not a root."""
    assert node.block_id is not None
    return node.block_id


def unheld(path: Sequence[Node]) -> list[Node]:
    """Return the unheld nodes of a path, which are the end of it."""
    count = len(path)
    while count and not path[count - 1].is_held:
        count -= 1
    return list(path[count:])


def path_to(node: Node | None) -> list[Node]:
    """Return the nodes from the root's child to ``node``, none for a root."""
    path: list[Node] = []
    while node is not None and node.block_id is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
