"""The prefix cache: a tree of full blocks keyed by their tokens.

A path from a root spells a sequence of tokens, so equal paths mean equal keys and values. Blocks
without a holder stay until they are evicted: leaves only, least recently used first, so that a
shared root outlives its branches.
"""

import heapq
from collections.abc import Iterator, Sequence


class Node:
    """One full block in the tree. The roots, one a salt, hold no block."""

    __slots__ = ("block_id", "children", "is_held", "last_used", "parent", "tokens")

    def __init__(
        self, parent: "Node | None", tokens: tuple[int, ...], block_id: int | None
    ) -> None:
        self.parent = parent
        self.tokens = tokens
        self.block_id = block_id
        self.children: dict[tuple[int, ...], Node] = {}
        self.is_held = True
        self.last_used = 0


class PrefixCache:
    """A tree of blocks of ``block_size`` tokens; it counts nothing, `KVCacheManager` does.

    Whoever holds a node's block holds its ancestors' too. So everything below a node without a
    holder has none either, and evicting leaf after leaf can free every one of them: `num_unheld` is
    what eviction can give.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._roots: dict[str | None, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []  # a heap; stale entries are skipped
        self._clock = 0
        self.num_unheld = 0

    def match(self, token_ids: Sequence[int], limit: int, salt: str | None) -> list[Node]:
        """The longest path that spells a prefix of at most ``limit`` of the tokens."""
        node = self._roots.get(salt)
        path: list[Node] = []
        size = self._block_size
        while node is not None and (len(path) + 1) * size <= limit:
            tokens = tuple(token_ids[len(path) * size : (len(path) + 1) * size])
            node = node.children.get(tokens)
            if node is not None:
                path.append(node)
        return path

    def child(self, parent: Node | None, tokens: tuple[int, ...], salt: str | None) -> Node | None:
        """The node that continues ``parent`` (None: the salt's root) with ``tokens``, if any."""
        return self._at(parent, salt).children.get(tokens)

    def insert(
        self, parent: Node | None, tokens: tuple[int, ...], block_id: int, salt: str | None
    ) -> Node:
        """A new, held node under ``parent`` (None: the salt's root)."""
        parent = self._at(parent, salt)
        assert tokens not in parent.children, "these tokens are in the tree already"
        node = parent.children[tokens] = Node(parent, tokens, block_id)
        return node

    def hold(self, node: Node) -> None:
        """A holder came to a node that had none."""
        assert not node.is_held
        node.is_held = True
        self.num_unheld -= 1

    def release(self, path: Sequence[Node]) -> None:
        """The last holder of these nodes left; they were all used just now."""
        self._clock += 1
        for node in path:
            assert node.is_held
            node.is_held = False
            node.last_used = self._clock
            self.num_unheld += 1
            self._offer(node)

    def evict(self) -> int:
        """Take the least recently used leaf without a holder out of the tree: its block id.

        The caller knows that there is one (`num_unheld`).
        """
        while True:
            last_used, _, node = heapq.heappop(self._leaves)
            if self._is_evictable(node, last_used):
                break
        parent, block_id = node.parent, node.block_id
        assert parent is not None
        assert block_id is not None
        del parent.children[node.tokens]
        node.parent = None
        self.num_unheld -= 1
        if parent.block_id is None:
            if not parent.children:
                self._roots = {salt: r for salt, r in self._roots.items() if r is not parent}
        elif not parent.is_held:
            self._offer(parent)
        return block_id

    def nodes(self) -> Iterator[Node]:
        """Every node that holds a block."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            if node.block_id is not None:
                yield node
            stack.extend(node.children.values())

    def _at(self, node: Node | None, salt: str | None) -> Node:
        return node or self._roots.setdefault(salt, Node(None, (), None))

    def _is_evictable(self, node: Node, last_used: int) -> bool:
        current = node.parent is not None and node.last_used == last_used
        return current and not node.is_held and not node.children

    def _offer(self, node: Node) -> None:
        if node.children:
            return
        heapq.heappush(self._leaves, (node.last_used, id(node), node))
        if len(self._leaves) > 2 * self.num_unheld + 64:  # mostly stale entries: rebuild
            self._leaves = [e for e in self._leaves if self._is_evictable(e[2], e[0])]
            heapq.heapify(self._leaves)
