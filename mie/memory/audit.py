"""Check the allocator's state by brute force for tests, and dump it as plain data for the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from mie.memory.pool import BlockPool
from mie.memory.prefix import PrefixCache, block_of
from mie.memory.table import BlockTable


def check_counts(pool: BlockPool, prefix: PrefixCache | None, tables: Sequence[BlockTable]) -> None:
    """Assert that every reference count equals what the open tables and the prefix cache hold."""
    pool.check_invariants()
    held = Counter(block_id for table in tables for block_id in table.block_ids)
    nodes = list(prefix.nodes()) if prefix else []
    cached = Counter(block_of(node) for node in nodes)
    assert all(count == 1 for count in cached.values()), "a block has two places in the tree"
    for block_id in range(pool.num_blocks):
        expected = held[block_id] + cached[block_id]
        assert pool.refcount(block_id) == expected, f"block {block_id} is miscounted"
    for node in nodes:
        assert node.is_held == (held[block_of(node)] > 0), "a node records the wrong holder"
    if prefix:
        prefix.check_invariants(tables)


def count_empty_slots(tables: Sequence[BlockTable], block_size: int) -> int:
    """Return the number of empty slots in the blocks of the tables, counting each block once."""
    filled: dict[int, int] = {}
    for table in tables:
        for index, block_id in enumerate(table.block_ids):
            count = min(block_size, max(0, table.num_tokens - index * block_size))
            filled[block_id] = max(count, filled.get(block_id, 0))
    return len(filled) * block_size - sum(filled.values())


def holders_and_tree(pool: BlockPool, prefix: PrefixCache | None) -> dict[str, Any]:
    """Return the reference count of each held block and the position of each cached block."""
    refcounts = ((block_id, pool.refcount(block_id)) for block_id in range(pool.num_blocks))
    return {
        "refs": {block_id: count for block_id, count in refcounts if count},
        "tree": {
            block_of(node): {
                "parent": node.parent.block_id if node.parent else None,
                "salt": node.salt,
                "tokens": list(node.tokens),
            }
            for node in (prefix.nodes() if prefix else ())
        },
    }
