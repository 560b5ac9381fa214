"""Make text of unknown origin safe for an error message."""

_LONGEST = 1000


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped, cut after 1,000 characters."""
    cut = text if len(text) <= _LONGEST else text[:_LONGEST] + "…"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut
    )
