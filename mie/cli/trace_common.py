"""Share what the views of an event log need: names of sequences, and files written whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from mie.errors import ConfigError
from mie.events import Record, Seq
from mie.replay import State

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


@contextmanager
def replacing(target: str, source: str | None, option: str) -> Iterator[TextIO]:
    """Open a file that replaces ``target`` if the block succeeds. Otherwise nothing changes.

    ``source`` is the log, which must stay, and ``option`` is the one that named ``target``.

    Raises:
        ConfigError: ``target`` cannot be written.
    """
    path = Path(target).resolve()
    is_source = source is not None and path.exists() and path.samefile(source)
    if path.exists() and (not path.is_file() or is_source):
        raise ConfigError(f"{option} would overwrite {path}; choose another file")
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        file = draft.open("x", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
    try:
        with file:
            yield file
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
