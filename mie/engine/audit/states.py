"""Check the slots of recurrent states by brute force, and return them as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mie.memory.prefix import Node, block_of
from mie.memory.states import StateSlots
from mie.memory.table import BlockTable, HostTable


def states_snapshot(states: StateSlots) -> dict[str, Any]:
    """Return the owner of each slot as plain data, for the event log."""
    return {
        "num_slots": states.num_slots,
        "num_host_slots": len(states._hosts) + len(states._free_hosts),
        "running": {table.owner: each.slot for table, each in states._tables.items()},
        "saved": {block_of(node): each.slot for node, each in states.snapshots.items()},
        "hosts": {host.owner: slot for host, slot in states._hosts.items()},
    }


def check_states(
    states: StateSlots,
    nodes: Iterable[Node],
    tables: Iterable[BlockTable],
    host_tables: Iterable[HostTable],
) -> None:
    """Assert, between steps, that each slot is free, or of one open table, or of one snapshot.

    ``nodes`` are those of the prefix tree with blocks. The tables are all that are open.
    """
    running = states._tables
    assert {*running} == {*tables}, "a closed table has a slot, or an open one has none"
    assert {*states.snapshots} <= {*nodes}, "a snapshot outlived its blocks"
    held = [each.slot for each in running.values()]
    held += [snapshot.slot for snapshot in states.snapshots.values()]
    assert sorted([*held, *states._free]) == list(range(states.num_slots)), "a slot was lost"
    owners = {table.owner for table in running}
    for table, each in running.items():
        stops = [*each.stops, *([each.tail] if each.tail else [])]
        assert each.owner == table.owner
        assert not stops or states._takes_snapshots
        assert each.stops == sorted({*each.stops}), "the stops are not ascending"
        assert all(stop > table.num_tokens for stop in each.stops), "a stop was passed"
        assert each.tail is None or each.tail in states.snapshots, "a tail was dropped"
    for node, snapshot in states.snapshots.items():
        tails = [each for each in running.values() if each.tail is node]
        if snapshot.tail_of in owners:
            assert any(each.owner == snapshot.tail_of for each in tails), "a tail stays too long"
    hosts = states._hosts
    assert {*hosts} == {*host_tables}, "a state on the host leaked, or is missing"
    slots = sorted([*hosts.values(), *states._free_hosts])
    assert slots == list(range(len(slots))), "a slot of the host was lost"
