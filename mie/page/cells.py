"""State as cells, plain values under names that JSON has, and the records that a page reads."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any

from mie.errors import TraceError
from mie.events import FIELDS, SUMMARY_FIELDS, Record, Seq, Snapshot, Step, summary_of
from mie.events.replay import NodeState, SequenceState, State

Cells = dict[str, Any]

encode = json.JSONEncoder(separators=(",", ":")).encode
"""Returns cells as JSON, on one line."""

FREE, IN_TABLE, CACHED, PINNED = range(4)
"""The kinds of a block, by its holder."""

FREE_CELL = (FREE, 0, 0)
"""The cell of a block that is not named."""


def seq_text(seq: Seq) -> str:
    """Return the name of a sequence in JSON."""
    return f"{seq[0]}.{seq[1]}"


def block_cell(state: State, block: int, fill: int) -> tuple[int, int, int]:
    """Return the kind, the references and the filled slots of a block."""
    blocks = state.blocks
    if block in blocks.in_tables:
        kind = IN_TABLE
    elif block in blocks.tree:
        kind = CACHED
    else:
        kind = PINNED if block in blocks.refs else FREE
    return (kind, blocks.refs.get(block, 0), fill)


def seq_cell(values: SequenceState) -> Cells:
    """Return the fields of a sequence, without its blocks."""
    return {
        "request_id": values.request_id,
        "state": _state_of(values),
        "num_prompt": values.num_prompt,
        "num_tokens": values.num_tokens,
        "num_computed": values.num_computed,
        "max_tokens": values.max_tokens,
        "n": values.n,
        "row": values.row,
        "rank": values.rank,
    }


def _state_of(values: SequenceState) -> str:
    if values.row is not None:
        return "running"
    return "waiting" if values.host is None else "swapped"


class NodeText:
    """The cells of the prefix tree's tokens."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str] | None = None, *, shows_tokens: bool = True
    ) -> None:
        """``decode`` turns tokens into text. Without it a page gets the tokens only."""
        self._decode = decode
        self._shows_tokens = shows_tokens

    def cell(self, node: NodeState) -> Cells:
        """Return the cell of a node."""
        cell: Cells = {"parent": node.parent, "salt": _number_of(node.salt)}
        if self._shows_tokens:
            cell["tokens"] = list(node.tokens)
            if self._decode is not None:
                cell["text"] = self._decode(node.tokens)
        return cell


def _number_of(salt: str | None) -> int:
    """Return a number that is the same for equal salts, from which the salt cannot be found."""
    if salt is None:
        return 0
    return 1 + int.from_bytes(hashlib.sha256(salt.encode()).digest()[:3], "big")


def slot_cells(state: State) -> dict[str, str | int]:
    """Return the owner of each state slot in use: a sequence, or the block of a snapshot."""
    owners = {} if state.slots is None else state.slots.owners()
    return {
        str(slot): owner if isinstance(owner, int) else seq_text(owner)
        for slot, owner in sorted(owners.items())
    }


def all_cells(state: State, text: NodeText) -> Cells:
    """Return every cell of a state, computed from nothing but the state."""
    fills = state.fills()
    return {
        "blocks": [
            [block, *block_cell(state, block, fills.get(block, 0))]
            for block in sorted(state.blocks.refs)
        ],
        "seqs": {seq_text(seq): seq_cell(values) for seq, values in state.sequences.items()},
        "tables": {
            seq_text(seq): [0, list(values.blocks)]
            for seq, values in state.sequences.items()
            if values.blocks
        },
        "host": {
            seq_text(seq): list(values.host)
            for seq, values in state.sequences.items()
            if values.host
        },
        "tree": {str(block): text.cell(node) for block, node in state.blocks.tree.items()},
        "slots": slot_cells(state),
    }


def key_record(state: State, text: NodeText) -> Cells:
    """Return the record that gives the whole state."""
    return {"record": "key", "step": state.step, **all_cells(state, text)}


PAGE_VERSION = 1
MAX_BLOCKS = 1 << 22
"""Blocks, or slots, that a page can draw. The simulator's largest pools are smaller."""

Line = tuple[str, str]
"""A record: its kind, and its JSON without a line's end."""

IN_CELLS = frozenset(
    {
        *("alloc", "share", "release", "close", "seal", "pin", "unpin", "step"),
        *("trim", "state", "revert", "save", "forget", "save_host"),
        *("alloc_window", "share_window", "pass", "seal_window", "evict_window"),
    }
)
"""The kinds of records that are left out, because cells and rows show their effect."""

SHOWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{kind: names for kind, names in FIELDS.items() if kind not in IN_CELLS},
        "decode": ("seqs",),
        "rebuild": (),
        "depart": ("seq", "position", "reason", "nearest"),  # no tokens, which `mie/text` tells
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
        TraceError: a pool is too large for a page.
    """
    sizes = {key: snapshot[key] for key in ("block_size", "num_blocks", "num_host_blocks")}
    sizes["num_slots"] = snapshot["states"]["num_slots"] if "states" in snapshot else 0
    for key in ("num_blocks", "num_host_blocks", "num_slots"):
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
    if kind == "depart":
        values = [*values[:3], values[5]]
    return encode([kind, *map(_plain, SHOWN[kind], values)])


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
