"""Follow an event log in a worker process, to take no time from the engine's process.

A request has the name of a method of `Follower` and its arguments, and a reply has True and the
result, or False and the message of the `TraceError`. `marshal` writes both: it takes a microsecond
for a step, and never runs code while it reads.
"""

import marshal
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

from mie.base import worker_side
from mie.base.arithmetic import ceil_div
from mie.errors import TraceError
from mie.events import Snapshot, Step
from mie.events.replay import State
from mie.page.cells import Line, NodeText, encode, head_record
from mie.page.view import View

NICENESS = 5
"""Where CPUs are short, the engine goes first. The page is then late, and skips nothing."""
MAX_RECORDS = 5
MAX_SEQUENCES = 200
"""Records for the steps that are taken in at once, and sequences in all of them together.

More steps are merged, because finding the changes takes longer than applying a record.
"""
MAX_SPLIT = 25
"""Steps that may be split into several records.

An engine with more steps between two looks is fast, and this process takes CPU time from it.
"""

Place = tuple[str, int, int, int]
"""Tokens of a request that runs: its id, the choice, the first position and the end."""


class Follower:
    """Replays a log while it grows. Call `begin` first."""

    def __init__(self, pause: Callable[[], object] = lambda: None) -> None:
        """``pause`` is called between two steps. A step takes some ten microseconds."""
        self._pause = pause
        self._view: View
        self._num_applied = 0  # of the records after the last step
        self._counts: Mapping[str, int] = {}

    def begin(
        self, after: int, snapshot: Snapshot, steps: Sequence[Step], name: str, server: str
    ) -> bytes:
        """Begin with the last segment of a log, and return the head of a stream.

        ``name`` is the model's, and ``server`` distinguishes runs of a server.

        Raises:
            TraceError: the pool is too large for a page.
        """
        last = steps[-1][-1][1]["step"] if steps else after
        head = head_record(snapshot, source="live", name=name, first=last, server=server)
        state = State.from_snapshot(snapshot, after)
        self._view = View(state, NodeText(shows_tokens=False), is_checked=True)
        self._num_applied = 0
        for records in steps:
            self._view.add_step(records)
            self._pause()
        self._view.take()
        return encode(head).encode()

    def follow(
        self, steps: Sequence[Step], rest: Step, counts: Mapping[str, int]
    ) -> tuple[int, list[tuple[str, bytes]]]:
        """Take in the steps after the last one, and the records after those.

        Return the number of the last step, and the records for a page. ``counts`` are the engine's
        at the moment of `key`.
        """
        self._counts = counts
        lines = [(kind, line.encode()) for kind, line in self._lines(steps, rest)]
        return self._view.state.step, lines

    def _lines(self, steps: Sequence[Step], rest: Step) -> Iterator[Line]:
        view = self._view
        num_records = min(MAX_RECORDS, MAX_SEQUENCES // max(1, len(view.state.rows)))
        if len(steps) > MAX_SPLIT:
            num_records = 1
        per_record = ceil_div(max(1, len(steps)), max(1, num_records))
        for start in range(0, len(steps), per_record):
            for records in steps[start : start + per_record]:
                view.add_step(records, self._num_applied)
                self._num_applied = 0
                self._pause()
            yield view.take()
        if len(rest) > self._num_applied:
            view.apply(rest[self._num_applied :])
            self._num_applied = len(rest)
            yield view.take_now()

    def key(self) -> bytes:
        """Return the record of the whole state as it is now, with the engine's counts."""
        facts = {"is_now": bool(self._num_applied), "totals": self._counts}
        return encode({**self._view.key(), **facts}).encode()

    def tokens(
        self, blocks: Sequence[int]
    ) -> tuple[int, dict[int, Sequence[int]], dict[int, Place]]:
        """Return the last step, the tokens of blocks in the tree, and the places of the others."""
        state, size = self._view.state, self._view.state.blocks.block_size
        known: dict[int, Sequence[int]] = {}
        places: dict[int, Place] = {}
        for block in blocks:
            node, holder = state.blocks.node_of.get(block), self._view.holder(block)
            if node is not None:
                known[block] = state.blocks.tree[node].tokens
            elif holder is not None:
                seq, index = holder
                end = min((index + 1) * size, state.sequences[seq].num_computed)
                places[block] = (state.sequences[seq].request_id, seq[1], index * size, end)
        return state.step, known, places


def main() -> None:
    """Answer requests until the socket closes."""
    os.nice(NICENESS)
    # A thread of the engine that waits for this CPU gets it after one step, not after all.
    follower = Follower(pause=os.sched_yield)
    while (request := worker_side.read_message()) is not None:
        method, *arguments = marshal.loads(request)
        try:
            answer = (True, getattr(follower, method)(*arguments))
        except TraceError as error:
            answer = (False, str(error))
        worker_side.write_message(marshal.dumps(answer))
