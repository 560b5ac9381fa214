"""Check the KV cache's state by brute force, and return it as plain data.

The checks are for tests. They recompute everything that the manager maintains, so they take time in
proportion to the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from mie.engine.audit.states import check_states, states_snapshot
from mie.memory.manager import KVCacheManager
from mie.memory.pool import REGION, BlockPool
from mie.memory.prefix import Node, PrefixCache, block_of
from mie.memory.table import BlockTable, Entry, HostTable
from mie.memory.windowed import WindowedManager


def memory_snapshot(manager: KVCacheManager) -> dict[str, Any]:
    """Return the held blocks and the prefix tree as plain data."""
    pool, prefix, entries = manager._pool, manager._prefix, _entries_of(manager)
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
                **({"entry": list(entries[node])} if node in entries else {}),
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
    _check_holders(manager, tables)
    _check_host_pool(manager._host.pool, host_tables)
    assert manager.num_cached <= manager._max_cached, "the cache is over its budget"
    assert manager._num_entries == sum(len(table.block_ids) for table in tables)
    assert manager.num_slots_empty == _count_empty_slots(tables, manager.block_size)
    if isinstance(manager, WindowedManager):
        _check_windows(manager, tables)


def _entries_of(manager: KVCacheManager) -> dict[Node, Entry]:
    """Return the nodes' blocks of layers with a window."""
    return manager._entries if isinstance(manager, WindowedManager) else {}


def _check_windows(manager: WindowedManager, tables: Sequence[BlockTable]) -> None:
    """Assert that each table has exactly the entries within reach, and a claim on all to come."""
    window, nodes = manager.window, set(_blocks(manager._prefix))
    held = {block_id for table in tables for entry in table.entries for block_id in entry}
    for table in tables:
        assert table.num_passed == window.reach(table.num_tokens), "a block was kept or let go"
        end = table.num_passed + len(table.entries)
        assert end >= manager.blocks_for(table.num_writable), "a writable slot has no entry"
        assert end <= len(table.block_ids), "an entry has no tokens"
        assert table.claim >= len(table.entries), "more entries than claimed"
    claimed = sum(table.claim for table in tables) * window.num_groups
    assert manager.num_claimed == claimed - len(held), "the claims are miscounted"
    assert manager._num_in_tables == sum(len(table.entries) for table in tables) * window.num_groups
    assert manager.num_available >= 0, "more blocks are claimed than there are"
    assert manager._entries.keys() <= nodes, "an evicted node has an entry"
    assert manager._nodes == {entry[0]: node for node, entry in manager._entries.items()}
    for node, entry in manager._entries.items():
        assert len(entry) == window.num_groups
        assert (node in manager._unheld) == held.isdisjoint(entry), "a wrong holder of an entry"
    assert manager._unheld.keys() <= manager._entries.keys()


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


def _check_holders(manager: KVCacheManager, tables: Sequence[BlockTable]) -> None:
    """Assert that every reference count equals the entries in open tables and the prefix cache."""
    pool, prefix = manager._pool, manager._prefix
    check_pool(pool)
    held = Counter(block_id for table in tables for block_id in table.held_ids)
    nodes = list(_blocks(prefix))
    cached = Counter(chain(map(block_of, nodes), *_entries_of(manager).values()))
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
