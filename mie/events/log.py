"""Keep the records that are emitted: the last steps in memory, all of them in a file."""

from __future__ import annotations  # array is not subscriptable at run time

import marshal
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TextIO

from mie.events.file import record_line, snapshot_line
from mie.events.vocabulary import Record, Segment, Snapshot, Step, Summary

SNAPSHOT_EVERY = 1000
"""Steps between two snapshots: few enough to replay, and many enough that snapshots cost little."""


@dataclass(eq=False, kw_only=True, slots=True)
class _PackedSegment:
    """A segment as bytes.

    They take a quarter of the memory of tuples, the garbage collector does not visit them, and one
    buffer for a thousand steps leaves no holes in the memory that steps allocate and free.
    """

    after: int
    snapshot: bytes
    steps: bytearray = field(default_factory=bytearray)
    numbers: array[int] = field(default_factory=lambda: array("q"))
    ends: array[int] = field(default_factory=lambda: array("q", [0]))

    def append(self, number: int, records: Step) -> None:
        self.steps += marshal.dumps(records)
        self.numbers.append(number)
        self.ends.append(len(self.steps))

    def since(self, step: int) -> list[Step]:
        """Return the steps after ``step``."""
        ends = self.ends[bisect_right(self.numbers, step) :]
        return [marshal.loads(self.steps[begin:end]) for begin, end in pairwise(ends)]

    def unpacked(self, rest: Step) -> Segment:
        snapshot, steps = marshal.loads(self.snapshot), tuple(self.since(self.after))
        return Segment(after=self.after, snapshot=snapshot, steps=steps, rest=rest)


class EventLog:
    """Collects records, keeps the last ``num_steps`` steps in memory, and writes all to ``file``.

    Memory holds whole segments of `SNAPSHOT_EVERY` steps. So it holds at least ``num_steps`` steps
    once that many have run, and less than two segments more. With 0 and no file nothing is kept.

    The opener of the file closes it, after the log. If writing fails, the error is raised once and
    nothing more is written. The file remains a readable beginning of a log.
    """

    def __init__(
        self,
        num_steps: int,
        file: TextIO | None = None,
        numerics: Mapping[str, str | int] | None = None,
    ) -> None:
        """Write ``numerics`` (`Backend.numerics`) with each snapshot in the file."""
        self._num_steps = num_steps
        self._file = file
        self.numerics = numerics or {}
        self._pending: list[Record] = []
        self.emit: Callable[[Record], None] = self._pending.append
        """Appends one record as fast as possible. It never changes during the log's life."""
        self._segments: deque[_PackedSegment] = deque()
        self._last = 0
        self._num_left = 0  # steps until the next snapshot
        self._take_snapshot: Callable[[], Snapshot] | None = None

    def start(self, take_snapshot: Callable[[], Snapshot], step: int = 0) -> None:
        """Begin with a snapshot after step ``step``. Later snapshots are taken at intervals.

        Earlier records are dropped, because the snapshot includes their effect.
        """
        self._pending.clear()
        self._take_snapshot = take_snapshot
        self._last = step
        self._begin_segment()

    def end_step(self, summary: Summary) -> None:
        """End a step with its summary.

        Raises:
            OSError: the file could not be written.
        """
        self._pending.append(("step", summary))
        records = tuple(self._pending)
        self._pending.clear()
        self._last = summary["step"]
        self._num_left -= 1
        if self._num_steps:
            self._segments[-1].append(self._last, records)
        if self._file is not None:
            self._write(record_line(self._last, record) for record in records)
        if self._num_left <= 0:
            self._begin_segment()

    def rebuilt(self) -> None:
        """Emit a record of the whole state, which was rebuilt from the requests' tokens."""
        assert self._take_snapshot is not None, "start the log first"
        self.emit(("rebuild", self._take_snapshot()))

    def segments(self) -> list[Segment]:
        """Return the segments in memory, oldest first."""
        last = len(self._segments) - 1
        return [
            segment.unpacked(self.rest if place == last else ())
            for place, segment in enumerate(self._segments)
        ]

    def since(self, step: int) -> list[Step] | None:
        """Return the steps after ``step``, or None unless all of them are in memory."""
        if not self._segments or not self._segments[0].after <= step <= self._last:
            return None
        found: list[Step] = []
        for segment in reversed(self._segments):
            found[:0] = segment.since(step)
            if segment.after <= step:
                break
        return found

    @property
    def rest(self) -> Step:
        """The records after the last step."""
        return tuple(self._pending)

    def close(self) -> None:
        """Write the records since the last step and stop writing. The memory is kept.

        Raises:
            OSError: the file could not be written.
        """
        if self._file is not None:
            self._write(record_line(self._last + 1, record) for record in self._pending)
        self._file = None

    def leave_file(self) -> None:
        """Stop writing to the file, because another process continues it. The memory is kept."""
        self._file = None

    def _begin_segment(self) -> None:
        self._num_left = SNAPSHOT_EVERY
        if not self._num_steps and self._file is None:
            return
        assert self._take_snapshot is not None, "start the log first"
        snapshot = self._take_snapshot()
        if self._num_steps:
            packed = _PackedSegment(after=self._last, snapshot=marshal.dumps(dict(snapshot)))
            self._segments.append(packed)
            self._drop_old_segments()
        if self._file is not None:
            numerics = {"numerics": dict(self.numerics)} if self.numerics else {}
            self._write([snapshot_line(self._last, {**snapshot, **numerics})])

    def _drop_old_segments(self) -> None:
        num_held = sum(len(segment.numbers) for segment in self._segments)
        while num_held - len(self._segments[0].numbers) >= self._num_steps:
            num_held -= len(self._segments.popleft().numbers)

    def _write(self, lines: Iterable[str]) -> None:
        assert self._file is not None
        text = "".join(lines)
        try:
            self._file.write(text)
            self._file.flush()
        except BaseException:
            self._file = None  # a log that ends early can be read, one with a hole cannot
            raise
