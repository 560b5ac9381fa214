"""Test the state that is rebuilt from an event log, and which records it refuses."""

import copy
from dataclasses import replace
from typing import Any

import pytest
from event_stories import (
    A1,
    EMPTY,
    EMPTY_STATES,
    REBUILT,
    STATES,
    STORY,
    A,
    B,
    C,
    D,
    E,
    run_toy,
    summary,
)
from tables import table

from mie.errors import TraceError
from mie.events import EventLog, Record
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


def test_blocks_are_counted() -> None:
    state = told(2)
    assert (state.blocks.num_used, state.blocks.num_cached, state.blocks.num_saved) == (5, 0, 1)
    assert state.fills() == {0: 4, 1: 3, 2: 4, 3: 1, 4: 3}
    state = told(3)
    assert (state.blocks.num_used, state.blocks.num_cached, state.blocks.num_saved) == (0, 4, 0)
    assert state.fills() == {0: 4, 1: 4, 2: 4, 4: 4}


def with_states(num_records: int = len(STATES)) -> State:
    """Return the state after some records of a story with states."""
    state = State.from_snapshot(EMPTY_STATES)
    for record in STATES[:num_records]:
        state.apply(record)
    return state


def test_slots_follow_their_owners() -> None:
    owned = [with_states(number).snapshot()["states"] for number in (4, 7, 10, 16)]
    assert [(each["running"], each["saved"], each["hosts"]) for each in owned] == [
        ({A: 2}, {}, {}),
        ({A: 2}, {0: 1}, {}),
        ({}, {0: 1}, {A: 0}),
        ({A: 0}, {0: 1}, {}),
    ]
    assert with_states().snapshot() == EMPTY_STATES
    for number in (0, 7, 10, 16):
        snapshot = with_states(number).snapshot()
        assert State.from_snapshot(snapshot).snapshot() == snapshot


@pytest.mark.parametrize(
    ("num_before", "record", "message"),
    [
        (3, ("state", A, 3), "there is no slot 3"),
        (4, ("state", A, 1), "it already has a slot"),
        (7, ("save", 0, 0), "it already has a snapshot"),
        (6, ("save", 0, 2), "slot 2 is in use"),
        (6, ("forget", 0), "it has no snapshot"),
        (8, ("save_host", A, 1), "the host has no slot 1"),
        (9, ("save_host", A, 0), "its state is already on the host"),
        (3, ("close", A), "it has no slot"),
        (8, ("drop", A), "its state is not on the host"),
        (3, ("step", summary(1)), "a running sequence has no slot"),
        (6, ("save", 1, 0), None),
    ],
)
def test_impossible_records_of_states(num_before: int, record: Record, message: str | None) -> None:
    state = with_states(num_before)
    if message is None:
        state.apply(record)
        record, message = ("step", summary(1)), "a block that is not in the tree"
    with pytest.raises(TraceError, match=message):
        state.apply(record)


def test_a_model_without_states_has_no_slots() -> None:
    with pytest.raises(TraceError, match="there are no states"):
        told(1).apply(("save", 0, 0))


# Impossible records.


def named(value: Any) -> Any:
    """Return a value of JSON as a record has it: sequences by their names, and tuples."""
    if isinstance(value, str):
        return SEQUENCES.get(value, value)
    return tuple(map(named, value)) if isinstance(value, list) else value


SEQUENCES = {"A": A, "A1": A1, "B": B, "C": C, "D": D, "E": E}
IMPOSSIBLE: list[tuple[tuple[int, int], Record, str]] = [
    *named(table("event_logs", "impossible records")),
    ((2, 0), ("rebuild", {**EMPTY, "num_blocks": 9}), "the sizes of the pools cannot change"),
    ((2, 0), ("rebuild", told(2).snapshot()), "a sequence is running or has blocks"),
    ((2, 0), ("rebuild", {**EMPTY, **REBUILT, "waiting": [C]}), "queues do not match"),
    ((2, 0), ("step", summary(2)), "step 2 comes too late"),
]
"""Cases of (steps of the story, records of the next one, the wrong record, the error)."""


@pytest.mark.parametrize(("told_until", "record", "message"), IMPOSSIBLE)
def test_impossible_records_are_refused(told_until, record, message) -> None:
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
        ({"refs": {**told(2).snapshot()["refs"], 0: 2}}, "block 0 has only 2 references"),
        ({"refs": {0: 3}}, "block . has 0 references"),
        ({"running": [A, B, A1]}, "queues"),
        ({"waiting": [A]}, "queues"),
        ({"running": [A, A1]}, "queues"),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_refused(change, message) -> None:
    with pytest.raises(TraceError, match=message):
        State.from_snapshot({**told(2).snapshot(), **change})


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


def test_an_abandoned_step_does_not_exist() -> None:
    log = EventLog(10)
    log.start(lambda: EMPTY)
    for step in (1, 3):
        log.end_step(summary(step))
    with pytest.raises(TraceError, match="step 2 is not in the log; it was abandoned"):
        at(log.segments(), 2)


def test_a_walk_compares_the_snapshots_on_its_way() -> None:
    log = EventLog(5000)
    run_toy(log, 2500)
    first, second, third = log.segments()
    assert len(list(walk([first, second, third]))) > 5000
    wrong = replace(second, snapshot=first.snapshot)
    with pytest.raises(TraceError, match="the snapshot after step 1000 differs"):
        list(walk([first, wrong, third]))
