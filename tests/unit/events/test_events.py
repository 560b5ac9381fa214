"""Test the event log: its ring in memory, and its file."""

import json
import re
from pathlib import Path

import pytest
from event_stories import (
    EMPTY,
    REBUILD,
    STATES,
    STORY,
    WINDOWS,
    run_toy,
    summary,
    tell,
    write_story,
)
from tables import table

from mie.errors import TraceError
from mie.events import FIELDS, SNAPSHOT_EVERY, EventLog, Segment, read_log, summary_of


def numbers_of(segment: Segment) -> list[int]:
    return [summary_of(step)["step"] for step in segment.steps]


# The vocabulary.


def test_the_story_has_every_kind_and_all_its_fields() -> None:
    records = [record for records in [*STORY, WINDOWS, STATES, REBUILD] for record in records]
    assert {record[0] for record in records} | {"step"} == FIELDS.keys()
    assert all(len(record) == 1 + len(FIELDS[record[0]]) for record in records)


def test_the_docs_have_the_same_table() -> None:
    page = Path(__file__).parents[3] / "docs" / "tracing.md"
    rows = [
        line.split("|")[1:3] for line in page.read_text().splitlines() if line.startswith("| `")
    ]
    documented = {
        kind: tuple(fields.strip(" `").split())
        for kinds, fields in rows
        for kind in re.findall(r"`(\w+)`", kinds)
    }
    assert documented == FIELDS


# In memory.


@pytest.mark.parametrize("num_steps", [1, 500, 1000, 1001, 2500])
def test_the_ring_drops_whole_old_segments(num_steps: int) -> None:
    for total in (999, 1000, 2000, 5999):
        log = EventLog(num_steps)
        snapshots = run_toy(log, total)
        segments = log.segments()
        held = [number for segment in segments for number in numbers_of(segment)]
        assert held == list(range(total - len(held) + 1, total + 1))
        assert min(total, num_steps) <= len(held) < num_steps + 2 * SNAPSHOT_EVERY
        for segment in segments:
            assert segment.after % SNAPSHOT_EVERY == 0
            assert segment.snapshot == snapshots[segment.after]


# In a file.


def test_a_line_is_small_and_names_its_fields(tmp_path: Path) -> None:
    lines = write_story(tmp_path / "log").read_text().splitlines()
    assert lines[0] == (
        '{"step":0,"event":"snapshot","version":1,"block_size":4,"num_blocks":8,'
        '"num_host_blocks":4,"waiting":[],"running":[],"sequences":[],"refs":[],"tree":[]}'
    )
    assert lines[4] == '{"step":1,"event":"alloc","seq":[0,0],"index":0,"blocks":[0,1]}'
    numbers = summary(1, num_decode_tokens=1, num_blocks_used=4, num_blocks_saved=1)
    assert json.loads(lines[1 + len(STORY[0])]) == {**numbers, "event": "step"}


def test_the_file_equals_the_log_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        log = EventLog(100, file)
        tell(log)
        log.emit(("evict", 2))
        in_memory = log.segments()
        log.close()
    assert list(read_log(path)) == in_memory
    assert in_memory[-1].rest == (("evict", 2),)


def test_a_long_file_has_a_snapshot_every_thousand_steps(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        log = EventLog(10_000, file)
        run_toy(log, 2500)
        log.close()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "snapshot"] == [0, 1000, 2000]
    assert list(read_log(path)) == log.segments()


def test_any_text_survives_a_round_trip(tmp_path: Path) -> None:
    path, request_id = tmp_path / "log", 'a "ü"\n\u2028\ud800'
    with path.open("w", encoding="ascii") as file:
        log = EventLog(0, file)
        log.start(lambda: EMPTY)
        log.emit(("add", request_id, 0, 0, 1, 1, None))
        log.close()
    [segment] = read_log(path)
    assert segment.rest == (("add", request_id, 0, 0, 1, 1, None),)


# Bad files.


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.slow)])
def test_a_truncated_file_is_read_up_to_its_end(tmp_path: Path, every: int) -> None:
    path = write_story(tmp_path / "log")
    whole, [segment] = path.read_bytes(), read_log(path)
    first_line = whole.index(b"\n")
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    near_ends = {end + i for end in ends for i in (-1, 0, 1, 2)}
    for length in sorted({*range(0, len(whole), every), *near_ends} & set(range(len(whole)))):
        path.write_bytes(whole[:length])
        if length <= first_line - 1:
            with pytest.raises(TraceError, match="is not an event log"):
                list(read_log(path))
            continue
        [cut] = read_log(path)
        assert tuple(cut.steps) == tuple(segment.steps[: len(cut.steps)])
        assert len(cut.steps) == whole[:length].count(b'"event":"step"') - (
            b'"event":"step"' in whole[:length].rpartition(b"\n")[2]
        )
        assert cut.is_cut == (length > first_line and whole[length - 1 : length] != b"\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not an event log: it is empty"),
        (b"once upon a time\n", "is not an event log: line 1: not JSON"),
        (b"[" * 100_000, "is not an event log: line 1: not JSON"),
        (b"[1]\n", "is not an event log: line 1: not an event"),
        (b'{"event":"snapshot"}\n', "is not an event log: line 1: an event without a step"),
        (b'{"step":1,"event":"evict","block":0}\n', "a snapshot must come first"),
        (b'{"step":0,"event":"snapshot"}\n', "format None; this mie reads format 1"),
        (b'{"step":0,"event":"snapshot","version":2}\n', "format 2; this mie reads format 1"),
    ],
)
def test_a_file_without_a_log_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        list(read_log(path))


@pytest.mark.parametrize("name", ["nothing", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(TraceError, match=r"cannot be read: (No such file|it is a directory)"):
        list(read_log(tmp_path / name))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *table("event_logs", "malformed lines"),
        (json.dumps({**summary(7), "event": "step", "start": "x"}), "start is 'x', not a number"),
        (json.dumps({**summary(7), "event": "step", "start": 1e999}), "start is inf"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_story(tmp_path / "log")
    num_lines = len(path.read_text().splitlines())
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(TraceError, match=f"log, line {num_lines + 1}: {message}"):
        list(read_log(path))


@pytest.mark.parametrize(("change", "message"), table("event_logs", "malformed snapshots"))
def test_a_malformed_snapshot_is_refused(tmp_path, change, message) -> None:
    path = write_story(tmp_path / "log")
    head, _, rest = path.read_text().partition("\n")
    path.write_text(f"{json.dumps({**json.loads(head), **change})}\n{rest}")
    with pytest.raises(TraceError, match=message):
        list(read_log(path))
