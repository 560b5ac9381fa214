"""Name sequences, and format short texts, for all views of an event log."""

from __future__ import annotations

from collections.abc import Iterator

from mie.events import Record, Seq
from mie.events.replay import State

WIDTH = 80
"""Maximum width of a view in columns."""


def title(request_id: str, index: int, n: int) -> str:
    """Return a sequence's name: its request id, and its index if there are several choices."""
    name = "".join(char if char.isprintable() else "?" for char in request_id)
    return f"{name} [{index}]" if n > 1 else name


def title_of(seq: Seq, state: State) -> str:
    """Return the name of a sequence that the state has."""
    values = state.sequences[seq]
    return title(values.request_id, seq[1], values.n)


def new_sequences(record: Record, state: State) -> Iterator[tuple[Seq, str, int]]:
    """Yield (sequence, request id, n) of those that a record names first."""
    match record:
        case ("add", request_id, number, _, _, n, _):
            yield (number, 0), request_id, n
        case ("fork" | "wait", seq, parent, *_):
            values = state.sequences[parent]
            yield seq, values.request_id, values.n
        case ("rebuild", snapshot):
            for seq, facts in snapshot["sequences"].items():
                yield seq, facts["request_id"], facts["n"]


def clipped(text: str, width: int) -> str:
    """Return the text, cut with an ellipsis if it is longer than ``width``."""
    return text if len(text) <= width else text[: width - 1] + "…"


def percent(part: int, whole: int) -> str:
    """Return a percentage such as ``"12 %"``, or a dash if ``whole`` is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "–"
