"""Check the scheduler's queues by brute force, and return its whole state as plain data."""

from __future__ import annotations

from typing import Any

from mie.engine.audit.memory import check_memory, memory_snapshot
from mie.memory.table import BlockTable
from mie.sched.scheduler import Scheduler
from mie.sched.seats import Seats


def scheduler_snapshot(scheduler: Scheduler) -> dict[str, Any]:
    """Return the queues, their sequences and the blocks as plain data, for the event log."""
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
                "row": seq.table.row if seq.table and not seq.finish_reason else None,
                "blocks": list(seq.table.block_ids) if seq.table else [],
                "host": list(seq.host.block_ids) if seq.host else None,
                "n": seq.request.params.n,
                **_entries_of(seq.table),
            }
            for seq in [*waiting, *running, *scheduler._admission.kept.values()]
        },
    }


def _entries_of(table: BlockTable | None) -> dict[str, Any]:
    """Return the blocks of layers with a window, if there are any."""
    if table is None or not table.entries:
        return {}
    return {"entries": [[*entry] for entry in table.entries], "num_passed": table.num_passed}


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert the invariants that hold between steps, for tests.

    Each live sequence is in exactly one queue, and holds blocks only while it runs.
    """
    waiting, running = list(scheduler.waiting), scheduler.running
    holders = [*running, *scheduler._admission.kept.values()]
    tables = [seq.table for seq in holders if seq.table is not None]
    hosts = [seq.host for seq in waiting if seq.host is not None]
    check_memory(scheduler.manager, tables, hosts)
    _check_seats(scheduler._seats)
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


def _check_seats(seats: Seats) -> None:
    """Assert that the running sequences are in order and that each row has one owner."""
    running = seats.running
    assert [seq.key for seq in running] == sorted(seq.key for seq in running)
    assert {seq.table.row: seq for seq in running if seq.table is not None} == seats.rows
    assert len(seats.rows) == len(running)
    assert sorted([*seats.rows, *seats._free]) == list(range(len(running) + len(seats._free)))
    assert seats.num_prefilling == sum(seq.is_prefilling for seq in running)
    assert seats._new.items() <= seats.rows.items(), "a row without an owner"
