"""Return the state of the scheduler and the memory as plain data, for the event log.

A replay of the log must arrive at the same data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mie.memory.layers.states import States
from mie.memory.layers.windows import Windows
from mie.memory.manager import KVCacheManager
from mie.memory.prefix import Node, PrefixCache, block_of
from mie.memory.table import BlockTable
from mie.sched.scheduler import Scheduler


def scheduler_snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """Return the queues, their sequences and the blocks."""
    waiting, running = list(scheduler.waiting), scheduler.running
    return {
        **memory_snapshot(scheduler.manager),
        "waiting": [seq.seq_id for seq in waiting],
        "running": [seq.seq_id for seq in running],
        "sequences": {
            seq.seq_id: {
                "request_id": seq.request.request_id,
                "rank": seq.key[0],
                "num_prompt": seq.request.num_prompt,
                "max_tokens": seq.request.params.max_tokens,
                "num_tokens": seq.num_tokens,
                "num_computed": seq.num_computed,
                "row": seq.table.row if seq.table else None,
                "blocks": list(seq.table.block_ids) if seq.table else [],
                "host": list(seq.host.block_ids) if seq.host else None,
                "n": seq.request.params.n,
                **_entries_of(seq.table, scheduler.manager),
            }
            for seq in [*waiting, *running]
        },
    }


def _entries_of(table: BlockTable | None, manager: KVCacheManager) -> dict[str, Any]:
    """Return the blocks of layers with a window, if there are any."""
    windows = manager.part(Windows)
    if table is None or windows is None or not windows.tables[table].entries:
        return {}
    own = windows.tables[table]
    return {"entries": [[*entry] for entry in own.entries], "num_passed": own.num_passed}


def memory_snapshot(manager: KVCacheManager) -> dict[str, Any]:
    """Return the held blocks, the prefix tree, and the slots of states if there are any."""
    refcounts = (
        (block_id, manager.pool.refcount(block_id)) for block_id in range(manager.num_blocks)
    )
    windows = manager.part(Windows)
    entries = {} if windows is None else windows.nodes
    return {
        **_slots_of(manager),
        "block_size": manager.block_size,
        "num_blocks": manager.num_blocks,
        "num_host_blocks": manager.num_host_blocks,
        "refs": {block_id: count for block_id, count in refcounts if count},
        "tree": {
            block_of(node): {
                "parent": node.parent.block_id if node.parent else None,
                "salt": node.salt,
                "tokens": list(node.tokens),
                **({"entry": list(entries[node])} if node in entries else {}),
            }
            for node in nodes_of(manager.prefix)
            if node.parent
        },
    }


def nodes_of(prefix: PrefixCache) -> Iterator[Node]:
    """Yield every node of the tree, the roots included."""
    stack = list(prefix.roots.values())
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.children.values())


def _slots_of(manager: KVCacheManager) -> dict[str, Any]:
    """Return the owner of each slot of recurrent states, if there are any."""
    states = manager.part(States)
    if states is None:
        return {}
    slots = {
        "num_slots": states.num_states,
        "num_host_slots": states.num_host_states,
        "running": {table.owner: each.slot for table, each in states.states.items()},
        "saved": {block_of(node): each.slot for node, each in states.snapshots.items()},
        "hosts": {host.owner: states.host_slot(host) for host in manager.host.tables},
    }
    return {"states": slots}
