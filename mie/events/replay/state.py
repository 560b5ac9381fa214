"""Model queues, tables and blocks after a step, and apply records to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from mie.errors import TraceError, shown_text
from mie.events import FIELDS, MAX_FORCED_RUN, Record, Seq, Snapshot, Step, Summary
from mie.events.replay.blocks import BlockState, require
from mie.events.replay.sequence import SequenceState, copied
from mie.events.replay.slots import SlotState


class State:
    """Queues, tables, references and the prefix tree after a step."""

    def __init__(
        self, *, block_size: int, num_blocks: int, num_host_blocks: int, step: int = 0
    ) -> None:
        self.blocks = BlockState(block_size, num_blocks)
        self.slots: SlotState | None = None
        """The slots of recurrent states, if the model has some."""
        self.num_host_blocks = num_host_blocks
        self.step = step
        """The number of the last complete step."""
        self.sequences: dict[Seq, SequenceState] = {}
        self.rows: dict[int, Seq] = {}

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, step: int = 0) -> State:
        """Return the state that a snapshot taken after ``step`` describes.

        Raises:
            TraceError: the snapshot contradicts itself.
        """
        sizes = {name: snapshot[name] for name in ("block_size", "num_blocks", "num_host_blocks")}
        state = cls(**sizes, step=step)
        state._load(snapshot)
        return state

    def _load(self, snapshot: Snapshot) -> None:
        self.blocks = BlockState(self.blocks.block_size, self.blocks.num_blocks)
        self.sequences, self.rows = {}, {}
        for seq, values in snapshot["sequences"].items():
            self.sequences[seq] = SequenceState(**copied(values))
            if values["row"] is not None:
                self.rows[values["row"]] = seq
        self.blocks.load(snapshot)
        self.slots = SlotState(snapshot["states"]) if "states" in snapshot else None
        if self.slots is not None:
            self.slots.check_owners(self.rows.values(), self.blocks.tree)
        is_in_order = [self.waiting, self.running] == [snapshot["waiting"], snapshot["running"]]
        require(is_in_order, "the snapshot's queues do not match its sequences")

    def snapshot(self) -> dict[str, Any]:
        """Return the state as plain data, as `mie.engine.watch.snapshot` does of the scheduler."""
        return {
            "block_size": self.blocks.block_size,
            "num_blocks": self.blocks.num_blocks,
            "num_host_blocks": self.num_host_blocks,
            "waiting": self.waiting,
            "running": self.running,
            "sequences": {seq: values.snapshot() for seq, values in self.sequences.items()},
            **self.blocks.snapshot(),
            **({} if self.slots is None else {"states": self.slots.snapshot()}),
        }

    # Queries.

    @property
    def waiting(self) -> list[Seq]:
        """The waiting sequences in queue order."""
        return self._in_order(seq for seq, values in self.sequences.items() if values.row is None)

    @property
    def running(self) -> list[Seq]:
        """The running sequences in queue order."""
        return self._in_order(self.rows.values())

    def fills(self) -> dict[int, int]:
        """Return the number of filled slots of each block in a table or in the tree."""
        size = self.blocks.block_size
        fills = dict.fromkeys(self.blocks.node_of, size)
        for values in self.sequences.values():
            for block, index in values.places:
                stored = min(max(0, values.num_computed - index * size), size)
                fills[block] = max(stored, fills.get(block, 0))
        return fills

    def _in_order(self, seqs: Iterable[Seq]) -> list[Seq]:
        return sorted(seqs, key=lambda seq: (self.sequences[seq].rank, seq))

    # Records.

    def apply_step(self, records: Step) -> None:
        """Apply the records of one step."""
        for record in records:
            self.apply(record)

    def apply(self, record: Record) -> None:
        """Apply one record.

        Raises:
            TraceError: the record cannot happen in this state.
        """
        kind, *values = record
        try:
            require(kind in FIELDS, "unknown event")
            if kind in ("seal", "evict", "seal_window", "evict_window", "pin", "unpin"):
                getattr(self.blocks, kind)(*values)
            elif kind in ("state", "revert", "save", "forget", "save_host"):
                require(self.slots is not None, "there are no states")
                getattr(self.slots, kind)(*values)
            else:
                getattr(self, f"_on_{kind}")(*values)
        except TraceError as error:
            raise self._located(record, error) from error

    def check_names(self, record: Record) -> None:
        """Raise `TraceError` unless the sequences and rows that the record names exist."""
        kind, *values = record
        try:
            require(kind in FIELDS, "unknown event")
            fields = dict(zip(FIELDS[kind], values, strict=True))
            for row in fields.get("rows", ()):
                require(row in self.rows, f"unknown row {row}")
            if kind in ("fork", "wait"):
                self._sequence(fields["parent"])
            # The first two bring a new choice, and the last may end a choice that was never forked.
            if "seq" in fields and kind not in ("fork", "wait", "finish"):
                self._sequence(fields["seq"])
            if fields.get("by") is not None:
                self._sequence(fields["by"])
        except TraceError as error:
            raise self._located(record, error) from error

    def _located(self, record: Record, error: TraceError) -> TraceError:
        """Return the error with the record that caused it and the step before it."""
        kind, *values = record
        named = [shown_text(x) for x in values] if kind != "step" else []
        what = " ".join([shown_text(kind), *named])
        return TraceError(f"after step {self.step}: {what}: {error}")

    def _on_add(
        self, request_id: str, number: int, rank: int, num_prompt: int, n: int, max_tokens: int
    ) -> None:
        seq = (number, 0)
        require(seq not in self.sequences, "it already exists")
        self.sequences[seq] = SequenceState(
            request_id=request_id,
            rank=rank,
            num_prompt=num_prompt,
            max_tokens=max_tokens,
            n=n,
            num_tokens=num_prompt,
        )

    def _on_admit(self, seq: Seq, row: int, num_tokens: int, num_computed: int) -> None:
        values = self._sequence(seq)
        require(values.row is None, "it is already running")
        require(values.num_tokens == num_tokens, f"it has {values.num_tokens} tokens")
        require(0 <= num_computed < num_tokens, "it has no token to compute")
        self._seat(seq, row)
        values.num_computed = num_computed

    def _on_resume(self, seq: Seq, row: int, num_tokens: int, num_computed: int, mode: str) -> None:
        is_swapped = self._sequence(seq).host is not None
        require((mode == "swap") == is_swapped, "it was preempted in another mode")
        self._on_admit(seq, row, num_tokens, num_computed)

    def _on_hit(
        self, seq: Seq, num_queried: int, num_full: int, num_partial: int, source: int | None
    ) -> None:
        num_hit = self._runner(seq).num_computed
        require(num_full + num_partial == num_hit, f"{num_hit} tokens were hits")
        require(num_hit <= num_queried, "more tokens were hits than were queried")
        require(source is None or source in self.blocks.refs, "the source has no holder")

    def _on_prefill(self, seq: Seq, start: int, count: int, choices: tuple[int, ...]) -> None:
        values = self._runner(seq)
        require(values.num_computed == start, f"it has computed {values.num_computed} tokens")
        is_complete = start + count == values.num_tokens
        require(is_complete == bool(choices), "the prompt is not complete")
        require(all(0 <= choice < values.n for choice in choices), "unknown choice")
        self._compute(values, count)
        values.num_tokens += is_complete

    def _on_decode(self, rows: Iterable[int]) -> None:
        size, seqs, sequences = self.blocks.block_size, self.rows, self.sequences
        for row in (
            rows
        ):  # Most of a replay is spent here, so a message is formatted only if it is needed.
            if row not in seqs:
                raise TraceError(f"unknown row {row}")
            values = sequences[seqs[row]]
            if values.num_computed != values.num_tokens - 1:
                raise TraceError(f"row {row} has more to compute")
            if values.num_tokens > len(values.blocks) * size:
                raise TraceError(f"its table has {len(values.blocks) * size} slots")
            values.num_computed += 1
            values.num_tokens += 1
            if values.entries:
                values.check_entries(size)

    def _on_verify(self, seq: Seq, start: int, count: int, num_accepted: int) -> None:
        values = self._runner(seq)
        require(values.num_computed == start, f"it has computed {values.num_computed} tokens")
        require(values.num_tokens == start + 1, "it has more to compute")
        require(0 <= num_accepted <= count, f"it has {count} drafts")
        self._compute(replace(values, num_tokens=values.num_tokens + count), 1 + count)
        values.num_tokens += num_accepted + 1
        if self.slots is None or num_accepted == count:  # otherwise the state is the one before
            values.num_computed += num_accepted + 1

    def _on_trim(self, seq: Seq, num_blocks: int) -> None:
        self._runner(seq).trim(num_blocks, self.blocks)

    def _on_force(self, seq: Seq, count: int) -> None:
        require(0 < count <= MAX_FORCED_RUN, f"at most {MAX_FORCED_RUN} tokens are forced at once")
        self._runner(seq).num_tokens += count

    def _on_depart(
        self,
        seq: Seq,
        position: int,
        reason: str,
        cached: Iterable[int],
        got: Iterable[int],
        nearest: int | None,
    ) -> None:
        values = self._sequence(seq)
        require(values.row is None, "it is running")
        require(0 <= position < values.num_tokens, f"it has {values.num_tokens} tokens")
        require(nearest is None or nearest in self.blocks.tree, "the block is not in the tree")

    def _on_fork(self, seq: Seq, parent: Seq, row: int) -> None:
        values = self._runner(parent)
        self._check_choice(seq, parent)
        emptied: dict[str, Any] = {"row": None, "blocks": [], "entries": []}
        self.sequences[seq] = SequenceState(**{**vars(values), **emptied})
        self._seat(seq, row)
        self.sequences[seq].share(values, self.blocks)

    def _on_wait(self, seq: Seq, parent: Seq) -> None:
        values = self._sequence(parent)
        self._check_choice(seq, parent)
        facts = {name: vars(values)[name] for name in ("request_id", "rank", "num_prompt", "n")}
        self.sequences[seq] = SequenceState(
            **facts, max_tokens=values.max_tokens, num_tokens=values.num_prompt
        )

    def _on_preempt(self, seq: Seq, by: Seq | None, mode: str, rule: str, num_lost: int) -> None:
        values = self._runner(seq)
        require(by is None or by in self.sequences, "unknown request number")
        require((mode == "swap") == (values.host is not None), "its host blocks contradict that")
        self._leave_row(values)
        values.num_computed = 0

    def _on_finish(self, seq: Seq, reason: str) -> None:
        values = self._sequence(seq)
        require(values.host is None, "it still has host blocks")
        require(not values.blocks, "its table is still open")
        if values.row is not None:
            self._leave_row(values)
        del self.sequences[seq]

    def _on_alloc(self, seq: Seq, index: int, blocks: Iterable[int]) -> None:
        self._runner(seq).put(index, blocks, self.blocks)
        for block in blocks:
            require(self.blocks.refs[block] == 1, f"block {block} was in use")

    def _on_share(self, seq: Seq, index: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            require(block in self.blocks.refs, f"block {block} has no holder")
        self._runner(seq).put(index, blocks, self.blocks)

    def _on_release(self, seq: Seq, blocks: Iterable[int]) -> None:
        self._runner(seq)
        for block in blocks:
            self.blocks.let_go(block)

    def _on_close(self, seq: Seq) -> None:
        self._runner(seq).close(self.blocks)
        if self.slots is not None:
            self.slots.close(seq)

    def _on_alloc_window(self, seq: Seq, index: int, blocks: Iterable[int]) -> None:
        self._runner(seq).put_entry(index, blocks, self.blocks)
        for block in blocks:
            require(self.blocks.refs[block] == 1, f"block {block} was in use")

    def _on_share_window(self, seq: Seq, index: int, blocks: Iterable[int]) -> None:
        for block in blocks:
            require(block in self.blocks.refs, f"block {block} has no holder")
        self._runner(seq).put_entry(index, blocks, self.blocks)

    def _on_pass(self, seq: Seq, index: int, blocks: Iterable[int]) -> None:
        passed = self._runner(seq).pass_entries(index, self.blocks)
        require([*blocks] == passed, "its entries have other blocks")

    def _on_copy(self, source: int, target: int, seq: Seq, cause: str) -> None:
        require(target in self._runner(seq).held, "the target is not in its table")
        require(source in self.blocks.refs, "the source has no holder")

    def _on_export(self, seq: Seq, host: Iterable[int]) -> None:
        host = list(host)
        require(len(host) <= len(self._runner(seq).held), "its table has too few blocks")
        self._take_host(seq, host)

    def _take_host(self, seq: Seq, host: list[int]) -> None:
        values = self._sequence(seq)
        taken = {block for other in self.sequences.values() for block in other.host or ()}
        require(values.host is None, "it already has host blocks")
        require(len({*host} - taken) == len(host), "a host block is in use")
        is_there = all(0 <= block < self.num_host_blocks for block in host)
        require(is_there, "unknown host block")
        values.host = host

    def _on_read(self, seq: Seq, host: Iterable[int], num_tokens: int) -> None:
        require(self._sequence(seq).row is None, "it is running")
        self._take_host(seq, [*host])

    def _on_import(self, seq: Seq, host: Iterable[int], blocks: Iterable[int]) -> None:
        values, host, blocks = self._runner(seq), list(host), list(blocks)
        require({*host} <= {*(values.host or ())}, "the host blocks belong to another sequence")
        require(len(host) == len(blocks), "the table cannot hold that many host blocks")
        require({*blocks} <= {*values.held}, "the blocks are not in its table")
        self._leave_host(seq)

    def _on_drop(self, seq: Seq) -> None:
        values = self._sequence(seq)
        require(values.host is not None, "it has no host blocks")
        self._leave_host(seq)

    def _leave_host(self, seq: Seq) -> None:
        self.sequences[seq].host = None
        if self.slots is not None:
            self.slots.leave_host(seq)

    def _on_rebuild(self, snapshot: Snapshot) -> None:
        sizes = (snapshot["block_size"], snapshot["num_blocks"], snapshot["num_host_blocks"])
        own = (self.blocks.block_size, self.blocks.num_blocks, self.num_host_blocks)
        require(sizes == own, "the sizes of the pools cannot change")
        self._load(snapshot)
        is_empty = not self.rows and not self.blocks.refs and not self.blocks.tree
        require(is_empty, "a sequence is running or has blocks")

    def _on_step(self, summary: Summary) -> None:
        require(summary["step"] > self.step, f"step {summary['step']} comes too late")
        self.blocks.check()
        if self.slots is not None:
            self.slots.check(self.rows.values(), self.blocks.tree)
        self.step = summary["step"]

    # Parts of the above.

    def _sequence(self, seq: Seq) -> SequenceState:
        require(seq in self.sequences, f"unknown sequence {seq}")
        return self.sequences[seq]

    def _runner(self, seq: Seq) -> SequenceState:
        values = self._sequence(seq)
        require(values.row is not None, f"{seq} is not running")
        return values

    def _check_choice(self, seq: Seq, parent: Seq) -> None:
        require(seq not in self.sequences, "it already exists")
        is_choice = seq[0] == parent[0] and 0 < seq[1] < self.sequences[parent].n
        require(is_choice, "it is not a choice of that request")

    def _seat(self, seq: Seq, row: int) -> None:
        require(row not in self.rows, f"row {row} is taken")
        self.rows[row] = seq
        self.sequences[seq].row = row

    def _leave_row(self, values: SequenceState) -> None:
        require(not values.blocks, "its table is still open")
        assert values.row is not None
        del self.rows[values.row]
        values.row = None

    def _compute(self, values: SequenceState, count: int) -> None:
        values.num_computed += count
        num_slots = len(values.blocks) * self.blocks.block_size
        require(count > 0, "no token was computed")
        require(values.num_computed <= values.num_tokens, "it has too few tokens")
        require(values.num_computed <= num_slots, f"its table has {num_slots} slots")
        if values.entries:
            values.check_entries(self.blocks.block_size)
