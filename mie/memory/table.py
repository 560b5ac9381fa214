"""Where one sequence's tokens lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mie.memory.prefix import Node

Owner = tuple[int, int]
"""Whose blocks they are: a label for the event log, never read here."""


class BlockTable:
    """The blocks of one sequence in logical order; token i lies in block_ids[i // B].

    Only `KVCacheManager` changes a table. It counts as one holder of each of its blocks.
    """

    __slots__ = (
        "block_ids",
        "has_run",
        "is_open",
        "node",
        "num_cached",
        "num_committed",
        "num_copies",
        "num_tokens",
        "num_writable",
        "owner",
        "row",
        "token_ids",
    )

    def __init__(self, owner: Owner, row: int, token_ids: Sequence[int]) -> None:
        self.owner = owner
        self.row = row
        """The runner's name for the table."""
        self.token_ids = token_ids
        """The sequence's own list, which grows; read up to ``num_tokens``."""
        self.block_ids: list[int] = []
        self.num_tokens = 0
        """Tokens whose keys and values are stored; the next one is written at this position."""
        self.num_writable = 0
        """Positions that may be written without asking `KVCacheManager.grow`: all in the table's
        blocks, or those stored already where others hold the last block too."""
        self.num_cached = 0
        """Tokens that were found in the prefix cache when the table was opened."""
        self.num_copies = 0
        """Blocks that were copied for it."""
        self.num_committed = 0
        """Leading blocks that stand in the prefix cache; ``node`` is the last of them, or the
        root. None without a prefix cache."""
        self.node: Node | None = None
        self.has_run = False
        """Whether a step has computed for it since its last copy or import, which is then done."""
        self.is_open = True


class HostTable:
    """Where the tokens of a sequence lie that was swapped out: in blocks of the host's pool."""

    __slots__ = ("block_ids", "num_tokens", "owner")

    def __init__(self, owner: Owner, block_ids: Sequence[int], num_tokens: int) -> None:
        self.owner = owner
        self.block_ids = tuple(block_ids)
        self.num_tokens = num_tokens
