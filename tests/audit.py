"""Read private state: the parts of an engine, and checks of the memory and the scheduler.

No other file of the tests reads private state (`house/test_private_state.py`). The checks recompute
everything that the classes maintain, so they take time in proportion to the pool. They hold between
two steps.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from mie import LLM, AsyncLLM
from mie.base.worker import Worker
from mie.engine.engine import Engine
from mie.engine.overlap import OverlappingRunner
from mie.engine.watch.snapshot import nodes_of
from mie.frontend.loop import EngineLoop
from mie.memory.layers.states import States
from mie.memory.layers.windows import Windows
from mie.memory.manager import KVCacheManager
from mie.memory.pool import REGION, BlockPool
from mie.memory.prefix import Node, PrefixCache, block_of
from mie.memory.table import BlockTable, HostTable
from mie.sched.queue import WaitingQueue
from mie.sched.rows import RunningRows
from mie.sched.scheduler import Scheduler
from mie.structured.grammars import Grammars
from mie.text.renderer import TemplateRenderer
from mie.text.tokenizer import Tokenizer


def llm_of(llm: LLM | AsyncLLM) -> LLM:
    """Return the `LLM` inside an `AsyncLLM`."""
    return llm._llm if isinstance(llm, AsyncLLM) else llm


def loop_of(llm: LLM | AsyncLLM) -> EngineLoop:
    """Return the loop that runs the commands of all callers."""
    return llm_of(llm).loop


def engine_of(llm: LLM | AsyncLLM) -> Engine:
    """Return the engine that runs the steps of all callers."""
    return loop_of(llm).engine


def grammars_of(llm: LLM | AsyncLLM) -> Grammars:
    """Return the compiled descriptions of outputs."""
    constraints = llm_of(llm).llm_engine.preparer.constraints
    assert constraints is not None
    return constraints


def forget_grammars(llm: LLM | AsyncLLM) -> None:
    """Forget all compiled descriptions of outputs, so that they are compiled again."""
    grammars_of(llm)._kept._begin()


def compile_worker(grammars: Grammars) -> Worker | None:
    """Return the process that compiles descriptions of outputs, if it runs."""
    return grammars._compiler._worker


def end_compile_worker(grammars: Grammars) -> None:
    """End the process that compiles descriptions of outputs."""
    grammars._compiler._end_worker()


def renderer_of(llm: LLM | AsyncLLM) -> TemplateRenderer:
    """Return the renderer of the model's chat templates."""
    return llm_of(llm).get_tokenizer().chat_templates._renderer


def render_worker(renderer: TemplateRenderer) -> Worker | None:
    """Return the process that renders chat templates, if it runs."""
    return renderer._worker


def is_renderer_locked(renderer: TemplateRenderer) -> bool:
    """Return whether a request holds the renderer."""
    return renderer._lock.locked()


def is_stopping(llm: LLM | AsyncLLM) -> bool:
    """Return whether the thread of the loop is to end."""
    return loop_of(llm)._is_stopping


def runner_of(engine: Engine) -> Any:
    """Return the runner that computes the steps, also if they are launched ahead."""
    runner = engine.runner
    return runner.runner if isinstance(runner, OverlappingRunner) else runner


def replace_runner(engine: Engine, runner: Any) -> None:
    """Let another runner compute the steps."""
    if isinstance(engine.runner, OverlappingRunner):
        engine.runner.runner = runner
    else:
        engine.runner = runner


def steps_of(backend: Any) -> Any:
    """Return the object that runs and captures the steps of a GPU."""
    return backend._steps


def captured_steps(backend: Any) -> dict[Any, Any]:
    """Return the steps that a GPU can replay, the most recently used last."""
    captured: dict[Any, Any] = backend._steps._captured
    return captured


def caches_of(engine: Engine) -> list[Any]:
    """Return the KV cache and the swapped blocks, as the backend lays them out."""
    runner = runner_of(engine)
    return [cache for cache in (runner._kv_cache, runner._host_cache) if cache is not None]


def tier_of(engine: Engine) -> Any:
    """Return the tier of an engine with a prefix cache on a disk."""
    return engine.before_step[0].__self__


