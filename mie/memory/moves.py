"""Define the plain data that the manager takes and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mie.memory.prefix import Node, PartialMatch
from mie.memory.table import BlockTable, HostTable

Emit = Callable[[tuple[Any, ...]], None]
"""Receives a record of the event log."""


class Room(NamedTuple):
    """How a sequence can be opened, from `KVCacheManager.find_room`. Nothing is allocated yet."""

    token_ids: Sequence[int]
    salt: str | None
    path: list[Node]
    """The cached full blocks that match the start of its tokens."""
    partial: PartialMatch | None
    """A block to copy from after ``path``, because its start matches."""
    host: HostTable | None
    num_computed: int
    """Number of tokens that need not be computed."""
    num_new: int
    """Number of blocks to allocate."""
    parent: BlockTable | None
    """An open table to fork instead, whose tokens it begins with."""


@dataclass(slots=True)
class Moves:
    """What a step does to tables and blocks before it computes, in this order."""

    updates: list[tuple[int, int, tuple[int, ...]]] = field(default_factory=list)
    """(row, index, block ids): entries index, index + 1, … of a row's table."""
    exports: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block)."""
    imports: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source, target), both on the device."""
