"""Define block tables (the places of a sequence's tokens) and moves of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from mie.memory.pool import BlockPool
    from mie.memory.prefix import Node

Owner = tuple[int, int]
"""Names the owner of blocks in the event log. This room never reads it."""

Emit = Callable[[tuple[Any, ...]], None]
"""Receives a record of the event log."""


class Blocks(Protocol):
    """The blocks that a part of the manager holds for a table."""

    @property
    def block_ids(self) -> Iterable[int]:
        """The blocks, each once."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence in logical order: token i is in block_ids[i // B].

    Only `KVCacheManager` changes a table. It counts as one holder of each of its blocks.
    """

    owner: Owner
    row: int
    """The runner's name for the table."""
    token_ids: Sequence[int]
    """The sequence's own list. It grows. Only the first ``num_tokens`` are read."""
    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Number of stored tokens. The next one is written at this position."""
    num_writable: int = 0
    """Number of positions that may be written without calling `KVCacheManager.grow`.

    These are all positions in the table's blocks, or only the stored ones if others hold the last
    block too.
    """
    num_copies: int = 0
    """Number of blocks that were copied for it."""
    num_committed: int = 0
    """Number of leading blocks that are in the prefix cache."""
    node: Node | None = None
    """The last of the committed blocks, or the root. None after the table is closed."""
    has_run: bool = False
    """Whether a step has run since the table's last copy or import, so that the copy is done."""
    host: HostTable | None = None
    """The copy on the host of a table that is swapped out and about to be closed."""
    parts: list[Blocks] = field(default_factory=list)
    """More blocks of the table. Parts of the manager hold them for it."""

    @property
    def held_ids(self) -> list[int]:
        """All blocks of the table."""
        return [*self.block_ids, *chain.from_iterable(part.block_ids for part in self.parts)]

    @property
    def num_held(self) -> int:
        """The number of blocks in `held_ids`."""
        return len(self.held_ids) if self.parts else len(self.block_ids)


@dataclass(slots=True, eq=False)
class HostTable:
    """The blocks of the host pool that hold the tokens of a swapped-out sequence."""

    owner: Owner
    block_ids: tuple[int, ...]
    num_tokens: int
    slots: list[tuple[BlockPool, int]] = field(default_factory=list)
    """Slots in the host pools of parts of the manager. They are freed with the blocks."""


@dataclass(slots=True)
class Moves:
    """The changes that a step makes to tables and blocks before it computes, in this order."""

    updates: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """(row, index, block ids): entries index, index + 1, … of a row's table."""
    exports: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block)."""
    imports: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target), both on the device."""
    parts: dict[str, Moves] = field(default_factory=dict)
    """The moves of each part of the manager, by its name. They come last."""
