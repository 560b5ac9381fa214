"""The events of a step, as a page shows them: the log's own records in JSON's shapes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from mie.events import FIELDS, SUMMARY_FIELDS, Record, Seq, Summary
from mie.page.cells import seq_text
from mie.replay import State

IN_CELLS = frozenset({"alloc", "share", "release", "close", "seal", "pin", "unpin", "rank", "step"})
"""The kinds of records that are left out, because cells and rows show their effect."""

SHOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{kind: names for kind, names in FIELDS.items() if kind not in IN_CELLS},
        "decode": ("seqs",),
        "rebuild": (),
    }
)
"""The fields of each kind of event."""

COLUMNS = (*SUMMARY_FIELDS, "num_admitted_tokens", "num_hit_tokens")
"""What the numbers of a step's row are."""

_TIMES = tuple(i for i, name in enumerate(SUMMARY_FIELDS) if name.endswith(("start", "seconds")))
"""The columns with fractions. They are rounded to microseconds."""

_OF_SEQUENCE = frozenset({"seq", "by"})


def event_of(record: Record, state: State) -> list[Any] | None:
    """Return the event of a record, given the state before it, or None if cells show it."""
    kind, *values = record
    if kind in IN_CELLS:
        return None
    if kind == "decode":
        return [kind, [seq_text(state.rows[row]) for row in values[0]]]
    if kind == "rebuild":
        return [kind]
    return [kind, *map(_plain, FIELDS[kind], values)]


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        is_sequence = name in _OF_SEQUENCE or name == "parent"
        return seq_text(value) if is_sequence else list(value)
    return value


def row_of(summary: Summary, records: tuple[Record, ...]) -> list[float]:
    """Return the numbers of a step in the order of `COLUMNS`."""
    admitted = sum(record[3] for record in records if record[0] == "admit")
    hit = sum(record[3] + record[4] for record in records if record[0] == "hit")
    row = [summary[name] for name in SUMMARY_FIELDS]
    for column in _TIMES:
        row[column] = round(row[column], 6)
    return [*row, admitted, hit]


def seq_from(text: str) -> Seq | None:
    """Return the sequence that a text names, or None."""
    number, _, index = text.partition(".")
    is_one = all(part.isdecimal() and part.isascii() and len(part) < 19 for part in (number, index))
    return (int(number), int(index)) if is_one else None
