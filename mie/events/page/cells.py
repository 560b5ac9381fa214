"""State as cells: plain values under names that JSON has, which a page assigns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from mie.events import Seq
from mie.events.replay import NodeState, SequenceState, State

Cells = dict[str, Any]

encode = json.JSONEncoder(separators=(",", ":")).encode
"""Returns cells as JSON, on one line."""

FREE, IN_TABLE, CACHED, PINNED = range(4)
"""The kinds of a block: who holds it."""

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
    if values.is_kept:
        return "kept"
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
    }


def key_record(state: State, text: NodeText) -> Cells:
    """Return the record that gives the whole state."""
    return {"record": "key", "step": state.step, **all_cells(state, text)}
