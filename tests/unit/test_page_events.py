"""The rows and events of steps, and which steps of a live stream have records of their own."""

import json

import pytest
from event_stories import STORY, write_story

from mie.events import SUMMARY_FIELDS, read_log, summary_of
from mie.events.page.follow import MAX_SPLIT, Follower
from mie.events.page.records import COLUMNS, event_of, row_of
from mie.events.replay import State


@pytest.fixture
def segment(tmp_path):
    [segment] = read_log(write_story(tmp_path / "story.jsonl", [*STORY, *[[]] * MAX_SPLIT]))
    return segment


def test_a_row_has_the_numbers_of_its_step(segment):
    num_admitted = num_hits = 0
    for records in segment.steps:
        summary = {**summary_of(records), "num_copies": 1234, "seconds": 1 / 3, "start": 98765.4321}
        row = json.loads(row_of((*records[:-1], ("step", summary))))
        admitted = sum(record[3] for record in records if record[0] == "admit")
        hits = sum(record[3] + record[4] for record in records if record[0] == "hit")
        numbers = [round(summary[name], 6) for name in SUMMARY_FIELDS]
        assert row == [*numbers, admitted, hits]
        assert len(row) == len(COLUMNS)
        num_admitted, num_hits = num_admitted + admitted, num_hits + hits
    assert num_admitted > 0
    assert num_hits > 0


@pytest.mark.parametrize(
    ("record", "event"),
    [
        (("decode", (1, 0)), ["decode", ["12.3", "7.0"]]),
        (("decode", ()), ["decode", []]),
        (("prefill", (7, 0), 8, 5, (0, 1)), ["prefill", "7.0", 8, 5, [0, 1]]),
        (("fork", (7, 1), (7, 0), 2), ["fork", "7.1", "7.0", 2]),
        (("finish", (7, 0), 'a "stop"'), ["finish", "7.0", 'a "stop"']),
        (("rebuild", {}), ["rebuild"]),
    ],
)
def test_an_event_is_its_record_in_json(record, event):
    state = State(block_size=4, num_blocks=8, num_host_blocks=0)
    state.rows.update({0: (7, 0), 1: (12, 3)})
    found = event_of(record, state)
    assert found is not None
    assert json.loads(found) == event


@pytest.mark.parametrize(
    ("num_steps", "sizes"),
    [(0, []), (1, [1]), (5, [1] * 5), (6, [2] * 3), (25, [5] * 5), (26, [26])],
)
def test_more_steps_are_merged(segment, num_steps, sizes):
    follower = Follower()
    follower.begin(0, segment.snapshot, (), "live")
    _, lines = follower.follow(segment.steps[:num_steps], (), {})
    assert [len(json.loads(line)["steps"]) for _, line in lines] == sizes
