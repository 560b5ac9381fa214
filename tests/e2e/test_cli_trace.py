"""Test ``mie trace`` on hand-made logs."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import error_line, mie
from event_stories import EMPTY, REBUILD, STORY, run_toy, summary, write_story

from mie.events import EventLog


@pytest.fixture
def story(tmp_path: Path) -> Path:
    return write_story(tmp_path / "story.jsonl")


@pytest.fixture
def long_log(tmp_path: Path) -> Path:
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        run_toy(EventLog(0, file), 1234)
    return path


def output(*arguments: str | Path) -> list[str]:
    """Return the lines of standard output, after checking that standard error is empty."""
    process = mie("trace", *arguments)
    assert process.returncode == 0
    assert process.stderr == b""
    return process.stdout.decode().splitlines()


# Every view of a short story, as it was when its parts were checked one by one.

GOLDEN = Path(__file__).with_name("trace_story")
VIEWS = {path.stem: path.read_text(encoding="utf-8") for path in GOLDEN.glob("*.txt")}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_the_story(story: Path, view: str) -> None:
    option, _, value = view.partition("-")
    arguments = [] if view == "table" else [f"--{option}", value]
    assert output(story, *arguments) == VIEWS[view].splitlines()


def test_the_timeline_of_the_story(story: Path) -> None:
    expected = json.loads((GOLDEN / "timeline.json").read_text(encoding="utf-8"))
    assert timeline(story) == expected["traceEvents"]


# The story of a request.


def test_a_request_departs_and_is_read_from_a_disk(tmp_path: Path) -> None:
    start = "Tell me a story about Mia the otter, the {} and a bell, a kite and an owl."
    log, cache = tmp_path / "log", tmp_path / "cache"
    prompts = [start.format(word) for word in ("mill", "lake")]
    settings = ["--block-size", "8", "--max-tokens", "1", "--prefix-cache-dir", cache]
    settings += ["--max-num-seqs", "1"]
    mie("generate", *settings, prompts[0])
    mie("generate", *settings, "--trace", log, *prompts)
    told = "\n".join(output(log, "--request", "auto-0"))
    assert "16 tokens in 2 blocks read from a disk" in told
    told = "\n".join(output(log, "--request", "auto-1", "--model", "bundled"))
    assert 'departs from the cache at token 11 of 22: other tokens; cached " mill' in told
    assert ', got " lake and a' in told
    assert "16 read from a disk" in output(log)[-1]


def test_an_unknown_request_is_refused_with_those_there_are(story: Path) -> None:
    message = error_line(mie("trace", story, "--request", "x"))
    assert "--request 'x' is not in the log; its first requests are: 'a', 'b', 'c', 'd'" in message


# The table.


def test_a_row_covers_the_steps_since_the_previous_row(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        log = EventLog(0, file)
        log.start(lambda: EMPTY)
        for step in (1, 2, 3, 5, 6):
            log.end_step(
                summary(
                    step,
                    num_running=step,
                    num_prefill_tokens=1,
                    num_decode_tokens=step,
                    num_preempted=1,
                    num_finished=2,
                    num_blocks_used=2 if step < 5 else 0,
                    num_slots_empty=2,
                )
            )
    assert [" ".join(line.split()) for line in output(path, "--every", "2")[3:-2]] == [
        "2 2 0 2 3 25 % 25 % 0 % 2 4",
        "5 5 0 2 8 0 % – – 2 4",
        "6 6 0 1 6 0 % – – 1 2",
    ]


def test_a_long_run_has_forty_rows_unless_all_are_requested(long_log: Path) -> None:
    rows = output(long_log)[3:-2]
    assert len(rows) == 40
    assert [int(row.split()[0]) for row in rows] == [*range(31, 1234, 31), 1234]
    assert len(output(long_log, "--all")) == 3 + 1234 + 2
    assert output(long_log)[-1].startswith("[1,234 steps · 177 requests · ")


# The block map.


def big_snapshot() -> dict[str, Any]:
    """Return the state of thirty long-named sequences in 2,000 blocks, five of them waiting."""
    ids = {number: f"a request with a long name, number {number}" for number in range(60)}
    sequences = {
        (number, 0): {
            "request_id": ids[number],
            "rank": 0,
            "num_prompt": 10,
            "max_tokens": None,
            "n": 1,
            "num_tokens": 513,
            "num_computed": 512 if number < 30 else 0,
            "row": number if number < 30 else None,
            "blocks": [7, *range(100 + 40 * number, 131 + 40 * number)] if number < 30 else [],
            "host": None,
        }
        for number in range(60)
    }
    blocks = [block for values in sequences.values() for block in values["blocks"]]
    return {
        **EMPTY,
        "block_size": 16,
        "num_blocks": 2000,
        "waiting": [(number, 0) for number in range(30, 60)],
        "running": [(number, 0) for number in range(30)],
        "sequences": sequences,
        "refs": {block: blocks.count(block) for block in {*blocks}},
    }


def test_a_large_block_map_fits_eighty_columns(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        EventLog(0, file).start(big_snapshot)
    lines = output(path, "--step", "0")
    assert max(map(len, lines)) <= 80
    assert len(lines) < 250, "equal rows are merged"
    assert lines[2].startswith("   0  ·")
    assert "A+ 16×30" in lines[2]
    assert any(line.strip() == "… and 696 blocks like these" for line in lines)
    assert any(line.startswith("d   a request with a lo…") for line in lines)
    assert "    … and 10 more" in lines


# The timeline.


def timeline(path: Path, *arguments: str) -> list[dict[str, Any]]:
    out = path.with_name("timeline.json")
    lines = output(path, "--perfetto", out, *arguments)
    events = json.loads(out.read_text())["traceEvents"]
    assert lines == [f"{out}: {len(events):,} events; open it at https://ui.perfetto.dev"]
    assert sorted(path.parent.iterdir()) == sorted([path, out]), "a temporary file was left"
    return events


def slices(events: list[dict[str, Any]], process: int) -> Iterator[tuple[str, str, float, float]]:
    """Return (track, name, start and length in milliseconds) of the slices, in order."""
    names = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    for event in sorted(
        (event for event in events if event["ph"] == "X"),
        key=lambda event: (event["tid"], event["ts"], -event["dur"]),
    ):
        if event["pid"] == process:
            track = names[event["pid"], event["tid"]]
            yield track, event["name"], event["ts"] / 1000, event["dur"] / 1000


def test_a_rebuild_starts_a_new_wait_on_the_timeline(tmp_path: Path) -> None:
    events = timeline(write_story(tmp_path / "story.jsonl", [*STORY, REBUILD]))
    assert [event["name"] for event in events].count("rebuilt") == 2
    assert ("c", "waiting", 70.0, 5.0) in list(slices(events, 2))


def test_the_timeline_has_the_events_of_a_request_and_the_cause_of_a_preemption(story) -> None:
    events = timeline(story)
    tracks = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == 2
    }
    assert {"a", "b", "c", "d"} <= {name.split(" ")[0] for name in tracks.values()}
    preempted = [event for event in events if event["name"].startswith("preempted")]
    assert preempted
    assert all({"for", "rule", "mode"} <= event["args"].keys() for event in preempted)


def test_slices_of_a_track_never_overlap(long_log: Path) -> None:
    events = timeline(long_log)
    ends: dict[str, float] = defaultdict(float)
    for track, _, start, length in slices(events, 2):
        assert length > 0
        assert start >= ends[track] - 1e-9
        ends[track] = start + length
    assert len(ends) == 177
    inside = 0.0
    for _, name, start, length in slices(events, 1):
        if name.startswith("step "):
            inside = start + length
        assert start + length <= inside + 1e-9


def test_an_impossible_log_leaves_the_old_timeline_unchanged(story: Path) -> None:
    out = story.with_name("old.json")
    out.write_text("old")
    with story.open("a") as file:
        file.write('{"step":7,"event":"evict","block":7}\n')
    line = error_line(mie("trace", story, "--perfetto", out))
    assert line.endswith("after step 6: evict 7: it is not in the tree")
    assert out.read_text() == "old"
    assert sorted(story.parent.iterdir()) == sorted([story, out])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("story.jsonl", "would overwrite"),
        (".", "would overwrite"),
        (os.devnull, "would overwrite"),
        ("nowhere/out.json", "cannot be written: No such file"),
    ],
)
def test_the_timeline_does_not_overwrite_logs_or_devices(story, name, message) -> None:
    before = story.read_bytes()
    assert message in error_line(mie("trace", story, "--perfetto", story.parent / name))
    assert story.read_bytes() == before
    assert [*story.parent.iterdir()] == [story]


# Errors.


def test_a_killed_run_is_shown_up_to_its_end(story: Path) -> None:
    story.write_bytes(story.read_bytes()[:-30])
    process = mie("trace", story)
    assert process.returncode == 0
    assert b"[5 steps" in process.stdout
    (line,) = process.stderr.decode().splitlines()
    assert line.startswith("mie: note: ")
    assert "ends in the middle of a line" in line


def test_a_file_that_is_not_a_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"Once upon a time\n")
    message = "file is not an event log: line 1: not JSON"
    assert error_line(mie("trace", path)).endswith(message)


@pytest.mark.parametrize("step", ["-1", "7", "99999999999999999999"])
def test_a_step_outside_the_log_is_refused(story: Path, step: str) -> None:
    line = error_line(mie("trace", story, "--step", step))
    assert line.endswith(f"step {step} is not in the log; it holds steps 0 to 6")


def test_only_one_view_is_allowed(story: Path) -> None:
    process = mie("trace", story, "--step", "1", "--all")
    assert process.returncode == 2
    assert b"not allowed with" in process.stderr


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("w") as file:
        log = EventLog(0, file)
        log.start(lambda: EMPTY)
        log.emit(("add", "\x1b[2Jboo", 0, 0, 1, 1, None))
        log.end_step(summary(1))
        log.close()
    process = mie("trace", path, "--step", "1")
    assert b"\x1b" not in process.stdout + process.stderr
    assert b"?[2Jboo" in process.stdout
