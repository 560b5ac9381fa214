"""The one door to the blocks: tables, the prefix cache and the pool together."""

from collections import Counter
from collections.abc import Iterable, Sequence

from mie.memory.pool import BlockPool
from mie.memory.prefix import Node, PrefixCache
from mie.memory.table import BlockTable

Copy = tuple[int, int]
"""(source block, destination block)."""


class KVCacheManager:
    """Opens, grows, forks and closes the block tables of sequences.

    The holders of a block are the tables it stands in and the prefix cache. At every moment
    free + cached (held by the prefix cache alone) + used = num_blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._prefix = PrefixCache(block_size) if enable_prefix_caching else None

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

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
        """Blocks that stand in a table."""
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks ``num_tokens`` tokens fill, the last one in part."""
        return -(-num_tokens // self.block_size)

    def open_table(
        self, token_ids: Sequence[int], *, use_cache: bool = True, salt: str | None = None
    ) -> BlockTable:
        """A table that shares the longest cached run of full blocks, or none at all.

        At least the last token stays out, so that there is something to compute logits from.
        """
        table = BlockTable(salt)
        if self._prefix and use_cache:
            for node in self._prefix.match(token_ids, len(token_ids) - 1, salt):
                self._append_node(table, node)
        table.num_tokens = table.num_cached = table.num_committed * self.block_size
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> tuple[Copy, ...] | None:
        """Make room for ``num_tokens`` tokens in all; None, and nothing done, if there is none.

        Returns the copies to run before anything is written. The block of the next token is about
        to be written, so if others hold it too it is replaced by a copy: copy, decref, swap. The
        last holder keeps it.
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
            return None
        copies: tuple[Copy, ...] = ()
        if is_shared:
            shared, private = table.block_ids[index], self._take_block()
            copies = ((shared, private),)
            self._pool.decref(shared)
            table.put(index, private)
        for _ in range(num_new):
            table.put(len(table.block_ids), self._take_block())
        return copies

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_tokens: int) -> None:
        """The first ``num_tokens`` of the tokens are stored: publish the blocks they fill.

        If another sequence published the same tokens first, the table takes that block and gives
        its own back.
        """
        assert table.is_open
        assert num_tokens <= len(table.block_ids) * self.block_size, "stored beyond the table"
        table.num_tokens = num_tokens
        if self._prefix is None:
            return
        size = self.block_size
        for index in range(table.num_committed, num_tokens // size):
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            node = self._prefix.child(table.node, tokens, table.salt)
            if node is None:
                block_id = table.block_ids[index]
                node = self._prefix.insert(table.node, tokens, block_id, table.salt)
                self._pool.incref(block_id)
            else:
                self._pool.decref(table.block_ids[index])
                self._hold(node)
                table.put(index, _block_of(node))
            table.node = node
            table.num_committed += 1

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table over the same blocks, a partial last one included."""
        assert table.is_open
        twin = BlockTable(table.salt)
        for index, block_id in enumerate(table.block_ids):
            self._pool.incref(block_id)
            twin.put(index, block_id)
        twin.num_tokens, twin.num_cached = table.num_tokens, table.num_cached
        twin.num_committed, twin.node = table.num_committed, table.node
        return twin

    def close_table(self, table: BlockTable) -> None:
        """Give every block back. What the prefix cache holds stays there until evicted."""
        assert table.is_open, "closed twice"
        table.is_open = False
        for block_id in table.block_ids:
            self._pool.decref(block_id)
        if self._prefix:
            path = _path_to(table.node)
            self._prefix.release([n for n in path if self._pool.refcount(_block_of(n)) == 1])
        table.block_ids.clear()
        table.node = None

    def check_invariants(self, tables: Iterable[BlockTable]) -> None:
        """Assert that every count equals what the given open tables and the prefix cache hold."""
        self._pool.check_invariants()
        held = Counter(block_id for table in tables for block_id in table.block_ids)
        nodes = list(self._prefix.nodes()) if self._prefix else []
        cached = Counter(_block_of(node) for node in nodes)
        assert all(count == 1 for count in cached.values()), "a block has two places in the tree"
        for block_id in range(self.num_blocks):
            expected = held[block_id] + cached[block_id]
            assert self._pool.refcount(block_id) == expected, f"block {block_id} is miscounted"
        for node in nodes:
            assert node.is_held == (held[_block_of(node)] > 0), "a node's holder is misremembered"
            parent_held = node.parent is None or node.parent.block_id is None or node.parent.is_held
            assert parent_held or not node.is_held, "a held node has an unheld parent"
        assert self.num_cached == sum(not node.is_held for node in nodes)

    def _take_block(self) -> int:
        block_id = self._pool.allocate()
        if block_id is None:
            assert self._prefix is not None
            self._pool.decref(self._prefix.evict())
            block_id = self._pool.allocate()
        assert block_id is not None, "the caller checked num_available"
        return block_id

    def _append_node(self, table: BlockTable, node: Node) -> None:
        self._hold(node)
        table.put(table.num_committed, _block_of(node))
        table.node = node
        table.num_committed += 1

    def _hold(self, node: Node) -> None:
        assert self._prefix is not None
        self._pool.incref(_block_of(node))
        if not node.is_held:
            self._prefix.hold(node)


def _block_of(node: Node) -> int:
    assert node.block_id is not None
    return node.block_id


def _path_to(node: Node | None) -> list[Node]:
    """The nodes from the root's child to ``node``."""
    path = []
    while node is not None and node.block_id is not None:
        path.append(node)
        node = node.parent
    return path[::-1]
