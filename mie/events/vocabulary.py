"""Define the kinds of records in the event log. docs/tracing.md explains each one.

A record is a plain tuple ``(kind, *fields)``, and lists in it are tuples. The code that changes
state emits a record at the moment of the change. So a snapshot and the records after it give the
state at any step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

Seq = tuple[int, int]
"""A sequence: the number of its request and the index of the choice."""

Record = tuple[Any, ...]

Step = tuple[Record, ...]
"""The records of one step. The last one is ``("step", summary)``."""

Summary = Mapping[str, Any]
Snapshot = Mapping[str, Any]

FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # requests
        "add": ("request_id", "number", "rank", "num_prompt", "n", "max_tokens"),
        "admit": ("seq", "row", "num_tokens", "num_computed"),
        "rank": ("seq", "rank"),
        "resume": ("seq", "row", "num_tokens", "num_computed", "mode"),
        "hit": ("seq", "num_queried", "num_full", "num_partial", "source"),
        "prefill": ("seq", "start", "count", "choices"),
        "decode": ("rows",),
        "force": ("seq", "count"),
        "fork": ("seq", "parent", "row"),
        "wait": ("seq", "parent"),
        "preempt": ("seq", "by", "mode", "rule", "num_lost"),
        "keep": ("seq",),
        "branch": ("seq", "parent", "row"),
        "finish": ("seq", "reason"),
        # blocks
        "alloc": ("seq", "index", "blocks"),
        "share": ("seq", "index", "blocks"),
        "release": ("seq", "blocks"),
        "close": ("seq",),
        "copy": ("source", "target", "seq", "cause"),
        "seal": ("block", "parent", "salt", "tokens"),
        "evict": ("block",),
        "pin": ("block",),
        "unpin": ("block",),
        "export": ("seq", "host"),
        "import": ("seq", "host", "blocks"),
        "drop": ("seq",),
        # everything
        "rebuild": ("snapshot",),
        # always last
        "step": ("summary",),
    }
)
"""The fields of each kind of record, in order."""

MAX_FORCED_RUN = 64
"""Maximum ``count`` of a ``force``."""

SUMMARY_FIELDS = (
    "step",
    "num_running",
    "num_waiting",
    "num_prefill_tokens",
    "num_decode_tokens",
    "num_preempted",
    "num_finished",
    "num_blocks_used",
    "num_blocks_cached",
    "num_blocks_saved",
    "num_slots_empty",
    "num_copies",
    "num_evicted",
    "num_exported",
    "num_imported",
    "start",
    "schedule_seconds",
    "run_seconds",
    "update_seconds",
    "seconds",
)
"""The keys that the summary of a step has at least."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A snapshot and the steps after it."""

    after: int
    """The number of the last step before the snapshot; 0 if there was none."""
    snapshot: Snapshot
    steps: Sequence[Step]
    rest: Step = ()
    """Records after the last complete step."""
    is_cut: bool = False
    """Whether the file ends in the middle of a line, as a killed run leaves it."""

    @property
    def last(self) -> int:
        """The number of the last step."""
        return int(summary_of(self.steps[-1])["step"]) if self.steps else self.after


def summary_of(step: Step) -> Summary:
    """Return the summary that ends a step."""
    kind, summary = step[-1]
    assert kind == "step"
    return summary  # type: ignore[no-any-return]  # fields of a record are Any
