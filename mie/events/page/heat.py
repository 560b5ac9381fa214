"""How often each node of the prefix tree was used, and since when it is idle."""

from __future__ import annotations

from collections.abc import Iterable

from mie.events import Record
from mie.events.replay import State


class Heat:
    """Counts uses of the nodes, and orders their last uses as the prefix cache does.

    A node is idle when only the tree holds its block. Nodes that one table leaves become idle at
    the same moment. Which of two such leaves is evicted first is decided by their block ids.
    """

    def __init__(self, state: State) -> None:
        self._uses = dict.fromkeys(state.blocks.tree, 0)
        self._idle = dict.fromkeys((b for b in state.blocks.tree if state.blocks.refs[b] == 1), 0)
        self._clock = 0
        self._changed: set[int] = set()
        self._leaving: list[int] = []

    def before(self, record: Record, state: State) -> None:
        """Note a record that is about to be applied."""
        match record:
            case ("close", seq):
                self._leaving = list(state.sequences[seq].blocks)
            case ("unpin", block):
                self._leaving = [block]
            case ("share", _, _, blocks):
                self._use(blocks)
                self._hold(blocks)
            case ("hit", _, _, _, _, source) if source is not None:
                self._use([source])
            case ("pin", block):
                self._hold([block])
            case ("evict", block):
                self._uses.pop(block, None)
                self._idle.pop(block, None)
            case ("rebuild", _):
                self._uses.clear()
                self._idle.clear()

    def after(self, record: Record, state: State) -> None:
        """Note a record that was applied."""
        if record[0] == "seal":
            self._uses[record[1]] = 0
            self._changed.add(record[1])
        if self._leaving:
            self._clock += 1
            blocks = state.blocks
            for block in self._leaving:
                if block in blocks.tree and blocks.refs[block] == 1:
                    self._idle[block] = self._clock
                    self._changed.add(block)
            self._leaving = []

    def cells(self) -> dict[str, list[int | None]]:
        """Return the cells of all nodes."""
        return {str(block): self._cell(block) for block in self._uses}

    def changes(self) -> dict[str, list[int | None]]:
        """Return the cells that changed since the last call."""
        changed = sorted(self._changed & self._uses.keys())
        self._changed.clear()
        return {str(block): self._cell(block) for block in changed}

    def _cell(self, block: int) -> list[int | None]:
        return [self._uses[block], self._idle.get(block)]

    def _use(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self._uses:
                self._uses[block] += 1
                self._changed.add(block)

    def _hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._idle.pop(block, None) is not None:
                self._changed.add(block)
