"""Format names and numbers for the views of an event log."""

from __future__ import annotations

WIDTH = 80
"""Maximum width of a view in columns."""


def title(request_id: str, index: int, n: int) -> str:
    """Return a sequence's name: its request id, and its index if there are several choices."""
    name = "".join(char if char.isprintable() else "?" for char in request_id)
    return f"{name} [{index}]" if n > 1 else name


def clipped(text: str, width: int) -> str:
    """Return the text, cut with an ellipsis if it is longer than ``width``."""
    return text if len(text) <= width else text[: width - 1] + "…"


def percent(part: int, whole: int) -> str:
    """Return a percentage such as ``"12 %"``, or a dash if ``whole`` is 0."""
    return f"{100 * part / whole:.0f} %" if whole else "–"
