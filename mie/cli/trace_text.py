"""Words that the views of an event log share."""

from __future__ import annotations

WIDTH = 80
"""Columns that every view fits."""


def title(request_id: str, index: int, n: int) -> str:
    """Return what a sequence is called: its request's id, and which choice it is if there are
    several."""
    name = "".join(char if char.isprintable() else "?" for char in request_id)
    return f"{name} [{index}]" if n > 1 else name


def clipped(text: str, width: int) -> str:
    """Return the text, or its beginning and an ellipsis if it is longer than ``width``."""
    return text if len(text) <= width else text[: width - 1] + "…"


def count(number: int, thing: str) -> str:
    """Return ``"1 step"``, ``"2,000 steps"``."""
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


def percent(part: int, whole: int) -> str:
    """Return ``"12 %"``; of nothing, a dash."""
    return f"{100 * part / whole:.0f} %" if whole else "–"
