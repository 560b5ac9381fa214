"""Show an engine to a page between two steps: the new part of its log, and its counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mie.engine.engine import Engine
from mie.engine.watch.metrics import Snapshot, snapshot_of
from mie.events import EventLog, Segment, Step


@dataclass(frozen=True, kw_only=True)
class Look:
    """An engine at one moment between two steps."""

    segments: Sequence[Segment] | None
    """The log in memory, if some requested steps are missing."""
    steps: Sequence[Step]
    """The requested steps."""
    rest: Step
    """The records after the last step."""
    counts: Mapping[str, int]
    """Read from the scheduler and the allocator, not from the log."""
    metrics: Snapshot | None
    """The numbers of `/metrics`, if they were requested."""


def look_at(engine: Engine, after: int | None, *, with_metrics: bool = False) -> Look:
    """Return the log after a step. Without a step, and where the log has a hole, return it all.

    Call it in the engine's thread. It copies references to records, and computes nothing.
    """
    engine.recover()
    log = _log_of(engine)
    steps = None if after is None else log.since(after)
    return Look(
        segments=log.segments() if steps is None else None,
        steps=steps or (),
        rest=log.rest,
        counts=_counts(engine),
        metrics=snapshot_of(engine) if with_metrics else None,
    )


def tokens_of(
    engine: Engine, places: Mapping[int, tuple[str, int, int, int]]
) -> dict[int, tuple[int, ...]]:
    """Return tokens by the keys of ``places``: request id, choice, first position and end.

    Requests that have ended are left out.
    """
    found = {}
    for key, (request_id, index, start, end) in places.items():
        request = engine.request(request_id)
        if request is not None:
            found[key] = tuple(request.sequences[index].token_ids[start:end])
    return found


def numerics_of(engine: Engine) -> Mapping[str, str | int]:
    """Return the facts that select how numbers are rounded."""
    return _log_of(engine).numerics


def _log_of(engine: Engine) -> EventLog:
    assert isinstance(engine.log, EventLog), "an engine without an event log cannot be shown"
    return engine.log


def _counts(engine: Engine) -> dict[str, int]:
    scheduler, manager, memory = engine.scheduler, engine.scheduler.manager, engine.stats.memory
    return {
        "num_running": len(scheduler.running),
        "num_waiting": len(scheduler.waiting),
        "num_blocks_used": manager.num_used,
        "num_blocks_cached": manager.num_cached,
        "num_blocks_free": manager.num_available - manager.num_cached,
        "num_preemptions": engine.stats.num_preemptions,
        "num_hit_tokens": memory.num_hit_tokens + memory.num_partial_hit_tokens,
        "num_copies": memory.num_copies,
        "num_evicted": memory.num_evictions,
        "num_exported": memory.num_exported,
        "num_imported": memory.num_imported,
    }
