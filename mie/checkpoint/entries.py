"""Describe the place of a tensor in a file."""

from dataclasses import dataclass
from pathlib import Path

from mie.errors import shown


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """The location of one tensor: bytes ``start`` to ``stop`` of the file ``path``."""

    path: Path
    dtype: str  # as the format spells it: "F32", "BF16", "Q4_K", ...
    shape: tuple[int, ...]
    start: int
    stop: int
    is_turned: bool = False  # whether the file has the transpose of a matrix of this shape

    @property
    def nbytes(self) -> int:
        """The number of bytes in the file."""
        return self.stop - self.start


def some(names: list[str], limit: int = 4) -> str:
    """Return the first names, and how many more there are."""
    quoted = ", ".join(map(shown, names[:limit]))
    return quoted if len(names) <= limit else f"{quoted}, and {len(names) - limit} more"
