"""Check that a page that only assigns cells shows the replay's own state after every step.

The runs are those of test_replay.py. Merged steps, keys in the middle and the order of eviction are
checked in the same runs.
"""

import json
import marshal
from collections import Counter

import pytest
from event_stories import EMPTY_STATES, REBUILD, STATES, STORY, WINDOWS, write_story
from hypothesis import given
from hypothesis import strategies as st
from page_cells import Page, cells_of
from rare import check_until_seen
from test_replay import new_run, runs

from mie.events import FIELDS, read_log
from mie.events.replay import State, walk
from mie.page import recording as stream_of_log
from mie.page.cells import NodeText
from mie.page.follow import Follower
from mie.page.recording import Recording
from mie.page.view import Heat, View

seen: Counter[str] = Counter()


def check_eviction_order(path):
    """The evicted block must be the first of the idle leaves in the order of their cells."""
    heat = state = None
    last = None
    for _, record, now in walk(read_log(path)):
        if heat is None:
            heat, state = Heat(now), now
        else:
            heat.after(last, state)
        if record[0] == "evict":
            tree = now.blocks.tree
            inner = {node.parent for node in tree.values()}
            cells = {int(block): cell for block, cell in heat.cells().items()}
            idle = [(cells[b][1], b) for b in tree if cells[b][1] is not None and b not in inner]
            assert record[1] == min(idle)[1]
            seen["evicted"] += 1
        heat.before(record, now)
        last = record


def check_recording(segment, steps_per_record):
    """A page that reads a recorded run must show the state after each record."""
    text = NodeText(lambda ids: "".join(map(str, ids)))
    state, steps, page = State.from_snapshot(segment.snapshot), iter(segment.steps), Page()
    recording = Recording([segment], text, steps_per_record=steps_per_record)
    for record in map(json.loads, recording.lines("a run")):
        page.take(record)
        seen[record["record"]] += 1
        for _ in record.get("steps", ()):
            state.apply_step(next(steps))
        if record["record"] == "now":
            state.apply_step(segment.rest)
        if record["record"] != "head":
            assert page.step == state.step
            assert page.cells() == cells_of(state, text)
            assert page.heat.keys() == page.tree.keys()
    assert page.step == segment.last


def sent(*message):
    """A message as the other process reads it."""
    return marshal.loads(marshal.dumps(message))


def check_follower(segment, text, splits):
    """A page that follows the log while it grows must show every state, with the last events.

    It follows as the server's child process does, with the same messages.
    """
    steps, page, state = segment.steps, Page(), State.from_snapshot(segment.snapshot)
    follower = Follower()
    follower.begin(segment.after, *sent(segment.snapshot, ()), "live", "one")  # type: ignore[call-arg]
    page.take(json.loads(follower.key()))
    coming, done, shown = iter(steps), 0, 0
    for count, part in splits:
        new, done = steps[done : done + count], min(done + count, len(steps))
        part = shown = part if new else max(part, shown)  # the last events only grow
        following = steps[done] if done < len(steps) else segment.rest
        rest = following[: min(part, len(following) - (done < len(steps)))]
        step, lines = follower.follow(*sent(new, rest), {})  # type: ignore[call-arg]
        for kind, line in lines:
            record = json.loads(line)
            assert kind == record["record"]
            page.take(record)
            if kind == "steps":
                for _ in record["steps"]:
                    state.apply_step(next(coming))
                assert page.cells() == cells_of(state, text)
        if rest:
            late = State.from_snapshot(state.snapshot(), state.step)
            late.apply_step(rest)
            assert page.cells() == cells_of(late, text)
        assert page.heat == json.loads(follower.key())["heat"]
        assert page.step == step
        seen["follower"] += 1


@given(
    **runs(12, 4),
    steps_per_record=st.sampled_from([1, 1, 2, 5]),
    splits=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4)), min_size=1, max_size=3),
)
def check_run(
    path, config, arrivals, spare, num_host_blocks, window, steps_per_record, splits, **accidents
):
    with path.open("w") as file:
        run = new_run(file, config, arrivals, spare, num_host_blocks, window)
        for _ in run.drive(arrivals, **accidents):
            pass
        run.add([0], 1, 1, 0, None)  # a record after the last step
        run.log.close()
    check_eviction_order(path)
    [segment] = read_log(path)
    check_recording(segment, steps_per_record)
    check_follower(segment, NodeText(shows_tokens=False), splits)


def test_a_page_that_assigns_cells_shows_the_state_of_the_replay(tmp_path, monkeypatch):
    monkeypatch.setattr(stream_of_log, "STEPS_PER_KEY", 5)
    wanted = dict.fromkeys(("key", "steps", "now", "evicted", "follower"), 10)
    check_until_seen(lambda check: check(tmp_path / "trace.jsonl"), check_run, seen, wanted)


@pytest.mark.parametrize("steps_per_record", [1, 3, 100])
def test_every_kind_of_record_becomes_cells(tmp_path, steps_per_record):
    path = write_story(tmp_path / "story.jsonl", [*STORY, WINDOWS, REBUILD])
    [segment] = read_log(path)
    check_recording(segment, steps_per_record)
    kinds = {kind for records in segment.steps for kind, *_ in records}
    states = [STATES[:7], STATES[7:]]  # after the first step there are a state and a snapshot
    [segment] = read_log(write_story(tmp_path / "states.jsonl", states, EMPTY_STATES))
    check_recording(segment, steps_per_record)
    kinds |= {kind for records in segment.steps for kind, *_ in records}
    assert kinds == FIELDS.keys()


def test_a_node_that_was_read_from_a_disk_says_so():
    state = State(block_size=2, num_blocks=4, num_host_blocks=4)
    view = View(state, NodeText())
    seq, other = (0, 0), (1, 0)
    view.apply([("add", "a", 0, 0, 3, 1, 9), ("read", seq, (0,), 2), ("admit", seq, 0, 3, 2)])
    view.apply([("alloc", seq, 0, (0, 1)), ("import", seq, (0,), (0,))])
    view.apply([("prefill", seq, 2, 1, (0,)), ("seal", 0, None, None, (5, 6))])
    view.apply([("decode", (0,)), ("seal", 1, 0, None, (7, 8))])
    assert view.heat.cells() == {"0": [0, None, 1], "1": [0, None]}
    view.apply([("close", seq), ("finish", seq, "stop"), ("evict", 1), ("evict", 0)])
    view.apply([("add", "b", 1, 0, 2, 1, 9), ("read", other, (0,), 2), ("drop", other)])
    view.apply([("admit", other, 0, 2, 0), ("alloc", other, 0, (0, 1))])
    view.apply([("prefill", other, 0, 2, (0,)), ("seal", 0, None, None, (5, 6))])
    assert view.heat.cells() == {"0": [0, None]}


def test_a_node_that_came_back_from_the_host_is_not_from_a_disk():
    state, seq = State(block_size=2, num_blocks=4, num_host_blocks=4), (0, 0)
    view = View(state, NodeText())
    view.apply([("add", "a", 0, 0, 3, 1, 9), ("admit", seq, 0, 3, 0), ("alloc", seq, 0, (0, 1))])
    view.apply([("prefill", seq, 0, 3, (0,)), ("export", seq, (1, 2)), ("close", seq)])
    view.apply([("preempt", seq, None, "swap", "last", 0), ("resume", seq, 0, 4, 3, "swap")])
    view.apply([("alloc", seq, 0, (2, 3)), ("import", seq, (1, 2), (2, 3))])
    view.apply([("decode", (0,)), ("seal", 2, None, None, (5, 6))])
    assert view.heat.cells() == {"2": [0, None]}
