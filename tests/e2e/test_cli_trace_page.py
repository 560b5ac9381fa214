"""Test ``mie trace --html`` and ``--page``."""

import base64
import gzip
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command_line import error_line, mie
from event_stories import run_toy, write_story
from page_cells import Page, cells_of

from mie.events import EventLog, read_log
from mie.events.replay import at
from mie.page.cells import NodeText
from mie.page.recording import Recording


@pytest.fixture
def story(tmp_path: Path) -> Path:
    return write_story(tmp_path / "story.jsonl")


def runs_in(page: Path) -> list[dict[str, Any]]:
    """Return the runs in a page: name, title, records."""
    found = re.search(r'id="mie-runs">(.*?)</script>', page.read_text(), re.S)
    assert found is not None
    runs = json.loads(found[1])
    for run in runs:
        lines = gzip.decompress(base64.b64decode(run["gzip"])).decode().splitlines()
        run["records"] = list(map(json.loads, lines))
    return runs


def check_states(records: list[dict[str, Any]], log: Path) -> None:
    """Assert that the records show the state of `mie trace --step`, at every step."""
    page = Page()
    for record in records:
        page.take(record)
        if record["record"] == "steps":
            assert page.step is not None
            assert page.cells() == cells_of(at(read_log(log), page.step), NodeText())


def test_the_page_holds_the_run(story: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    done = mie("trace", story, "--html", out)
    assert (done.returncode, done.stderr) == (0, b"")
    assert re.fullmatch(rf"{out}: \d+ kB; open it in a browser\n", done.stdout.decode())
    (run,) = runs_in(out)
    assert (run["name"], run["title"]) == ("story.jsonl", "story.jsonl")
    head = run["records"][0]
    assert (head["source"], head["first"], head["last"], head["dropped"]) == ("file", 0, 6, 0)
    check_states(run["records"], story)


def test_records_are_written_for_a_page_without_a_server(story: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = mie("trace", story, "--page", out)
    assert done.stdout.decode() == f"{out}: 8 records; drop it on a page of mie\n"
    check_states([json.loads(line) for line in out.read_text().splitlines()], story)


def test_without_a_log_the_page_holds_the_runs_that_come_with_mie(tmp_path: Path) -> None:
    out = tmp_path / "demo.html"
    assert mie("trace", "--html", out).returncode == 0
    first, second, third = runs_in(out)
    for run in (first, second, third):
        page = Page()
        for record in run["records"]:
            page.take(record)
        assert page.step == run["records"][0]["last"] > 50
        assert not page.seqs, "everything has ended"
    texts = [n["text"] for r in first["records"] for n in r.get("set", {}).get("tree", {}).values()]
    assert any("You are a storyteller" in text for text in texts)
    hits = [e for s in steps_of(first) for e in s["events"] if e[0] == "hit"]
    assert len(hits) >= 10
    preemptions = [e for s in steps_of(second) for e in s["events"] if e[0] == "preempt"]
    modes = {event[3] for event in preemptions}
    assert {"swap", "recompute: host pool full"} <= modes
    drafts = [e for s in steps_of(third) for e in s["events"] if e[0] == "verify"]
    assert {0, 4} <= {event[4] for event in drafts}, "some drafts are kept, and some dropped"


def steps_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for record in run["records"] for step in record.get("steps", ())]


def test_a_model_gives_the_text_of_blocks(tmp_path: Path) -> None:
    log, out = tmp_path / "run.jsonl", tmp_path / "out.jsonl"
    prompt = "The otter who lived by the mill had a boat and a lamp and a friend."
    assert mie("generate", "--max-tokens", "4", "--trace", log, prompt).returncode == 0
    assert mie("trace", log, "--page", out, "--model", "bundled").returncode == 0
    records = [json.loads(line) for line in out.read_text().splitlines()]
    texts = [n["text"] for r in records for n in r.get("set", {}).get("tree", {}).values()]
    assert "The otter who lived" in "".join(texts)


def test_a_log_of_another_model_is_refused(tmp_path: Path) -> None:
    story = [
        [
            ("add", "a", 0, 0, 4, 1, 3),
            ("admit", (0, 0), 0, 4, 0),
            ("alloc", (0, 0), 0, (0,)),
            ("prefill", (0, 0), 0, 4, (0,)),
            ("seal", 0, None, None, (1, 2, 3, 1 << 40)),
        ]
    ]
    log = write_story(tmp_path / "log.jsonl", story)  # type: ignore[arg-type]
    out = tmp_path / "out.html"
    done = mie("trace", log, "--html", out, "--model", "bundled")
    assert "the log is not of the model bundled" in error_line(done)
    assert not out.exists()


def test_a_long_log_loses_its_beginning_and_the_page_says_so(tmp_path: Path) -> None:
    log = tmp_path / "long.jsonl"
    with log.open("w") as file:
        run_toy(EventLog(0, file), 2345)
    recording = Recording(read_log(log), NodeText(), max_steps=1000)
    records = list(map(json.loads, recording.lines("long.jsonl")))
    head, key = records[:2]
    assert 1000 <= 2345 - head["dropped"] <= 1300
    assert head["first"] == head["dropped"] == key["step"] == recording.num_dropped
    page = Page()
    for record in records:
        page.take(record)
        if page.step is not None and page.step % 500 == 0:
            assert page.cells() == cells_of(at(read_log(log), page.step), NodeText())
    assert page.step == 2345
    keys = [record["step"] for record in records if record["record"] == "key"]
    assert max(b - a for a, b in pairwise(keys)) <= 300


@pytest.mark.parametrize("option", ["--html", "--page"])
def test_a_broken_log_leaves_the_file_that_was_there(story, tmp_path, option) -> None:
    out = tmp_path / "out"
    out.write_text("as before")
    broken = tmp_path / "broken.jsonl"
    lines = story.read_text().splitlines(keepends=True)
    broken.write_text("".join(line for line in lines if '"alloc"' not in line))
    assert "after step 0" in error_line(mie("trace", broken, option, out))
    assert out.read_text() == "as before"
    assert option in error_line(mie("trace", story, option, story))
    assert story.read_text().startswith('{"step":0')
