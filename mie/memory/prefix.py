"""Cache prefixes in a tree of full blocks keyed by their tokens.

A path from a root spells a token sequence, so equal paths mean equal keys and values. Blocks
without a holder stay until they are evicted. Only leaves are evicted, least recently used first, so
a shared root outlives its branches.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, count, takewhile
from operator import attrgetter, ne
from typing import NamedTuple

from mie.memory.table import BlockTable, Entry, HostTable


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
    entry: Entry | None = None
    """The blocks of layers with a window for the same tokens, if they are cached, too."""


class PartialMatch(NamedTuple):
    """The block whose start matches most of the following tokens."""

    block_id: int
    num_tokens: int
    node: Node | None
    """Its node, or None if a running sequence is still filling the block."""


class Room(NamedTuple):
    """How a sequence can be opened, from `KVCacheManager.find_room`. Nothing is allocated yet."""

    token_ids: Sequence[int]
    salt: str | None
    path: list[Node]
    """The cached full blocks that match the start of its tokens."""
    partial: PartialMatch | None
    """A block to copy from after ``path``, because its start matches."""
    host: HostTable | None
    num_computed: int
    """Number of tokens that need not be computed."""
    num_new: int
    """Number of blocks to allocate."""
    num_taken: int
    """Number of available blocks that it takes: new ones, cached ones, and those it may claim."""


class PrefixCache:
    """A tree of blocks of ``block_size`` tokens. `KVCacheManager` does the reference counting.

    A holder of a node's block also holds the blocks of its ancestors. So the nodes below an unheld
    node are unheld too, and were released before it. The first node of ``unheld`` is therefore a
    leaf, and evicting one after another can free them all.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[str | None, Node] = {}
        self.unheld: OrderedDict[Node, int] = OrderedDict()
        """The nodes whose blocks only the cache holds, in the order of their release, and its step.
        """

    def match(self, token_ids: Sequence[int], limit: int, salt: str | None) -> list[Node]:
        """Return the longest path of full blocks that match at most ``limit`` tokens."""
        node = self._roots.get(salt)
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
        node = path[-1] if path else self._roots.get(salt)
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

    def unheld_end(self, path: Sequence[Node]) -> list[Node]:
        """Return the unheld nodes of a path, which are the end of it, the last one first."""
        return list(takewhile(self.unheld.__contains__, reversed(path)))

    def evict(self) -> Node:
        """Evict and return the least recently used unheld leaf. There must be one."""
        node, _ = self.unheld.popitem(last=False)
        parent = node.parent
        assert parent is not None
        assert not node.children, "a node was released before a node below it"
        del parent.children[node.tokens]
        del parent.sorted_tokens[bisect_left(parent.sorted_tokens, node.tokens)]
        self._drop_empty_root(parent)
        return node

    def _drop_empty_root(self, node: Node) -> None:
        if node.block_id is None and not node.children and not node.tables:
            del self._roots[node.salt]


def block_of(node: Node) -> int:
    """Return the block of a node that is not a root."""
    assert node.block_id is not None
    return node.block_id


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    return next(compress(count(), map(ne, a, b)), min(len(a), len(b)))
