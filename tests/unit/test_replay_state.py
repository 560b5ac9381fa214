"""Test the state that is rebuilt from an event log, and which records it refuses."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from event_stories import (
    A1,
    AFTER_STORY,
    BEAMS,
    EMPTY,
    REBUILD,
    REBUILT,
    STORY,
    A,
    B,
    C,
    D,
    E,
    F,
    run_toy,
    summary,
    tell,
    write_story,
)

from mie.errors import TraceError
from mie.events import EventLog, Record, Segment, read_log
from mie.events.replay import State, at, walk


def told(num_steps: int = len(STORY), more: int = 0) -> State:
    """Return the state after some steps of the story, and some records of the next step."""
    state = State.from_snapshot(EMPTY)
    for step, records in enumerate(STORY[:num_steps], 1):
        state.apply_step((*records, ("step", summary(step))))
    if more:
        state.apply_step(tuple(STORY[num_steps][:more]))
    return state


# Effects of records.


@pytest.mark.parametrize("step", AFTER_STORY)
def test_the_state_after_a_step_of_the_story(step: int) -> None:
    state = told(step)
    assert state.step == step
    assert state.snapshot() == {**EMPTY, **AFTER_STORY[step]}


@pytest.mark.parametrize("step", range(len(STORY) + 1))
def test_a_snapshot_gives_its_state_back(step: int) -> None:
    snapshot = told(step).snapshot()
    before = copy.deepcopy(snapshot)
    state = State.from_snapshot(snapshot, step)
    assert state.snapshot() == before
    assert state.step == step
    for number, records in enumerate(STORY[step:], step + 1):
        state.apply_step((*records, ("step", summary(number))))
    assert state.snapshot() == told().snapshot()
    assert snapshot == before, "the snapshot was changed"


def test_a_rebuild_resets_the_state() -> None:
    state = told()
    state.apply_step((*REBUILD, ("step", summary(7))))
    assert state.snapshot() == {**EMPTY, **REBUILT}


def test_a_kept_sequence_lends_its_blocks_until_it_is_closed() -> None:
    before, state = told(), told()
    for count, record in enumerate(BEAMS, 1):
        state.apply(record)
        if count == 6:
            assert (state.waiting, state.running) == ([B, F], [C])
            assert state.sequences[E].is_kept
            assert state.fills()[6] == 2
            assert State.from_snapshot(state.snapshot()).snapshot() == state.snapshot()
    assert state.snapshot() == before.snapshot()


@pytest.mark.parametrize(
    ("count", "record", "message"),
    [
        (6, ("branch", F, C, 1), r"\(2, 0\) is not kept"),
        (6, ("branch", C, E, 1), "it does not wait"),
        (6, ("branch", F, E, 0), "row 0 is taken"),
        (6, ("keep", E), "is not running"),
        (13, ("finish", E, "length"), "its table is still open"),
    ],
)
def test_invalid_records_of_a_kept_sequence_are_refused(
    count: int, record: Record, message: str
) -> None:
    state = told()
    for each in BEAMS[:count]:
        state.apply(each)
    with pytest.raises(TraceError, match=message):
        state.apply_step((record, ("step", summary(7))))


def test_lists_are_accepted_like_tuples() -> None:
    """Emitters may pass lists, and a file gives tuples."""
    state = State.from_snapshot(EMPTY)
    for records in STORY:
        for record in records:
            seqs = (A, A1, B, C, D, (3, 1))
            state.apply(
                tuple(
                    list(value) if isinstance(value, tuple) and value not in seqs else value
                    for value in record
                )
            )
    assert state.snapshot() == told().snapshot()


def test_blocks_are_counted() -> None:
    state = told(2)
    assert (state.blocks.num_used, state.blocks.num_cached, state.blocks.num_saved) == (5, 0, 1)
    assert state.fills() == {0: 4, 1: 3, 2: 4, 3: 1, 4: 3}
    state = told(3)
    assert (state.blocks.num_used, state.blocks.num_cached, state.blocks.num_saved) == (0, 4, 0)
    assert state.fills() == {0: 4, 1: 4, 2: 4, 4: 4}


def test_queues_are_in_the_order_of_rank_then_number_then_choice() -> None:
    state = State.from_snapshot(EMPTY)
    for number, rank in ((0, 5), (1, -1), (2, 5), (3, 0)):
        state.apply(("add", str(number), number, rank, 1, 2, None))
    assert state.waiting == [(1, 0), (3, 0), (0, 0), (2, 0)]
    for row, number in enumerate((0, 1)):
        state.apply(("admit", (number, 0), row, 1, 0))
        state.apply(("alloc", (number, 0), 0, (row,)))
        state.apply(("prefill", (number, 0), 0, 1, (0, 1)))
    state.apply(("fork", (0, 1), (0, 0), 2))
    assert state.running == [(1, 0), (0, 0), (0, 1)]
    assert state.waiting == [(3, 0), (2, 0)]


def test_pins_of_a_snapshot_are_known() -> None:
    state = told(3, more=9)
    assert state.blocks.refs[4] == 2
    state = State.from_snapshot(state.snapshot(), 3)
    state.apply(("unpin", 4))
    assert state.blocks.refs[4] == 1
    with pytest.raises(TraceError, match="it is not pinned"):
        state.apply(("unpin", 4))


# Impossible records.


IMPOSSIBLE: list[tuple[tuple[int, int], Record, str]] = [
    ((2, 0), ("sneeze", A), "unknown event"),
    ((2, 0), ("add", "a", 0, 0, 6, 2, 3), "it already exists"),
    ((3, 0), ("admit", A, 0, 6, 0), r"unknown sequence \(0, 0\)"),
    ((2, 0), ("admit", A, 5, 8, 0), "it is already running"),
    ((3, 0), ("admit", B, 5, 5, 0), "it has 6 tokens"),
    ((3, 0), ("admit", B, 5, 6, 6), "it has no token to compute"),
    ((4, 1), ("admit", D, 0, 4, 0), "row 0 is taken"),
    ((3, 0), ("resume", B, 0, 6, 0, "recompute"), "it was preempted in another mode"),
    ((4, 6), ("resume", C, 1, 8, 0, "swap"), "it was preempted in another mode"),
    ((3, 6), ("hit", C, 7, 4, 1, 4), "6 tokens were hits"),
    ((3, 6), ("hit", C, 5, 4, 2, 4), "more tokens were hits than were queried"),
    ((3, 6), ("hit", C, 7, 4, 2, 7), "the source has no holder"),
    ((3, 0), ("prefill", B, 0, 6, (0,)), r"\(1, 0\) is not running"),
    ((1, 0), ("prefill", B, 2, 3, (0,)), "it has computed 3 tokens"),
    ((1, 0), ("prefill", B, 3, 2, ()), "the prompt is not complete"),
    ((1, 0), ("prefill", B, 3, 1, (0,)), "the prompt is not complete"),
    ((1, 0), ("prefill", B, 3, 3, ()), "it has too few tokens"),
    ((1, 0), ("prefill", B, 3, 0, ()), "no token was computed"),
    ((0, 3), ("prefill", A, 0, 6, (0, 1)), "its table has 0 slots"),
    ((2, 0), ("decode", (0, 3)), "unknown row 3"),
    ((1, 0), ("decode", (0, 1)), "row 1 has more to compute"),
    ((5, 0), ("decode", (0,)), "its table has 8 slots"),
    ((0, 7), ("fork", B, A, 1), "it already exists|row 1 is taken"),
    ((0, 7), ("fork", (0, 2), A, 2), "it is not a choice of that request"),
    ((0, 7), ("fork", (2, 1), A, 2), "it is not a choice of that request"),
    ((0, 7), ("fork", A1, A, 1), "row 1 is taken"),
    ((3, 0), ("fork", (1, 1), B, 2), "is not running"),
    ((2, 0), ("preempt", B, A, "recompute", "last arrived", 5), "its table is still open"),
    ((2, 0), ("preempt", B, A, "swap", "last arrived", 0), "its host blocks contradict that"),
    ((2, 2), ("preempt", B, C, "swap", "last arrived", 0), "unknown request number"),
    ((3, 0), ("preempt", B, None, "swap", "last arrived", 0), "is not running"),
    ((2, 0), ("finish", A, "stop"), "its table is still open"),
    ((3, 0), ("finish", A, "abort"), "unknown sequence"),
    ((3, 0), ("finish", A1, "length"), "unknown sequence"),
    ((3, 0), ("finish", A1, "abort"), "unknown sequence"),
    ((0, 7), ("wait", A, A), "it already exists"),
    ((0, 7), ("wait", (0, 2), A), "it is not a choice of that request"),
    ((0, 7), ("wait", (1, 1), A), "it is not a choice of that request"),
    ((3, 0), ("wait", A1, A), "unknown sequence"),
    ((2, 0), ("rebuild", {**EMPTY, "num_blocks": 9}), "the sizes of the pools cannot change"),
    ((2, 0), ("rebuild", {**EMPTY, **AFTER_STORY[2]}), "a sequence is running or has blocks"),
    ((2, 0), ("rebuild", {**EMPTY, **REBUILT, "waiting": [C]}), "queues do not match"),
    ((3, 0), ("finish", B, "abort"), "it still has host blocks"),
    ((2, 0), ("alloc", A, 2, (0,)), "block 0 was in use"),
    ((2, 0), ("alloc", A, 2, (5, 5)), "block 5 was in use"),
    ((2, 0), ("alloc", A, 3, (5,)), "its table has 2 blocks"),
    ((2, 0), ("alloc", A, 2, (8,)), "there is no block 8"),
    ((2, 0), ("alloc", A, 2, (-1,)), "there is no block -1"),
    ((3, 0), ("alloc", B, 0, (5,)), "is not running"),
    ((2, 0), ("share", A, 2, (5,)), "block 5 has no holder"),
    ((2, 0), ("release", A, (5,)), "block 5 has no holder"),
    ((3, 0), ("release", B, (0,)), "is not running"),
    ((3, 0), ("close", B), "is not running"),
    ((0, 7), ("keep", (3, 0)), r"unknown sequence \(3, 0\)"),
    ((2, 0), ("copy", 1, 1, A, "fork"), "the target is not in its table"),
    ((2, 0), ("copy", 7, 4, A, "fork"), "the source has no holder"),
    ((2, 0), ("seal", 5, None, None, (1, 2, 3, 4)), "it is in no table"),
    ((2, 0), ("seal", 0, None, None, (1, 2, 3, 4)), "it is already in the tree"),
    ((2, 0), ("seal", 4, 3, None, (1, 2, 3, 4)), "its parent is not in the tree"),
    ((2, 0), ("seal", 4, 0, None, (1, 2, 3)), "only a full block enters the tree"),
    ((3, 0), ("evict", 3), "it is not in the tree"),
    ((3, 0), ("evict", 0), "it is not a leaf"),
    ((2, 0), ("pin", 7), "it has no holder"),
    ((2, 0), ("unpin", 0), "it is not pinned"),
    ((2, 1), ("export", B, (2, 3)), "it already has host blocks"),
    ((2, 0), ("export", B, (0, 1, 2)), "its table has too few blocks"),
    ((2, 1), ("export", A, (1, 2)), "a host block is in use"),
    ((2, 0), ("export", A, (2, 2)), "a host block is in use"),
    ((2, 0), ("export", A, (4,)), "unknown host block"),
    ((3, 0), ("export", B, (2,)), "is not running"),
    ((3, 4), ("import", B, (2,), (3,)), "the host blocks belong to another sequence"),
    ((3, 4), ("import", B, (0, 1), (3,)), "the table cannot hold that many host blocks"),
    ((3, 4), ("import", B, (1,), (4,)), "the blocks are not in its table"),
    ((2, 0), ("drop", A), "it has no host blocks"),
    ((2, 0), ("step", summary(2)), "step 2 comes too late"),
]
"""Cases of (steps of the story, records of the next one, the wrong record, the error)."""


@pytest.mark.parametrize(("told_until", "record", "message"), IMPOSSIBLE)
def test_impossible_records_are_refused(
    told_until: tuple[int, int], record: Record, message: str
) -> None:
    state = told(*told_until)
    with pytest.raises(TraceError, match=message) as caught:
        state.apply(record)
    assert str(caught.value).startswith(f"after step {state.step}: {record[0]}")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([("release", A, (0,))], "block 0 has 2 references, not 3"),
        ([("alloc", A, 1, (5,))], "block 4 has 1 references, not 0"),
        ([("evict", 2), ("release", A, (3,))], "block 3 has 0 references, not 1"),
    ],
)
def test_references_must_add_up_when_the_step_ends(records: list[Record], message: str) -> None:
    state = told(2)
    state.apply_step(tuple(records))
    with pytest.raises(TraceError, match=message):
        state.apply(("step", summary(3)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"refs": {**AFTER_STORY[2]["refs"], 0: 2}}, "block 0 has only 2 references"),
        ({"refs": {0: 3}}, "block . has 0 references"),
        ({"running": [A, B, A1]}, "queues"),
        ({"waiting": [A]}, "queues"),
        ({"running": [A, A1]}, "queues"),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        State.from_snapshot({**EMPTY, **AFTER_STORY[2], **change})


# Going through a log.


def test_any_step_of_a_log_can_be_restored() -> None:
    log = EventLog(2500)
    snapshots = run_toy(log, 5100)
    first = log.segments()[0].after
    assert first > 0
    for step in (first, first + 1, first + 999, first + 1000, first + 1001, 5099, 5100):
        state = at(log.segments(), step)
        assert state.step == step
        assert state.snapshot() == snapshots[step]
    for step in (first - 1, -1, 5101):
        with pytest.raises(
            TraceError, match=f"step {step} is not in the log; it holds steps {first} to 5100"
        ):
            at(log.segments(), step)


def test_any_step_of_a_file_can_be_restored(tmp_path: Path) -> None:
    path = write_story(tmp_path / "log")
    for step in AFTER_STORY:
        assert at(read_log(path), step).snapshot() == {**EMPTY, **AFTER_STORY[step]}


def test_an_abandoned_step_does_not_exist() -> None:
    log = EventLog(10)
    log.start(lambda: EMPTY)
    for step in (1, 3):
        log.end_step(summary(step))
    with pytest.raises(TraceError, match="step 2 is not in the log; it was abandoned"):
        at(log.segments(), 2)


def test_an_empty_log_has_no_step() -> None:
    with pytest.raises(TraceError, match="step 0 is not in the log, which is empty"):
        at(EventLog(0).segments(), 0)


def test_a_walk_meets_every_record_before_it_is_applied() -> None:
    log = EventLog(10)
    tell(log)
    log.emit(("evict", 2))
    met = []
    for numbers, record, state in walk(log.segments()):
        met.append(record)
        assert numbers is None or numbers["step"] == state.step + 1
        if record == ("decode", (0, 2)):
            assert state.rows[2] == A1
    [segment] = log.segments()
    assert met == [record for step in [*segment.steps, segment.rest] for record in step]
    assert met[-1] == ("evict", 2)
    assert numbers is None


def test_a_walk_compares_the_snapshots_on_its_way() -> None:
    log = EventLog(5000)
    run_toy(log, 2500)
    first, second, third = log.segments()
    assert len(list(walk([first, second, third]))) > 5000
    wrong = replace(second, snapshot=first.snapshot)
    with pytest.raises(TraceError, match="the snapshot after step 1000 differs"):
        list(walk([first, wrong, third]))


def test_a_step_is_applied_once_only() -> None:
    log = EventLog(10)
    tell(log)
    [segment] = log.segments()
    twice = Segment(after=0, snapshot=EMPTY, steps=(segment.steps[0], segment.steps[0]))
    with pytest.raises(TraceError, match="after step 1: add a 0 0 6 2 3: it already exists"):
        list(walk([twice]))
