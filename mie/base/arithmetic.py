"""Integer arithmetic that several rooms need."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)
