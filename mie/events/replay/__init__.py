"""Rebuild queues and blocks at any step from the event log.

This room handles records and snapshots, and calls neither the scheduler nor the allocator. When its
state equals their snapshots, the records are complete. So it is strict and refuses records that
cannot have happened.
"""

from collections.abc import Iterable, Iterator

from mie.errors import TraceError
from mie.events import Record, Segment, Summary, summary_of
from mie.events.replay.blocks import NodeState
from mie.events.replay.sequence import SequenceState
from mie.events.replay.state import State

__all__ = ["NodeState", "SequenceState", "State", "at", "walk"]


def at(segments: Iterable[Segment], step: int) -> State:
    """Return the state after ``step``, from the segments of `EventLog.segments` or `read_log`.

    Raises:
        TraceError: the step is not in the log, or a record before it is invalid.
    """
    first = last = None
    for segment in segments:
        first, last = segment.after if first is None else first, segment.last
        if not segment.after <= step <= last:
            continue
        state = State.from_snapshot(segment.snapshot, segment.after)
        for records in segment.steps:
            if state.step == step:
                break
            state.apply_step(records)
        if state.step == step:
            return state
    if first is None or last is None:
        raise TraceError(f"step {step} is not in the log, which is empty")
    why = "it was abandoned" if first < step < last else f"it holds steps {first} to {last}"
    raise TraceError(f"step {step} is not in the log; {why}")


def walk(segments: Iterable[Segment]) -> Iterator[tuple[Summary | None, Record, State]]:
    """Yield every record with its step's summary and the state before it.

    The summary is None after the last step. The state is one object that changes during the walk.

    Raises:
        TraceError: a record is invalid or names something unknown, or a snapshot differs from the
            state that the records give.
    """
    state: State | None = None
    for segment in segments:
        if state is None:
            state = State.from_snapshot(segment.snapshot, segment.after)
        elif state.snapshot() != segment.snapshot:
            raise TraceError(f"the snapshot after step {segment.after} differs from its steps")
        for records in segment.steps:
            for record in records:
                state.check_names(record)
                yield summary_of(records), record, state
                state.apply(record)
        for record in segment.rest:
            state.check_names(record)
            yield None, record, state
            state.apply(record)
