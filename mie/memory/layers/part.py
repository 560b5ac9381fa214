"""Define the parts of the manager. They hold the memory of layers that do not keep every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mie.memory.prefix import Allocation, Node
from mie.memory.table import BlockTable, HostTable, Moves

if TYPE_CHECKING:
    from mie.memory.manager import KVCacheManager


class Part(Protocol):
    """The memory of one kind of layers: blocks within a window, or states of recurrent layers.

    The manager calls its parts in the same order at the same places. So parts can be combined, and
    a model without such layers has a manager without parts.
    """

    @property
    def name(self) -> str:
        """The key of the part in `Moves` and in the notes of a request."""

    def reset(self, manager: KVCacheManager) -> None:
        """Begin with empty memory, as the part of an empty manager."""

    def usable(self, path: list[Node], host: HostTable | None) -> list[Node]:
        """Return the longest beginning of a cached path that a table can share."""

    def reserve(self, table: BlockTable, allocation: Allocation) -> None:
        """Hold a table's shared contents, before it allocates blocks and others are evicted."""

    def open(self, table: BlockTable, allocation: Allocation, notes: dict[str, list[int]]) -> None:
        """Take the memory of a new table. The table has its blocks.

        ``notes`` belong to the request, and outlast its tables.
        """

    def fork(self, parent: BlockTable, table: BlockTable) -> None:
        """Take the memory of a new table that is a fork of ``parent``."""

    def limit(self, table: BlockTable, count: int) -> int:
        """Return how many of the next ``count`` tokens one step may compute."""

    def keep(self, table: BlockTable) -> bool:
        """Keep the contents before a step with drafts. Return False, unchanged, if it cannot."""

    def settle(self, table: BlockTable, *, is_whole: bool) -> bool:
        """End a step with drafts. ``is_whole``: all its tokens are kept.

        Return False to keep none of them. The contents are then the same as before the step.
        """

    def commit(self, table: BlockTable) -> None:
        """Publish and release memory after a step. The full blocks of the table are published."""

    def stored(self, table: BlockTable) -> list[int] | None:
        """Return the part's blocks with stored tokens, or None if they cannot be swapped out."""

    def close(self, table: BlockTable) -> None:
        """Release the memory of a table. Copy it to the host if the table has a ``host``."""

    def take_moves(self) -> Moves:
        """Return the moves that must happen before the step computes. Each is returned once."""

    def end_step(self, *, has_moved: bool) -> None:
        """End a step. If not ``has_moved``, drop the contents that its moves were to make."""


class BlockPart(Part, Protocol):
    """A part in the manager's ``block_parts``. It takes blocks of the manager's pool."""

    @property
    def num_held(self) -> int:
        """The number of blocks of all open tables. A shared block counts for each table."""

    @property
    def num_per_fork(self) -> int:
        """Maximum number of blocks that a fork takes before it reserves more."""

    def num_needed(self, num_stored: int, num_tokens: int, table: BlockTable | None = None) -> int:
        """Return how many blocks to reserve before a table can compute the tokens.

        ``num_stored`` of ``num_tokens`` tokens are stored. The present reservation of an open
        ``table`` counts.
        """

    def grow(self, table: BlockTable, num_tokens: int) -> None:
        """Take the blocks of a table that has grown. The needed blocks are available."""

    def trim(self, table: BlockTable, num_blocks: int) -> None:
        """Release the memory for the table's blocks after the first ``num_blocks``."""

    def restored(self, table: BlockTable, num_tokens: int) -> list[int]:
        """Take the blocks of a new table that its `stored` ones are copied back to."""
