"""The records that a page reads: the head of a stream, and what steps changed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mie.errors import TraceError
from mie.events import Record, Snapshot, Step
from mie.page.cells import encode
from mie.page.events import COLUMNS, SHOWN, event_of, row_of
from mie.page.view import View

PAGE_VERSION = 1
MAX_BLOCKS = 1 << 22
"""Blocks that a page can draw. The simulator's largest pools are smaller."""

Line = tuple[str, str]
"""A record: its kind, and its JSON without a line's end."""


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
        self._events: list[str] = []
        self._steps: list[str] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, records: Step, num_applied: int = 0) -> None:
        """Apply the records of a step, except the first ones, which were applied before.

        Raises:
            TraceError: one of them cannot happen in this state.
        """
        self.apply(records[num_applied:])
        self._steps.append(f'{{"row":{row_of(records)},"events":{self._take_events()}}}')

    def apply(self, records: Iterable[Record]) -> None:
        """Apply records without the end of their step."""
        for record in records:
            if not self._is_checked:
                self._view.state.check_names(record)
            event = event_of(record, self._view.state)
            self._view.apply(record)
            if event is not None:
                self._events.append(event)

    def take(self) -> Line:
        """Return the record of the steps that were added since the last call."""
        steps, self._steps = ",".join(self._steps), []
        return "steps", f'{{"record":"steps","steps":[{steps}],"set":{self._changes()}}}'

    def take_now(self) -> Line:
        """Return the record of what happened after the last step."""
        events = self._take_events()
        return "now", f'{{"record":"now","events":{events},"set":{self._changes()}}}'

    def _take_events(self) -> str:
        events, self._events = ",".join(self._events), []
        return f"[{events}]"

    def _changes(self) -> str:
        return encode(self._view.changes())
