"""`Follower`: the records of a log that grows, for pages that watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from mie.arithmetic import ceil_div
from mie.events import Segment, Step
from mie.page.cells import Cells, NodeText
from mie.page.stream import Line, Steps, head_record
from mie.page.view import View
from mie.replay import State

MAX_RECORDS = 5
MAX_SEQUENCES = 200
"""Records for the steps that are taken in at once, and sequences in all of them together.

More steps are merged, because finding what changed takes longer than applying a record.
"""
MAX_SPLIT = 25
"""Steps that may be split into several records.

An engine with more steps between two looks is fast, and this process takes CPU time from it.
"""

Place = tuple[str, int, int, int]
"""Tokens of a request that runs: its id, the choice, the first position and the end."""


class Follower:
    """Replays a log while it grows. Records are applied once, in the order of the log."""

    def __init__(
        self,
        segments: Sequence[Segment],
        name: str,
        pause: Callable[[], object] = lambda: None,
    ) -> None:
        """``segments`` are what the log has in memory; its last snapshot is the beginning.

        ``pause`` is called between two steps, which take some ten microseconds.
        """
        self._pause = pause
        last = segments[-1]
        self.head = head_record(last.snapshot, source="live", name=name, first=last.last)
        """The record that begins every stream."""
        self._view = View(
            State.from_snapshot(last.snapshot, last.after), NodeText(shows_tokens=False)
        )
        self._steps = Steps(self._view, is_checked=True)
        self._num_applied = 0  # of the records after the last step
        for records in last.steps:
            self._steps.add(records)
            pause()
        self._steps.take()

    @property
    def step(self) -> int:
        """The number of the last step that was taken in."""
        return self._view.state.step

    def records(self, steps: Sequence[Step], rest: Step) -> Iterator[Line]:
        """Take in what is new: steps after the last one, and what happened after them."""
        num_records = min(MAX_RECORDS, MAX_SEQUENCES // max(1, len(self._view.state.rows)))
        if len(steps) > MAX_SPLIT:
            num_records = 1
        per_record = ceil_div(max(1, len(steps)), max(1, num_records))
        for start in range(0, len(steps), per_record):
            for records in steps[start : start + per_record]:
                self._steps.add(records, self._num_applied)
                self._num_applied = 0
                self._pause()
            yield self._steps.take()
        if len(rest) > self._num_applied:
            self._steps.apply(rest[self._num_applied :])
            self._num_applied = len(rest)
            yield self._steps.take_now()

    def key(self, counts: Mapping[str, int]) -> Cells:
        """Return the state as it is now, with the engine's counts."""
        return {**self._view.key(), "is_now": bool(self._num_applied), "totals": counts}

    def tokens(self, blocks: Sequence[int]) -> tuple[dict[int, Sequence[int]], dict[int, Place]]:
        """Return the tokens of blocks in the tree, and where those of other blocks are."""
        state, size = self._view.state, self._view.state.blocks.block_size
        known: dict[int, Sequence[int]] = {}
        places: dict[int, Place] = {}
        for block in blocks:
            node, holder = state.blocks.tree.get(block), self._view.holder(block)
            if node is not None:
                known[block] = node.tokens
            elif holder is not None:
                seq, index = holder
                end = min((index + 1) * size, state.sequences[seq].num_computed)
                places[block] = (state.sequences[seq].request_id, seq[1], index * size, end)
        return known, places