def entry_of(store: Any, key: bytes) -> Any:
    """Return the place of a content in the segments of a store, or None."""
    return store._entries.get(key)


def limit_store(store: Any, max_bytes: int) -> None:
    """Give a store less room than the setting allows."""
    store._max_bytes = max_bytes


def writer_of(store: Any) -> Any:
    """Return the thread that writes the blocks of a store."""
    return store._writer


def kill_writer(store: Any) -> None:
    """Let the process of a store be dead for other processes, without a last segment."""
    with store._lock:
        store._queue.clear()
    store.close()


def states_of(engine: Engine) -> Any:
    """Return the recurrent states, or None for a model without them."""
    return runner_of(engine)._states


def kv_cache_of(engine: Engine) -> Any:
    """Return the KV cache, as the backend lays it out."""
    return runner_of(engine)._kv_cache


def num_open_requests(llm: LLM | AsyncLLM) -> int:
    """Return the number of requests that the output processor still follows."""
    return len(loop_of(llm).processor._answers)


def check_idle(llm: LLM | AsyncLLM) -> None:
    """Assert that no request, no command and no block is left."""
    loop = loop_of(llm)
    assert not loop.engine.has_work
    assert not loop.inbox
    assert not num_open_requests(llm), "the output processor follows a request that has ended"
    assert loop.engine.scheduler.manager.num_used == 0
    check_scheduler(loop.engine.scheduler)


def queue_of(scheduler: Scheduler) -> WaitingQueue:
    """Return the waiting queue of a scheduler."""
    return scheduler._queue


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options, arguments and commands of a parser of command lines."""
    return parser._actions


def backend_of(tokenizer: Tokenizer) -> Any:
    """Return the object of the library ``tokenizers`` inside a tokenizer."""
    return tokenizer._backend


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert that each live sequence is in one queue, and holds blocks only while it runs."""
    waiting, running = list(scheduler.waiting), scheduler.running
    tables = [seq.table for seq in running if seq.table is not None]
    hosts = [seq.host for seq in waiting if seq.host is not None]
    check_memory(scheduler.manager, tables, hosts)
    _check_rows(scheduler._rows)
    assert not {*waiting} & {*running}, "both waiting and running"
    for seq in [*waiting, *running]:
        assert seq.finish_reason is None
        assert seq.num_missing >= 1
    for seq in waiting:
        assert seq.table is None, "waiting and holding blocks"
    for seq in running:
        assert seq.table is not None
        assert seq.host is None, "swapped out and running"
        assert seq.is_prefilling or seq.num_missing == 1 or seq.num_generated


def _check_rows(rows: RunningRows) -> None:
    """Assert that the running sequences are in order and that each row has one owner."""
    running = rows.running
    assert [seq.key for seq in running] == sorted(seq.key for seq in running)
    assert {seq.table.row: seq for seq in running if seq.table is not None} == rows.by_row
    assert len(rows.by_row) == len(running)
    assert sorted([*rows.by_row, *rows._free]) == list(range(len(running) + len(rows._free)))
    assert rows.num_prefilling == sum(seq.is_prefilling for seq in running)
    assert rows._new.items() <= rows.by_row.items(), "a row without an owner"


def check_memory(
    manager: KVCacheManager, tables: Iterable[BlockTable], host_tables: Iterable[HostTable] = ()
) -> None:
    """Assert that every count equals the holders of its block.

    ``tables`` and ``host_tables`` are all that are open.
    """
    assert not manager.prefix.pinned, "a block is pinned between steps"
    tables, host_tables = list(tables), list(host_tables)
    _check_holders(manager, tables)
    _check_host_pool(manager, host_tables)
    windows = manager.part(Windows)
    assert manager.num_cached <= manager.max_cached, "the cache is over its budget"
    num_entries = len(windows._unheld) * windows.window.num_groups if windows else 0
    assert manager.num_cached == len(manager.prefix.unheld) + num_entries
    assert manager._num_entries == sum(len(table.block_ids) for table in tables)
    assert manager.num_slots_empty == _count_empty_slots(tables, manager.block_size)
    if windows is not None:
        _check_windows(manager, windows, tables)
    if (states := manager.part(States)) is not None:
        _check_states(manager, states, tables, host_tables)


