"""Write the records that a page reads: the head of a stream, and the events of its steps."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from mie.errors import TraceError
from mie.events import FIELDS, SUMMARY_FIELDS, Record, Seq, Snapshot, Step, summary_of
from mie.events.page.cells import encode, seq_text
from mie.events.replay import State

PAGE_VERSION = 1
MAX_BLOCKS = 1 << 22
"""Blocks that a page can draw. The simulator's largest pools are smaller."""

Line = tuple[str, str]
"""A record: its kind, and its JSON without a line's end."""

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
"""The names of the numbers in a step's row."""

_OF_SUMMARY = itemgetter(*SUMMARY_FIELDS)
_NUMBERS = ",".join(
    "%.6f" if name.endswith(("start", "seconds")) else "%d" for name in SUMMARY_FIELDS
)
"""The form of a summary's numbers. Times are rounded to microseconds."""

_OF_SEQUENCE = frozenset({"seq", "by"})


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


def event_of(record: Record, state: State) -> str | None:
    """Return the event of a record, given the state before it, or None if cells show it.

    Events and rows are JSON already. Each step has them, and they cost less if they are written one
    by one than if a large value is encoded later.
    """
    kind, *values = record
    if kind in IN_CELLS:
        return None
    if kind == "decode":
        seqs = ",".join([f'"{seq_text(state.rows[row])}"' for row in values[0]])
        return f'["decode",[{seqs}]]'
    if kind == "rebuild":
        return '["rebuild"]'
    return encode([kind, *map(_plain, FIELDS[kind], values)])


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, tuple):
        is_sequence = name in _OF_SEQUENCE or name == "parent"
        return seq_text(value) if is_sequence else list(value)
    return value


def row_of(records: Step) -> str:
    """Return the numbers of a step in the order of `COLUMNS`."""
    admitted = hit = 0
    for record in records:
        if record[0] == "admit":
            admitted += record[3]
        elif record[0] == "hit":
            hit += record[3] + record[4]
    return f"[{_NUMBERS % _OF_SUMMARY(summary_of(records))},{admitted},{hit}]"


def seq_from(text: str) -> Seq | None:
    """Return the sequence that a text names, or None."""
    number, _, index = text.partition(".")
    is_one = all(part.isdecimal() and part.isascii() and len(part) < 19 for part in (number, index))
    return (int(number), int(index)) if is_one else None
