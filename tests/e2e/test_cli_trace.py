"""Test ``mie trace`` on hand-made logs."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import error_line, mie
from event_stories import EMPTY, REBUILD, REBUILT, STORY, run_toy, summary, write_story

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


# The table.


def test_the_table_has_a_row_for_each_step(story: Path) -> None:
    lines = output(story)
    assert lines[0] == "8 blocks of 4 slots, and 4 blocks on the host"
    header = "step running waiting prefill decode KV waste shared preempted done"
    assert " ".join(lines[2].split()) == header
    assert len(lines) == 3 + 6 + 2
    assert " ".join(lines[5].split()) == "3 0 0 0 3 50 % 0 % 20 % 0 0"
    assert lines[-1] == (
        "[6 steps · 4 requests · 21 tokens computed, 6 hit · 0 preemptions · peak 50 %]"
    )
    assert all(len(line) <= 80 for line in lines)


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


def test_the_block_map_shows_the_owners_of_blocks(story: Path) -> None:
    lines = output(story, "--step", "2")
    assert lines[0] == "After step 2: 8 blocks of 4 slots"
    assert lines[2] == "0  AB 4×3 B  3×1 C  4×2 C  1×1 A  3×1 ·      ·      ·"
    assert lines[9:12] == [
        "A   a [0]       0       8         7  0 4",
        "B   a [1]       2       8         7  0 1",
        "C   b           1       6         5  2 3",
    ]
    assert lines[-2:] == [
        "5 of 8 blocks used (62 %) · 0 cached · 3 free · sharing saves 1",
        "5 of 20 slots in used blocks empty (25 %)",
    ]


def test_the_block_map_marks_cached_blocks_and_waiting_sequences(story: Path) -> None:
    lines = output(story, "--step", "3")
    assert lines[2] == "0  ▒ 4×1 ▒ 4×1 ▒ 4×1 ·     ▒ 4×1 ·     ·     ·"
    assert lines[9:11] == ["    waiting", "    b                   6  2 host blocks"]


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


# The life of a request.


def test_the_events_of_a_request_have_causes(story: Path) -> None:
    assert [line.strip() for line in output(story, "--request", "b")] == [
        "step 1  added: 5 prompt tokens",
        "step 1  admitted to row 1: 5 of 5 tokens to compute",
        "step 1  computed 3 tokens from position 0",
        "step 2  computed 2 tokens from position 3, and sampled 1 token",
        "step 3  preempted: swap, 0 computed tokens lost (a [1] needed room; victim: last arrived)",
        "step 4  swapped in to row 0: 1 of 6 tokens to compute",
        "step 4  computed 1 token from position 5, and sampled 1 token",
        "step 5  preempted: swap, 0 computed tokens lost (c needed room; victim: last arrived)",
    ]


def test_the_events_of_a_request_name_its_choices(story: Path) -> None:
    assert [line.strip() for line in output(story, "--request", "a")] == [
        "step 1  [0] added: 6 prompt tokens, at most 3 new tokens, 2 choices",
        "step 1  [0] admitted to row 0: 6 of 6 tokens to compute",
        "step 1  [0] computed 6 tokens from position 0, and sampled 2 tokens",
        "step 1  [1] forked to row 2",
        "steps 2–3  [0] decoded 2 tokens",
        "step 3  [0] finished: length",
        "steps 2–3  [1] decoded 2 tokens",
        "step 3  [1] finished: length",
    ]


def test_an_unfinished_request_is_shown_to_the_end_of_the_log(story: Path) -> None:
    lines = [line.strip() for line in output(story, "--request", "c")]
    assert lines[1:3] == [
        "step 4  admitted to row 1: 1 of 7 tokens to compute",
        "step 4  prefix hit: of 7 tokens 4 in full blocks, 2 by a copy from block 4",
    ]
    assert lines[4] == (
        "step 5  preempted: recompute, 7 computed tokens lost (a step was abandoned)"
    )
    assert lines[-2:] == [
        "step 6  decoded 1 token",
        "step 6  got 2 tokens more: nothing else could follow",
    ]


def test_a_choice_that_waits_for_a_row_is_shown(story: Path) -> None:
    assert [line.strip() for line in output(story, "--request", "d")] == [
        "step 5  [0] added: 4 prompt tokens, at most 5 new tokens, 2 choices",
        "step 5  [1] waits for its own row",
        "step 5  [0] finished: abort",
        "step 5  [1] finished: abort",
    ]


def test_a_rebuild_is_shown_for_the_requests_that_it_affects(tmp_path: Path) -> None:
    def last_line(rebuilt: dict[str, Any]) -> str:
        story = [*STORY, [("rebuild", {**EMPTY, **rebuilt})]]
        return output(write_story(tmp_path / "story.jsonl", story), "--request", "b")[-1].strip()

    assert last_line(REBUILT) == "step 7  waits again: the state was rebuilt"
    assert last_line({}) == "step 7  has ended: the state was rebuilt"


def test_a_rebuild_starts_a_new_wait_on_the_timeline(tmp_path: Path) -> None:
    events = timeline(write_story(tmp_path / "story.jsonl", [*STORY, REBUILD]))
    assert [event["name"] for event in events].count("rebuilt") == 2
    assert ("c", "waiting", 70.0, 5.0) in list(slices(events, 2))


def test_an_unknown_request_lists_the_known_ones(story: Path) -> None:
    line = error_line(mie("trace", story, "--request", "z"))
    assert line.endswith("the log has no request 'z'; it has a, b, c, d")


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


def test_the_timeline_has_a_track_for_each_choice(story: Path) -> None:
    assert list(slices(timeline(story), 2)) == [
        ("a [0]", "prefill 6", 10, 5),
        ("a [0]", "decode", 20, 15),
        ("b", "prefill 3", 10, 5),
        ("b", "prefill 2", 20, 5),
        ("b", "swapped out", 30, 10),
        ("b", "prefill 1", 40, 5),
        ("b", "swapped out", 50, 15),
        ("a [1]", "decode", 20, 15),
        ("c", "prefill 1", 40, 5),
        ("c", "prefill 4", 50, 5),
        ("c", "decode", 60, 5),
    ]


def test_instants_have_a_cause(story: Path) -> None:
    instants = [event for event in timeline(story) if event["ph"] == "i"]
    causes = [event["args"] for event in instants if event["name"] == "preempted"]
    assert [cause["for"] for cause in causes] == ["a [1]", None, "c"]
    [hit] = [event["args"] for event in instants if event["name"] == "prefix hit"]
    assert hit == {"queried": 7, "in full blocks": 4, "copied": 2}
    assert [event["name"] for event in instants if event["name"].startswith("finished")] == [
        "finished: length",
        "finished: length",
        "finished: abort",
        "finished: abort",
    ]


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
def test_the_timeline_does_not_overwrite_logs_or_devices(
    story: Path, name: str, message: str
) -> None:
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is not an event log: it is empty"),
        (b"Once upon a time\n", "is not an event log: line 1: not JSON"),
        (b'{"prompt": "Once"}\n', "is not an event log: line 1: not an event"),
    ],
)
def test_a_file_that_is_not_a_log_is_refused(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    for view in ([], ["--step", "1"], ["--request", "a"], ["--perfetto", tmp_path / "out.json"]):
        assert error_line(mie("trace", path, *view)).endswith(f"file {message}")


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
    for view in (["--step", "1"], ["--request", "x"]):
        process = mie("trace", path, *view)
        assert b"\x1b" not in process.stdout + process.stderr
        assert b"?[2Jboo" in process.stdout + process.stderr
