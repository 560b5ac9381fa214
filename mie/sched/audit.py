"""Dump the queues as plain data for the event log, and check them by brute force for tests."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

from mie.sched.sequence import Sequence


def queues(
    waiting: Items[Sequence], running: Items[Sequence], kept: Items[Sequence]
) -> dict[str, Any]:
    """Return the sequences in both queues, and those whose blocks are kept, as plain data."""
    return {
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
            for seq in [*waiting, *running, *kept]
        },
    }


def check_queues(
    waiting: Items[Sequence],
    running: Items[Sequence],
) -> None:
    """Assert that each live sequence is in exactly one queue and holds what that queue allows."""
    assert not {*waiting} & {*running}, "both waiting and running"
    for seq in [*waiting, *running]:
        assert seq.finish_reason is None
        assert seq.num_missing >= 1
    for seq in waiting:
        assert seq.table is None, "waiting and holding blocks"
    for seq in running:
        assert seq.row is not None
        assert seq.host is None, "swapped out and running"
        assert seq.is_prefilling or seq.num_missing == 1
