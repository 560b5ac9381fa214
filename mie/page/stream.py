"""The records that a page reads: the head of a stream, and what steps changed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mie.errors import TraceError
from mie.events import Record, Snapshot, Step, summary_of
from mie.page.events import COLUMNS, SHOWN, event_of, row_of
from mie.page.view import View

PAGE_VERSION = 1
MAX_BLOCKS = 1 << 22
"""Blocks that a page can draw. The simulator's largest pools are smaller."""

encode = json.JSONEncoder(separators=(",", ":")).encode
"""Returns a record as a line without its end."""


def head_record(
    snapshot: Snapshot, *, source: str, name: str, first: int, last: int | None = None, **more: Any
) -> dict[str, Any]:
    """Return the record that begins a stream.

    Raises:
        TraceError: the pool is too large for a page.
    """
    sizes = {key: snapshot[key] for key in ("block_size", "num_blocks", "num_host_blocks")}
    for key in ("num_blocks", "num_host_blocks"):
        if sizes[key] > MAX_BLOCKS:
            raise TraceError(f"{key} is {sizes[key]}; a page shows at most {MAX_BLOCKS}")
    return {
        "record": "head",
        "version": PAGE_VERSION,
        "source": source,
        "name": name,
        **sizes,
        "columns": COLUMNS,
        "fields": dict(SHOWN),
        "first": first,
        "last": last,
        **more,
    }


class Steps:
    """Collects steps for one record."""

    def __init__(self, view: View, *, is_checked: bool = False) -> None:
        """``is_checked`` says that records only name what exists, as in an engine's own log."""
        self._view = view
        self._is_checked = is_checked
        self._events: list[list[Any]] = []
        self._steps: list[dict[str, Any]] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, records: Step, num_applied: int = 0) -> None:
        """Apply the records of a step, except the first ones, which were applied before.

        Raises:
            TraceError: one of them cannot happen in this state.
        """
        self.apply(records[num_applied:])
        row = row_of(summary_of(records), records)
        self._steps.append({"row": row, "events": self._events})
        self._events = []

    def apply(self, records: Iterable[Record]) -> None:
        """Apply records without the end of their step."""
        for record in records:
            if not self._is_checked:
                self._view.state.check_names(record)
            event = event_of(record, self._view.state)
            self._view.apply(record)
            if event is not None:
                self._events.append(event)

    def take(self) -> dict[str, Any]:
        """Return the record of the steps that were added since the last call."""
        steps, self._steps = self._steps, []
        return {"record": "steps", "steps": steps, "set": self._view.changes()}

    def take_now(self) -> dict[str, Any]:
        """Return the record of what happened after the last step."""
        events, self._events = self._events, []
        return {"record": "now", "events": events, "set": self._view.changes()}
