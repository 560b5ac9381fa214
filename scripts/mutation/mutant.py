"""One wrong line for `mutate.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A snippet of the source, which must occur exactly once, and its replacement."""

    name: str
    path: str
    old: str
    new: str
    breaks: str
    """What a user or a maintainer would see."""
    equivalent: str | None = None
    """Why no test can detect it, if none can."""

    def apply(self, source: str) -> str:
        """Return the source with the mutation.

        Raises:
            ValueError: the snippet does not occur exactly once.
        """
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: the snippet occurs {count} times in {self.path}")
        return source.replace(self.old, self.new)
