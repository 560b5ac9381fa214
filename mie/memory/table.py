"""Where one sequence's tokens lie."""

from mie.memory.prefix import Node


class BlockTable:
    """The blocks of one sequence in logical order; token i lies in block_ids[i // B].

    Only `KVCacheManager` changes a table. It counts as one holder of each of its blocks.
    """

    __slots__ = (
        "_changed",
        "block_ids",
        "is_open",
        "node",
        "num_cached",
        "num_committed",
        "num_tokens",
        "salt",
    )

    def __init__(self, salt: str | None = None) -> None:
        self.block_ids: list[int] = []
        self.num_tokens = 0
        """Tokens whose keys and values are stored; the next one is written at this position."""
        self.num_cached = 0
        """Tokens that were found in the prefix cache when the table was opened."""
        self.num_committed = 0
        """Leading blocks that stand in the prefix cache; ``node`` is the last of them."""
        self.node: Node | None = None
        self.salt = salt
        self.is_open = True
        self._changed: list[int] = []

    def put(self, index: int, block_id: int) -> None:
        """Set entry ``index`` (at most one past the end) and remember that it changed."""
        if index == len(self.block_ids):
            self.block_ids.append(block_id)
        else:
            self.block_ids[index] = block_id
        self._changed.append(index)

    def take_changes(self) -> tuple[tuple[int, int], ...]:
        """(index, block id) of every entry that changed since the last call."""
        changes = tuple((index, self.block_ids[index]) for index in self._changed)
        self._changed.clear()
        return changes