def _check_windows(manager: KVCacheManager, windows: Windows, tables: Sequence[BlockTable]) -> None:
    """Assert that each table has exactly the entries within reach, and reserves all to come."""
    window, entries = windows.window, windows.nodes
    assert {*windows.tables} == {*tables}, "a closed table has entries, or an open one has none"
    held = {block_id for own in windows.tables.values() for block_id in own.block_ids}
    for table, own in windows.tables.items():
        assert own.num_passed == window.reach(table.num_tokens), "a block was kept or let go"
        assert own.num_committed == table.num_committed, "an entry was not published"
        end = own.num_passed + len(own.entries)
        assert end >= manager.blocks_for(table.num_writable), "a writable slot has no entry"
        assert end <= len(table.block_ids), "an entry has no tokens"
        assert own.num_reserved >= len(own.entries), "more entries than reserved"
    reserved = sum(own.num_reserved for own in windows.tables.values()) * window.num_groups
    assert manager.pool.num_reserved == reserved - len(held), "the reservations are miscounted"
    assert manager.num_available >= 0, "more blocks are reserved than there are"
    assert {*entries} <= {*_blocks(manager.prefix)}, "an evicted node has an entry"
    assert windows._node_of == {entry[0]: node for node, entry in entries.items()}
    for node, entry in entries.items():
        assert len(entry) == window.num_groups
        assert (node in windows._unheld) == held.isdisjoint(entry), "a wrong holder of an entry"
    assert windows._unheld.keys() <= entries.keys()


def _blocks(prefix: PrefixCache) -> Iterator[Node]:
    """Yield every node that holds a block."""
    return (node for node in nodes_of(prefix) if node.block_id is not None)


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
    pool, prefix = manager.pool, manager.prefix
    windows = manager.part(Windows)
    entries = {} if windows is None else windows.nodes
    check_pool(pool)
    held = Counter(block_id for table in tables for block_id in table.held_ids)
    nodes = list(_blocks(prefix))
    cached = Counter(chain(map(block_of, nodes), *entries.values()))
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
    known = [table for node in nodes_of(prefix) for table in node.tables]
    assert len(known) == len(set(known)), "a table is registered at two nodes"
    assert set(known) == set(tables), "the tree has a closed table or misses an open one"
    for root in prefix.roots.values():
        assert root.children or root.tables, "an empty root was kept"
    for node in nodes_of(prefix):
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


def _check_host_pool(manager: KVCacheManager, tables: Iterable[HostTable]) -> None:
    """Assert that exactly the blocks of ``tables`` are taken, each once."""
    pool = manager.host.pool
    check_pool(pool)
    assert {*manager.host.tables} == {*tables}
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


def _check_states(
    manager: KVCacheManager,
    states: States,
    tables: Iterable[BlockTable],
    host_tables: Iterable[HostTable],
) -> None:
    """Assert that each slot is free, or of one open table, or of one snapshot."""
    running = states.states
    assert {*running} == {*tables}, "a closed table has a slot, or an open one has none"
    assert {*states.snapshots} <= {*_blocks(manager.prefix)}, "a snapshot outlived its blocks"
    held = [each.slot for each in running.values()]
    held += [snapshot.slot for snapshot in states.snapshots.values()]
    assert sorted([*held, *states._free_slots]) == list(range(states.num_states)), "a slot was lost"
    owners = {table.owner for table in running}
    for table, each in running.items():
        stops = [*each.stops, *([each.latest] if each.latest else [])]
        assert not stops or manager.shares_full
        assert each.stops == sorted({*each.stops}), "the stops are not ascending"
        assert all(stop > table.num_tokens for stop in each.stops), "a stop was passed"
        assert each.latest is None or each.latest in states.snapshots, "a snapshot was dropped"
    for node, snapshot in states.snapshots.items():
        latest_of = {table.owner for table, each in running.items() if each.latest is node}
        if snapshot.replaced_by in owners:
            assert snapshot.replaced_by in latest_of, "a snapshot stays too long"
    check_pool(states.host_pool)
    slots = [*map(states.host_slot, host_tables)]
    assert len({*slots}) == len(slots), "a slot of the host has two owners"
    assert len(slots) == states.num_host_states - states.host_pool.num_free, "a slot leaked"
