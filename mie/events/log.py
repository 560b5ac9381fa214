"""Keep the records that are emitted: the last steps in memory, all of them in a file."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TextIO

from mie.events.file import record_line, snapshot_line
from mie.events.vocabulary import Record, Segment, Snapshot, Step, Summary, summary_of

SNAPSHOT_EVERY = 1000
"""Steps between two snapshots: few enough to replay, and many enough that snapshots cost little."""


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
        self._numerics = {} if numerics is None else {"numerics": dict(numerics)}
        self._pending: list[Record] = []
        self.emit: Callable[[Record], None] = self._pending.append
        """Appends one record as fast as possible. It never changes during the log's life."""
        self._segments: deque[Segment] = deque()
        self._steps: list[Step] = []  # those of the last segment
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
        """End a step with its summary. The mapping is kept, not copied.

        Raises:
            OSError: the file could not be written.
        """
        self._pending.append(("step", summary))
        records = tuple(self._pending)
        self._pending.clear()
        self._last = summary["step"]
        self._num_left -= 1
        if self._num_steps:
            self._steps.append(records)
        if self._file is not None:
            self._write(record_line(self._last, record) for record in records)
        if self._num_left <= 0:
            self._begin_segment()

    def segments(self) -> list[Segment]:
        """Return the segments in memory, oldest first."""
        segments = [replace(segment, steps=tuple(segment.steps)) for segment in self._segments]
        if segments:
            segments[-1] = replace(segments[-1], rest=tuple(self._pending))
        return segments

    def since(self, step: int) -> list[Step] | None:
        """Return the steps after ``step``, or None unless all of them are in memory."""
        if not self._segments or not self._segments[0].after <= step <= self._last:
            return None
        found: list[Step] = []
        for segment in reversed(self._segments):
            num_before = bisect_right(segment.steps, step, key=_number_of)
            found[:0] = segment.steps[num_before:]
            if num_before or segment.after <= step:
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
        """Stop writing to the file, which another process goes on with. The memory is kept."""
        self._file = None

    def _begin_segment(self) -> None:
        self._num_left = SNAPSHOT_EVERY
        if not self._num_steps and self._file is None:
            return
        assert self._take_snapshot is not None, "start the log first"
        snapshot = self._take_snapshot()
        if self._num_steps:
            self._steps = []
            self._segments.append(Segment(after=self._last, snapshot=snapshot, steps=self._steps))
            self._drop_old_segments()
        if self._file is not None:
            self._write([snapshot_line(self._last, {**snapshot, **self._numerics})])

    def _drop_old_segments(self) -> None:
        num_held = sum(len(segment.steps) for segment in self._segments)
        while num_held - len(self._segments[0].steps) >= self._num_steps:
            num_held -= len(self._segments.popleft().steps)

    def _write(self, lines: Iterable[str]) -> None:
        assert self._file is not None
        text = "".join(lines)
        try:
            self._file.write(text)
            self._file.flush()
        except BaseException:
            self._file = None  # a log that ends early can be read, one with a hole cannot
            raise


def _number_of(step: Step) -> int:
    return int(summary_of(step)["step"])
