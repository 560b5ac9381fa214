"""Apply records to a state, and write the records of a page: events, and cells that changed."""

from collections.abc import Iterable
from types import MappingProxyType

from mie.events import FIELDS, Record, Seq, Step
from mie.events.replay import NodeState, SequenceState, State
from mie.page.cells import (
    FREE_CELL,
    Cells,
    Line,
    NodeText,
    block_cell,
    encode,
    event_of,
    key_record,
    row_of,
    seq_cell,
    seq_text,
    slot_cells,
)


class Heat:
    """Counts uses of the nodes, notes those from a disk, and orders last uses as the cache does.

    A node is idle when only the tree holds its block. Nodes that one table leaves become idle at
    the same moment. Which of two such leaves is evicted first is decided by their block ids.
    """

    def __init__(self, state: State) -> None:
        self._uses = dict.fromkeys(state.blocks.tree, 0)
        self._idle = dict.fromkeys((b for b in state.blocks.tree if state.blocks.refs[b] == 1), 0)
        self._clock = 0
        self._changed: set[int] = set()
        self._leaving: list[int] = []
        self._reads: set[Seq] = set()  # sequences with host blocks from a disk
        self._from_disk: set[int] = set()

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
            case ("alloc", _, _, blocks):
                self._from_disk.difference_update(blocks)
            case ("read", seq, _, _):
                self._reads.add(seq)
            case ("import", seq, _, blocks) if seq in self._reads:
                self._reads.discard(seq)
                self._from_disk.update(blocks)
                self._changed.update(blocks)
            case ("drop", seq):
                self._reads.discard(seq)
            case ("evict", block):
                self._uses.pop(block, None)
                self._idle.pop(block, None)
            case ("rebuild", _):
                self._uses.clear()
                self._idle.clear()
                self._reads.clear()

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
        cell = [self._uses[block], self._idle.get(block)]
        return [*cell, 1] if block in self._from_disk else cell

    def _use(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if block in self._uses:
                self._uses[block] += 1
                self._changed.add(block)

    def _hold(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._idle.pop(block, None) is not None:
                self._changed.add(block)


_COMPUTES = frozenset({"decode", "prefill", "verify"})
"""The kinds of records that only count tokens of sequences. Most records of a log are of these."""

_NAMING = MappingProxyType(
    {
        kind: tuple(
            (index, name)
            for index, name in enumerate(names, 1)
            if name in ("rows", "number", "seq", "blocks", "block")
        )
        for kind, names in FIELDS.items()
    }
)
"""The fields of each kind of record that name changed cells, and their places in it."""


class View:
    """Applies records to a state, collects their events, and finds the cells that changed.

    Records only name the places to check. The contents of a cell are read from the state, so no
    rule of the allocator is repeated here.
    """

    def __init__(self, state: State, text: NodeText, *, is_checked: bool = False) -> None:
        """``is_checked``: records name only existing blocks and sequences, as an engine does."""
        self.state = state
        self._is_checked = is_checked
        self._events: list[str] = []
        self._steps: list[str] = []  # in JSON, since the last record
        self._text = text
        self.heat = Heat(state)
        self._seqs: dict[Seq, Cells] = {}
        self._tables: dict[Seq, list[int]] = {}
        self._entries: dict[Seq, list[int]] = {}  # blocks of layers with a window
        self._hosts: dict[Seq, list[int]] = {}
        self._nodes: dict[int, NodeState] = {}
        self._blocks: dict[int, tuple[int, int, int]] = {}
        self._slots: dict[str, str | int] = {}
        self._holders: dict[int, dict[Seq, int]] = {}  # block -> its index in each table
        self._forget_changes()
        self._touch_all()
        self._changes()

    @property
    def num_steps(self) -> int:
        """The number of steps since the last record."""
        return len(self._steps)

    def add_step(self, records: Step, num_applied: int = 0) -> None:
        """Apply the records of a step, except the first ones that were applied before.

        Raises:
            TraceError: one of them cannot happen in this state.
        """
        self.apply(records[num_applied:])
        self._steps.append(f'{{"row":{row_of(records)},"events":{self._take_events()}}}')

    def apply(self, records: Iterable[Record]) -> None:
        """Apply records without the end of their step.

        Raises:
            TraceError: one of them cannot happen in this state.
        """
        for record in records:
            if not self._is_checked:
                self.state.check_names(record)
            event = event_of(record, self.state)
            self._touch(record)
            self.heat.before(record, self.state)
            self.state.apply(record)
            self.heat.after(record, self.state)
            if record[0] == "rebuild":
                self._touch_all()
            if event is not None:
                self._events.append(event)

    def take(self) -> Line:
        """Return the record of the steps since the last one."""
        steps, self._steps = ",".join(self._steps), []
        cells = encode(self._changes())
        return "steps", f'{{"record":"steps","steps":[{steps}],"set":{cells}}}'

    def take_now(self) -> Line:
        """Return the record of the events after the last step."""
        events, cells = self._take_events(), encode(self._changes())
        return "now", f'{{"record":"now","events":{events},"set":{cells}}}'

    def key(self) -> Cells:
        """Return the record that gives the whole state, as it is now."""
        return {**key_record(self.state, self._text), "heat": self.heat.cells()}

    def _take_events(self) -> str:
        events, self._events = ",".join(self._events), []
        return f"[{events}]"

    def _changes(self) -> Cells:
        """Return the cells that changed since the last call, without empty members."""
        found: Cells = {"seqs": {}, "gone": [], "tables": {}, "host": {}, "tree": {}, "cut": []}
        for seq in sorted(self._changed):
            self._compare_sequence(seq, found)
        for seq in sorted(self._computed - self._changed):
            self._compare_tokens(seq, found)
        for block in sorted(self._changed_nodes):
            self._compare_node(block, found)
        found["blocks"] = [*self._compare_blocks()]
        found["heat"] = self.heat.changes()
        found["slots"] = self._compare_slots()
        self._forget_changes()
        return {name: cells for name, cells in found.items() if cells}

    def holder(self, block: int) -> tuple[Seq, int] | None:
        """Return a sequence with the block in its table, and the index there, or None."""
        return next(iter(self._holders.get(block, {}).items()), None)

    # Cells that may have changed.

    def _forget_changes(self) -> None:
        self._changed: set[Seq] = set()
        self._computed: set[Seq] = set()
        self._changed_blocks: set[int] = set()
        self._changed_nodes: set[int] = set()

    def _touch_all(self) -> None:
        state = self.state
        self._changed, self._computed = {*self._seqs, *state.sequences}, set()
        self._changed_blocks = {*self._blocks, *state.blocks.refs}
        self._changed_nodes = {*self._nodes, *state.blocks.tree}

    def _touch(self, record: Record) -> None:
        kind = record[0]
        for index, name in _NAMING[kind]:
            value = record[index]
            if name == "rows":
                self._computed.update(map(self.state.rows.__getitem__, value))
            elif name == "number":
                self._changed.add((value, 0))
            elif name == "blocks":
                self._changed_blocks.update(value)
            elif name == "block":
                self._changed_blocks.add(value)
                self._changed_nodes.add(value)
            else:
                (self._computed if kind in _COMPUTES else self._changed).add(value)

    # Cells that did change.

    def _compare_sequence(self, seq: Seq, found: Cells) -> None:
        values, name = self.state.sequences.get(seq), seq_text(seq)
        if values is None:
            if self._seqs.pop(seq, None) is not None:
                found["gone"].append(name)
            self._drop_entries(seq)
            self._compare_table(seq, [])
            self._hosts.pop(seq, None)
            return
        old, new = self._seqs.get(seq, {}), seq_cell(values)
        if new != old:
            found["seqs"][name] = {k: v for k, v in new.items() if k not in old or v != old[k]}
            self._seqs[seq] = new
        self._drop_entries(seq)
        start = self._compare_table(seq, values.blocks)
        if start is not None:
            found["tables"][name] = [start, values.blocks[start:]]
        if values.entries:
            self._add_entries(seq, values)
        host = list(values.host or ())
        if host != self._hosts.get(seq, []):
            found["host"][name] = self._hosts[seq] = host
        self._touch_fills(values, old.get("num_computed", 0))

    def _compare_tokens(self, seq: Seq, found: Cells) -> None:
        """Take in a sequence that computed tokens, and did nothing else."""
        values, old = self.state.sequences[seq], self._seqs[seq]
        new = {"num_tokens": values.num_tokens, "num_computed": values.num_computed}
        found["seqs"][seq_text(seq)] = new
        self._touch_fills(values, old["num_computed"])
        old.update(new)

    def _compare_table(self, seq: Seq, new: list[int]) -> int | None:
        """Take in a table, and return its first entry that changed, or None."""
        old = self._tables.pop(seq, [])
        if new:
            self._tables[seq] = new[:]
        if new == old:
            return None
        pairs = enumerate(zip(old, new, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
        for block in old[start:]:
            holders = self._holders[block]
            del holders[seq]
            if not holders:
                del self._holders[block]
        for index, block in enumerate(new[start:], start):
            self._holders.setdefault(block, {})[seq] = index
        self._changed_blocks.update(old[start:], new[start:])
        return start

    def _drop_entries(self, seq: Seq) -> None:
        """Drop a sequence's blocks of layers with a window. They may have moved to its table."""
        old = self._entries.pop(seq, ())
        for block in old:
            holders = self._holders[block]
            del holders[seq]
            if not holders:
                del self._holders[block]
        self._changed_blocks.update(old)

    def _add_entries(self, seq: Seq, values: SequenceState) -> None:
        new = self._entries[seq] = []
        for index, entry in enumerate(values.entries, values.num_passed):
            new += entry
            for block in entry:
                self._holders.setdefault(block, {})[seq] = index
        self._changed_blocks.update(new)

    def _touch_fills(self, values: SequenceState, old: int) -> None:
        """Touch the blocks with slots that were filled, or emptied, since it had ``old`` tokens."""
        new = values.num_computed
        if old != new:
            size = self.state.blocks.block_size
            first, last = min(old, new) // size, (max(old, new) - 1) // size
            self._changed_blocks.update(values.blocks[first : last + 1])
            if values.entries:
                first, last = max(0, first - values.num_passed), last - values.num_passed
                self._changed_blocks.update(*values.entries[first : last + 1])

    def _compare_node(self, block: int, found: Cells) -> None:
        node = self.state.blocks.tree.get(block)
        if node is None:
            if self._nodes.pop(block, None) is not None:
                found["cut"].append(block)
        elif node is not self._nodes.get(block):
            self._nodes[block] = node
            found["tree"][str(block)] = self._text.cell(node)

    def _compare_blocks(self) -> list[list[int]]:
        found: list[list[int]] = []
        for block in sorted(self._changed_blocks):
            new = block_cell(self.state, block, self._fill(block))
            if new == self._blocks.get(block, FREE_CELL):
                continue
            found.append([block, *new])
            if new == FREE_CELL:
                del self._blocks[block]
            else:
                self._blocks[block] = new
        return found

    def _compare_slots(self) -> dict[str, str | int | None]:
        old, new = self._slots, slot_cells(self.state)
        self._slots = new
        freed = dict.fromkeys(old.keys() - new.keys())
        return {**freed, **{slot: each for slot, each in new.items() if each != old.get(slot)}}

    def _fill(self, block: int) -> int:
        """Return the number of filled slots of one block, as `State.fills` does."""
        size, fill = self.state.blocks.block_size, 0
        if block in self.state.blocks.node_of:
            return size
        for seq, index in self._holders.get(block, {}).items():
            fill = max(fill, self.state.sequences[seq].num_computed - index * size)
        return min(fill, size)
