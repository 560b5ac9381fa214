"""Track the block side of the state: reference counts and the prefix tree."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from mie.errors import TraceError
from mie.events import Snapshot


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """A block in the prefix tree."""

    parent: int | None
    salt: str | None
    tokens: tuple[int, ...]
    entry: tuple[int, ...] = ()
    """The node's blocks of layers with a window."""


class BlockState:
    """Reference counts and their sources: table entries, the prefix tree and pins."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.refs: dict[int, int] = {}
        self.tree: dict[int, NodeState] = {}
        self.in_tables: Counter[int] = Counter()
        """Number of table entries of each block."""
        self.node_of: dict[int, int] = {}
        """The node of each block that the tree holds, by its own block."""
        self._pins: Counter[int] = Counter()
        self._num_children: Counter[int] = Counter()
        self._touched: set[int] = set()  # blocks that changed since the last check

    def load(self, snapshot: Snapshot) -> None:
        """Load a snapshot. Holders that it does not name are pins."""
        self.refs = dict(snapshot["refs"])
        for block in self.refs:
            require(0 <= block < self.num_blocks, f"there is no block {block}")
        for values in snapshot["sequences"].values():
            self.in_tables.update(chain(values["blocks"], *values.get("entries", ())))
        for block, node in snapshot["tree"].items():
            lists = {"tokens": tuple(node["tokens"]), "entry": tuple(node.get("entry", ()))}
            self.tree[block] = NodeState(**{**node, **lists})
            self.node_of.update(dict.fromkeys((block, *lists["entry"]), block))
            if node["parent"] is not None:
                self._num_children[node["parent"]] += 1
        for block, count in self.refs.items():
            self._pins[block] = count - self.in_tables[block] - (block in self.node_of)
        self._touched.update(self.refs, self.in_tables, self.node_of)
        self.check()

    def snapshot(self) -> dict[str, Any]:
        """Return the blocks' part of a snapshot."""
        tree = {}
        for block, node in self.tree.items():
            tree[block] = {"parent": node.parent, "salt": node.salt, "tokens": list(node.tokens)}
            if node.entry:
                tree[block]["entry"] = list(node.entry)
        return {"refs": dict(self.refs), "tree": tree}

    # Queries.

    @property
    def num_used(self) -> int:
        """The number of blocks in tables."""
        return len(self.in_tables)

    @property
    def num_cached(self) -> int:
        """The number of blocks that only the prefix tree holds."""
        return len(self.node_of.keys() - self.in_tables.keys())

    @property
    def num_saved(self) -> int:
        """The number of blocks that sharing saves: table entries minus used blocks."""
        return self.in_tables.total() - self.num_used

    def num_tokens(self, block: int) -> int:
        """Return the number of tokens on the path to a node of the tree."""
        path, node = 0, self.tree.get(block)
        while node is not None and path < len(self.tree):  # a file may have a circle
            path, node = path + 1, None if node.parent is None else self.tree.get(node.parent)
        return path * self.block_size

    # Changes.

    def enter_table(self, block: int) -> None:
        """Add a table entry and a reference."""
        self.in_tables[block] += 1
        self._hold(block)

    def leave_table(self, block: int) -> None:
        """Remove a table entry. `let_go` removes the reference."""
        self._touched.add(block)
        self.in_tables[block] -= 1
        if not self.in_tables[block]:
            del self.in_tables[block]

    def let_go(self, block: int) -> None:
        """Remove a reference."""
        require(block in self.refs, f"block {block} has no holder")
        self._touched.add(block)
        self.refs[block] -= 1
        if not self.refs[block]:
            del self.refs[block]

    def seal(self, block: int, parent: int | None, salt: str | None, tokens: Iterable[int]) -> None:
        """Insert the block into the tree."""
        node = NodeState(parent=parent, salt=salt, tokens=tuple(tokens))
        require(block in self.in_tables, "it is in no table")
        require(block not in self.tree, "it is already in the tree")
        require(parent is None or parent in self.tree, "its parent is not in the tree")
        require(len(node.tokens) == self.block_size, "only a full block enters the tree")
        self.tree[block] = node
        self.node_of[block] = block
        if parent is not None:
            self._num_children[parent] += 1
        self._hold(block)

    def evict(self, block: int) -> None:
        """Remove the block from the tree."""
        require(block in self.tree, "it is not in the tree")
        require(not self._num_children[block], "it is not a leaf")
        require(not self.tree[block].entry, "it still has blocks of layers with a window")
        node = self.tree.pop(block)
        del self.node_of[block]
        if node.parent is not None:
            self._num_children[node.parent] -= 1
        self.let_go(block)

    def seal_window(self, block: int, blocks: Iterable[int]) -> None:
        """Give a node of the tree its blocks of layers with a window."""
        require(block in self.tree, "it is not in the tree")
        require(not self.tree[block].entry, "it has such blocks")
        self.tree[block] = replace(self.tree[block], entry=tuple(blocks))
        for other in blocks:
            require(other in self.in_tables, f"block {other} is in no table")
            require(other not in self.node_of, f"block {other} is already in the tree")
            self.node_of[other] = block
            self._hold(other)

    def evict_window(self, block: int, blocks: Iterable[int]) -> None:
        """Take these blocks from a node of the tree."""
        require(block in self.tree, "it is not in the tree")
        require(self.tree[block].entry == tuple(blocks), "it has other blocks")
        self.tree[block] = replace(self.tree[block], entry=())
        for other in blocks:
            del self.node_of[other]
            self.let_go(other)

    def pin(self, block: int) -> None:
        """Hold the block without a table."""
        require(block in self.refs, "it has no holder")
        self._pins[block] += 1
        self._hold(block)

    def unpin(self, block: int) -> None:
        """Remove a pin."""
        require(self._pins[block] > 0, "it is not pinned")
        self._pins[block] -= 1
        self.let_go(block)

    def check(self) -> None:
        """Raise `TraceError` unless every changed block has the expected references."""
        for block in self._touched:
            expected = self.in_tables[block] + (block in self.node_of) + self._pins[block]
            found = self.refs.get(block, 0)
            require(found == expected, f"block {block} has {found} references, not {expected}")
            require(self._pins[block] >= 0, f"block {block} has only {found} references")
        self._touched.clear()

    def _hold(self, block: int) -> None:
        require(0 <= block < self.num_blocks, f"there is no block {block}")
        self._touched.add(block)
        self.refs[block] = self.refs.get(block, 0) + 1


def require(is_so: bool, otherwise: str) -> None:
    """Raise `TraceError` with this message unless the condition holds."""
    if not is_so:
        raise TraceError(otherwise)
