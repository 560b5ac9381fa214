"""Model a sequence: its tokens, and the blocks that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from mie.events.replay.blocks import BlockState, require


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
    """The row of the runner, or None while the sequence waits."""
    blocks: list[int] = field(default_factory=list)
    host: list[int] | None = None
    """Host blocks that hold its swapped-out tokens."""
    entries: list[list[int]] = field(default_factory=list)
    """The blocks of layers with a window, from entry ``num_passed`` on."""
    num_passed: int = 0

    @property
    def places(self) -> Iterator[tuple[int, int]]:
        """The blocks, each with its index in the table."""
        yield from ((block, index) for index, block in enumerate(self.blocks))
        for index, entry in enumerate(self.entries, self.num_passed):
            yield from ((block, index) for block in entry)

    @property
    def held(self) -> list[int]:
        """All its blocks."""
        return [block for block, _ in self.places]

    # Its table. ``state`` counts the holders of blocks.

    def put(self, index: int, blocks: Iterable[int], state: BlockState) -> None:
        """Replace the blocks index, index + 1, … of the table."""
        blocks, table = list(blocks), self.blocks
        end = index + len(blocks)
        require(0 <= index <= len(table), f"its table has {len(table)} blocks")
        for block in table[index:end]:
            state.leave_table(block)
        table[index:end] = blocks
        for block in blocks:
            state.enter_table(block)

    def put_entry(self, index: int, blocks: Iterable[int], state: BlockState) -> None:
        """Replace an entry, or add the next one. The first may be at any index."""
        if not self.entries:
            self.num_passed = index
        at, entry = index - self.num_passed, list(blocks)
        require(0 <= at <= len(self.entries), f"it has {len(self.entries)} entries")
        for block in chain(*self.entries[at : at + 1]):
            state.leave_table(block)
        self.entries[at : at + 1] = [entry]
        for block in entry:
            state.enter_table(block)

    def pass_entries(self, index: int, state: BlockState) -> list[int]:
        """Drop the entries before ``index``, and return their blocks."""
        count = index - self.num_passed
        require(0 < count <= len(self.entries), f"it has passed {self.num_passed} entries")
        passed = [*chain(*self.entries[:count])]
        for block in passed:
            state.leave_table(block)
            state.let_go(block)
        del self.entries[:count]
        self.num_passed = index
        return passed

    def trim(self, num_blocks: int, state: BlockState) -> None:
        """Drop the blocks of the table after the first ``num_blocks``, and their entries."""
        num_entries = max(0, num_blocks - self.num_passed)
        require(0 <= num_blocks < len(self.blocks), f"its table has {len(self.blocks)} blocks")
        for block in (*self.blocks[num_blocks:], *chain(*self.entries[num_entries:])):
            state.leave_table(block)
            state.let_go(block)
        del self.blocks[num_blocks:], self.entries[num_entries:]

    def check_entries(self, block_size: int) -> None:
        """Raise `TraceError` unless the computed tokens are within the entries."""
        num_slots = (self.num_passed + len(self.entries)) * block_size
        require(self.num_computed <= num_slots, f"its entries end at slot {num_slots}")

    def share(self, other: SequenceState, state: BlockState) -> None:
        """Put all blocks of another sequence in the table."""
        self.put(0, other.blocks, state)
        for index, entry in enumerate(other.entries, other.num_passed):
            self.put_entry(index, entry, state)

    def close(self, state: BlockState) -> None:
        """Drop all blocks."""
        for block in self.held:
            state.leave_table(block)
            state.let_go(block)
        self.blocks, self.entries = [], []

    def snapshot(self) -> dict[str, Any]:
        """Return the fields with copied lists. Fields of windows are left out if there are none."""
        fields = copied(vars(self))
        if not self.entries:
            del fields["entries"], fields["num_passed"]
        return fields


def copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a sequence with its lists copied."""
    return {name: _copied(value) for name, value in values.items()}


def _copied(value: Any) -> Any:
    return [*map(_copied, value)] if isinstance(value, list) else value
