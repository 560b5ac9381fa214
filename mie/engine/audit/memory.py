"""Check the KV cache's state by brute force, and return it as plain data.

The checks are for tests. They recompute everything that the manager maintains, so they take time in
proportion to the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mie.engine.audit.states import check_states, states_snapshot
from mie.memory.manager import KVCacheManager
from mie.memory.pool import REGION, BlockPool
from mie.memory.prefix import Node, PrefixCache, block_of
from mie.memory.table import BlockTable, HostTable


def memory_snapshot(manager: KVCacheManager) -> dict[str, Any]:
    """Return the held blocks and the prefix tree as plain data."""
    pool, prefix = manager._pool, manager._prefix
    refcounts = ((block_id, pool.refcount(block_id)) for block_id in range(pool.num_blocks))
    states = {} if manager.states is None else {"states": states_snapshot(manager.states)}
    return {
        **states,
        "block_size": manager.block_size,
        "num_blocks": manager.num_blocks,
        "num_host_blocks": manager._num_host_blocks,
        "refs": {block_id: count for block_id, count in refcounts if count},
        "tree": {
            block_of(node): {
                "parent": node.parent.block_id if node.parent else None,
                "salt": node.salt,
                "tokens": list(node.tokens),
            }
            for node in _blocks(prefix)
        },
    }


def check_memory(
    manager: KVCacheManager, tables: Iterable[BlockTable], host_tables: Iterable[HostTable] = ()
) -> None:
    """Assert, between steps, that every count equals the holders of its block.

    ``tables`` and ``host_tables`` are all that are open.
    """
    assert not manager._pinned, "a block is pinned between steps"
    tables, host_tables = list(tables), list(host_tables)
    if manager.states is not None:
        check_states(manager.states, _blocks(manager._prefix), tables, host_tables)
    _check_holders(manager._pool, manager._prefix, tables)
    _check_host_pool(manager._host_pool, host_tables)
    assert manager.num_cached <= manager._max_cached, "the cache is over its budget"
    assert manager._num_entries == sum(len(table.block_ids) for table in tables)
    assert manager.num_slots_empty == _count_empty_slots(tables, manager.block_size)


def walk(prefix: PrefixCache) -> Iterator[Node]:
    """Yield every node of the tree, the roots included."""
    stack = list(prefix._roots.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _blocks(prefix: PrefixCache) -> Iterator[Node]:
    """Yield every node that holds a block."""
    return (node for node in walk(prefix) if node.block_id is not None)


def check_pool(pool: BlockPool) -> None:
    """Assert that the blocks without a holder are exactly those that can be allocated."""
    unheld = {i for i, count in enumerate(pool._refcounts) if count == 0}
    assert pool.num_free == len(unheld), "the free list and the counts disagree"
    assert unheld == set(pool._free), "the free blocks are others"
    for region in range(pool.num_blocks // REGION):
        blocks = range(region * REGION, (region + 1) * REGION)
        assert pool._num_held[region] == sum(i not in unheld for i in blocks), "a wrong region"
        assert (region in pool._free_regions) == unheld.issuperset(blocks), "a wrong free region"
    assert min(pool._refcounts, default=0) >= 0, "a count is negative"


def _check_holders(pool: BlockPool, prefix: PrefixCache, tables: Sequence[BlockTable]) -> None:
    """Assert that every reference count equals the entries in open tables and the prefix cache."""
    check_pool(pool)
    held = Counter(block_id for table in tables for block_id in table.block_ids)
    nodes = list(_blocks(prefix))
    cached = Counter(block_of(node) for node in nodes)
    assert all(count == 1 for count in cached.values()), "a block has two places in the tree"
    for block_id in range(pool.num_blocks):
        expected = held[block_id] + cached[block_id]
        assert pool.refcount(block_id) == expected, f"block {block_id} is miscounted"
    for node in nodes:
        is_held = node not in prefix.unheld
        assert is_held == (held[block_of(node)] > 0), "a node records the wrong holder"
    _check_tree(prefix, tables)


def _check_tree(prefix: PrefixCache, tables: Iterable[BlockTable]) -> None:
    """Assert the invariants of the tree, and that it knows exactly ``tables``."""
    known = [table for node in walk(prefix) for table in node.tables]
    assert len(known) == len(set(known)), "a table is registered at two nodes"
    assert set(known) == set(tables), "the tree has a closed table or misses an open one"
    for root in prefix._roots.values():
        assert root.children or root.tables, "an empty root was kept"
    for node in walk(prefix):
        assert node.sorted_tokens == sorted(node.children), "the sorted keys differ"
        assert all(table.node is node for table in node.tables), "a table is elsewhere"
        for child in node.children.values():
            assert child.parent is node
            assert child.salt == node.salt
            assert node not in prefix.unheld or child in prefix.unheld, (
                "a held node has an unheld parent"
            )
    order = {node: place for place, node in enumerate(prefix.unheld)}
    assert order.keys() <= set(_blocks(prefix)), "an evicted node can be evicted again"
    for node, place in order.items():
        children = node.children.values()
        assert all(order[child] < place for child in children), "evicted before its children"


def _check_host_pool(pool: BlockPool, tables: Iterable[HostTable]) -> None:
    """Assert that exactly the blocks of ``tables`` are taken, each once."""
    check_pool(pool)
    held = [host_id for table in tables for host_id in table.block_ids]
    assert len(set(held)) == len(held), "a host block has two owners"
    assert len(held) == pool.num_blocks - pool.num_free, "a host block leaked"
    assert all(pool.refcount(host_id) == 1 for host_id in held)


def _count_empty_slots(tables: Sequence[BlockTable], block_size: int) -> int:
    """Return the number of empty slots in the blocks of the tables, counting each block once."""
    filled: dict[int, int] = {}
    for table in tables:
        for index, block_id in enumerate(table.block_ids):
            count = min(block_size, max(0, table.num_tokens - index * block_size))
            filled[block_id] = max(count, filled.get(block_id, 0))
    return len(filled) * block_size - sum(filled.values())
