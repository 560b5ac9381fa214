"""Model a sequence: its tokens, and the blocks that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(kw_only=True, eq=False)
class SequenceState:
    """A sequence that is waiting or running."""

    request_id: str
    rank: int
    num_prompt: int
    max_tokens: int | None
    n: int
    num_tokens: int
    num_computed: int = 0
    row: int | None = None
    """Its row, or None while it waits or if it has ended and is kept."""
    blocks: list[int] = field(default_factory=list)
    host: list[int] | None = None
    """Host blocks that hold its swapped-out tokens."""
    entries: list[list[int]] = field(default_factory=list)
    """Its blocks of layers with a window, from entry ``num_passed`` on."""
    num_passed: int = 0

    @property
    def places(self) -> Iterator[tuple[int, int]]:
        """Its blocks, each with its index in the table."""
        yield from ((block, index) for index, block in enumerate(self.blocks))
        for index, entry in enumerate(self.entries, self.num_passed):
            yield from ((block, index) for block in entry)

    @property
    def is_kept(self) -> bool:
        """Whether it has ended, and holds blocks for those that continue it."""
        return self.row is None and bool(self.blocks)

    def snapshot(self) -> dict[str, Any]:
        """Return the fields, with the lists copied, and those of windows only if there are any."""
        fields = copied(vars(self))
        if not self.entries:
            del fields["entries"], fields["num_passed"]
        return fields


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a sequence with its lists copied."""
    return {name: _copied(value) for name, value in values.items()}


def _copied(value: Any) -> Any:
    return [*map(_copied, value)] if isinstance(value, list) else value
