"""What passes through the manager's door, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mie.memory.prefix import Node, PartialMatch
from mie.memory.table import BlockTable, HostTable

Emit = Callable[[tuple[Any, ...]], None]
"""Takes a record of the event log."""

Pairs = tuple[tuple[int, int], ...]
"""(from, to): block ids."""


class Room(NamedTuple):
    """Where a sequence could be opened (`KVCacheManager.find_room`); nothing is taken yet."""

    token_ids: Sequence[int]
    salt: str | None
    path: list[Node]
    """The cached full blocks that its tokens begin with."""
    partial: PartialMatch | None
    """A block whose beginning is to be copied after them."""
    host: HostTable | None
    num_computed: int
    """Tokens that need not be computed."""
    num_new: int
    """Blocks to allocate."""
    parent: BlockTable | None = None
    """An open table to fork instead, whose tokens it begins with."""


class Moves(NamedTuple):
    """What a step does to tables and blocks before it computes, in this order."""

    updates: tuple[tuple[int, int, tuple[int, ...]], ...]
    """(row, index, block ids): entries index, index + 1, … of a row's table."""
    imports: Pairs
    """(host block, device block)."""
    exports: Pairs
    """(device block, host block)."""
    copies: Pairs
    """(source, target), both on the device."""
