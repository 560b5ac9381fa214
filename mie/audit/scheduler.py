"""Check the scheduler's queues by brute force, and return its whole state as plain data."""

from __future__ import annotations

from typing import Any

from mie.audit.memory import check_memory, memory_snapshot
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
                "row": seq.row,
                "blocks": list(seq.table.block_ids) if seq.table else [],
                "host": list(seq.host.block_ids) if seq.host else None,
                "n": seq.request.params.n,
            }
            for seq in [*waiting, *running, *scheduler._opener.kept]
        },
    }


def check_scheduler(scheduler: Scheduler) -> None:
    """Assert the invariants that hold between steps, for tests.

    Each live sequence is in exactly one queue and holds what that queue allows.
    """
    waiting, running = list(scheduler.waiting), scheduler.running
    tables = [seq.table for seq in [*running, *scheduler._opener.kept] if seq.table is not None]
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
        assert seq.row is not None
        assert seq.host is None, "swapped out and running"
        assert seq.is_prefilling or seq.num_missing == 1 or seq.num_generated


def _check_seats(seats: Seats) -> None:
    """Assert that the running sequences are in order and that each row has one owner."""
    running = seats.running
    assert [seq.key for seq in running] == sorted(seq.key for seq in running)
    taken = [seq.row for seq in running if seq.row is not None]
    assert sorted([*taken, *seats._free]) == list(range(len(seats.rows)))
    assert all(seats.rows[seq.row] is seq for seq in running if seq.row is not None)
    assert sum(seq is not None for seq in seats.rows) == len(running)
    assert seats.num_prefilling == sum(seq.is_prefilling for seq in running)
    assert set(seats._new.items()) <= set(enumerate(seats.rows)), "a row without an owner"
