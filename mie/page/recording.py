"""Write a log as page records: a head, the whole state now and then, and each step's changes."""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mie.errors import TraceError
from mie.events import Segment, Snapshot
from mie.events.replay import State
from mie.page.cells import NodeText, encode, head_record
from mie.page.view import View

MAX_STEPS = 20_000
"""Steps that a page holds of a recorded run. The first steps of a longer run are left out."""
STEPS_PER_KEY = 250
"""Fewest steps between two keys. There are more if a key is larger than their changes."""


@dataclass(kw_only=True)
class _Chunk:
    """A key, and the records up to the next one."""

    first: int
    lines: list[str]
    num_steps: int = 0
    num_bytes: int = 0

    @property
    def is_full(self) -> bool:
        """Whether another key costs less than it saves."""
        return self.num_steps >= STEPS_PER_KEY and self.num_bytes >= len(self.lines[0])


class Recording:
    """The page records of a log, as lines."""

    def __init__(
        self,
        segments: Iterable[Segment],
        text: NodeText,
        *,
        max_steps: int = MAX_STEPS,
        steps_per_record: int = 1,
    ) -> None:
        """Replay a log, and keep at least its last ``max_steps`` steps.

        Raises:
            TraceError: the log is invalid, or its pool is too large for a page.
        """
        self.num_dropped = 0
        """Steps at the beginning that were left out."""
        self.is_cut = False
        """Whether the log ended in the middle of a line."""
        self._max_steps = max_steps
        self._steps_per_record = steps_per_record
        self._chunks: deque[_Chunk] = deque()
        self._num_steps = 0
        self._view: View | None = None
        for segment in segments:
            self._take_in(segment, text)

    @property
    def last(self) -> int:
        """The number of the last step."""
        assert self._view is not None, "a log has at least one segment"
        return self._view.state.step

    def lines(self, name: str) -> Iterator[str]:
        """Yield the head and all records. ``name`` is the title of the run."""
        first = self._chunks[0].first
        facts = {"dropped": self.num_dropped, "is_cut": self.is_cut}
        yield encode(
            head_record(
                self._snapshot, source="file", name=name, first=first, last=self.last, **facts
            )
        )
        for chunk in self._chunks:
            yield from chunk.lines

    def _take_in(self, segment: Segment, text: NodeText) -> None:
        view = self._begin(segment, text)
        for records in segment.steps:
            if view.num_steps >= self._steps_per_record:
                self._append(view)
            if self._chunks[-1].is_full and not view.num_steps:
                self._begin_chunk(view)
            view.add_step(records)
        if view.num_steps:
            self._append(view)
        if segment.rest:
            view.apply(segment.rest)
            self._chunks[-1].lines.append(view.take_now()[1])
        self.is_cut = segment.is_cut

    def _begin(self, segment: Segment, text: NodeText) -> View:
        """Return the view at the beginning of a segment."""
        if self._view is None:
            self._snapshot: Snapshot = segment.snapshot
            # A bad snapshot is refused before anything is written.
            head_record(segment.snapshot, source="file", name="", first=0)
            self._view = View(State.from_snapshot(segment.snapshot, segment.after), text)
            self._begin_chunk(self._view)
        elif self._view.state.snapshot() != segment.snapshot:
            raise TraceError(f"the snapshot after step {segment.after} differs from its steps")
        return self._view

    def _begin_chunk(self, view: View) -> None:
        self._chunks.append(_Chunk(first=view.state.step, lines=[encode(view.key())]))
        while self._num_steps - self._chunks[0].num_steps >= self._max_steps:
            self.num_dropped += self._chunks[0].num_steps
            self._num_steps -= self._chunks.popleft().num_steps

    def _append(self, view: View) -> None:
        chunk = self._chunks[-1]
        chunk.num_steps += view.num_steps
        self._num_steps += view.num_steps
        _, line = view.take()
        chunk.num_bytes += len(line)
        chunk.lines.append(line)
