"""Check that an untrusted trace costs little, and that false claims are refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hostile_files import VIEWS, nested, story
from measured import Zygote
from tables import quick_third


def views(zygote: Zygote, directory: Path, lines: list[str]) -> list[str]:
    """Return each command's error about a trace, or "" if it was accepted, and check its cost."""
    trace, out = directory / "trace.jsonl", str(directory / "out.json")
    trace.write_text("\n".join(lines) + "\n")
    messages = []
    for result in zygote.run_each(
        [[*(out if word == "OUT" else word for word in view), trace] for view in VIEWS]
    ):
        result.check_cost()
        assert "\x1b" not in result.stdout + result.stderr
        if result.code:
            result.check_refused()
        messages.append(result.stderr if result.code else "")
    return messages


def test_the_story_itself_is_accepted(zygote: Zygote, tmp_path: Path) -> None:
    assert not any(views(zygote, tmp_path, story(tmp_path)))


def changed(line: str, **changes: Any) -> str:
    return json.dumps({**json.loads(line), **changes})


STATES = {"num_slots": 4, "num_host_slots": 0, "running": [], "saved": [], "hosts": []}
SNAPSHOTS: dict[str, dict[str, Any]] = {
    "10**15 blocks": {"num_blocks": 10**15},
    "2**62 blocks on the host": {"num_host_blocks": 2**62},
    "blocks of 10**15 tokens": {"block_size": 10**15},
    "a reference to no block": {"refs": [[10**18, 1]]},
    "references to one block twice": {"refs": [[1, 1], [1, 2]]},
    "a nested list of references": {"refs": json.loads(nested(500))},
    "a queue of nobody": {"running": [[7, 0]]},
    "a tree of nothing": {"tree": [{"block": 1, "parent": 1, "salt": None, "tokens": [1]}]},
    "a state of nobody": {"states": STATES | {"running": [{"seq": [7, 0], "slot": 0}]}},
    "a snapshot of nothing": {"states": STATES | {"saved": [{"block": 7, "slot": 0}]}},
    "2**62 slots": {"states": STATES | {"num_slots": 2**62}},
    "version 10**400": {"version": 10**400},
    "a float for blocks": {"num_blocks": 8.0},
}


@pytest.mark.parametrize("name", quick_third((name,) for name in SNAPSHOTS))
def test_a_hostile_snapshot_is_refused(zygote: Zygote, tmp_path: Path, name: str) -> None:
    first, *rest = story(tmp_path)
    views(zygote, tmp_path, [changed(first, **SNAPSHOTS[name]), *rest])


RECORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a billion choices": ("add", {"n": 10**9}),
    "a prompt of 10**15 tokens": ("add", {"num_prompt": 10**15}),
    "a number of 10**400": ("add", {"number": 10**400}),
    "an id with escapes": ("add", {"request_id": "\x1b[2J\x1b]0;x\x07"}),
    "an id of 100,000 letters": ("add", {"request_id": "x" * 100_000}),
    "a surrogate in an id": ("add", {"request_id": "\ud800"}),
    "a choice that is not there": ("prefill", {"choices": [5]}),
    "10**15 tokens at once": ("prefill", {"count": 10**15}),
    "a row that is not there": ("decode", {"rows": [99]}),
    "nested rows": ("decode", {"rows": json.loads(nested(500))}),
    "one row often": ("decode", {"rows": [0] * 50_000}),
    "a sequence that is not there": ("close", {"seq": [99, 0]}),
    "a reason of 100,000 letters": ("finish", {"reason": "x" * 100_000}),
    "a parent that is not there": ("fork", {"parent": [99, 0]}),
    "a block that is not there": ("alloc", {"blocks": [10**15]}),
    "tokens that are text": ("seal", {"tokens": ["a"]}),
    "an end at 10**400": ("step", {"start": 10**400}),
    "a step of infinite length": ("step", {"seconds": float("inf")}),
    "10**400 copies": ("step", {"num_copies": 10**400}),
    "a step without a number": ("step", {"step": None}),
    "an unknown event": ("step", {"event": "\x1b[2J"}),
}


HARMLESS = {"an id with escapes", "an id of 100,000 letters", "a surrogate in an id"}


@pytest.mark.parametrize("name", quick_third((name,) for name in RECORDS))
def test_a_hostile_record_is_refused(zygote: Zygote, tmp_path: Path, name: str) -> None:
    kind, changes = RECORDS[name]
    lines = story(tmp_path)
    at = next(at for at, line in enumerate(lines) if json.loads(line)["event"] == kind)
    lines[at] = changed(lines[at], **changes)
    messages = views(zygote, tmp_path, lines)
    if name not in HARMLESS:
        assert all(messages[2:]), messages


def test_a_claim_of_many_tokens_in_one_block_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    """The log is consistent, and one line claims more tokens than memory can hold."""
    lines = [changed(story(tmp_path)[0], block_size=2**40, num_blocks=1)]
    number = 2**40
    for fields in (
        {"event": "add", "request_id": "a", "number": 0, "rank": 0, "num_prompt": number},
        {"event": "admit", "seq": [0, 0], "row": 0, "num_tokens": number, "num_computed": 0},
        {"event": "alloc", "seq": [0, 0], "index": 0, "blocks": [0]},
    ):
        lines.append(json.dumps({"step": 1, "n": 1, "max_tokens": None, **fields}))
    messages = views(zygote, tmp_path, lines)
    assert all("block_size cannot be 1099511627776" in message for message in messages)


@pytest.mark.parametrize("size", range(0, 100, 10))
def test_a_truncated_trace_is_handled(zygote: Zygote, tmp_path: Path, size: int) -> None:
    text = "\n".join(story(tmp_path))
    views(zygote, tmp_path, text[: len(text) * size // 100].splitlines())


LINES = {
    "nothing": b"",
    "zeros": bytes(1 << 20),
    "deep nesting": nested(500_000).encode(),
    "an integer of 100,000 digits": b'{"step": ' + b"9" * 100_000 + b', "event": "snapshot"}\n',
    "not UTF-8": b"\xff\xfe\n",
    "empty lines": b"\n" * 1000,
    "a list": b"[]\n",
}


@pytest.mark.parametrize("name", LINES)
def test_a_file_that_is_not_a_trace_is_refused(zygote: Zygote, tmp_path: Path, name: str) -> None:
    is_not_a_trace(zygote, tmp_path, LINES[name])


def test_a_line_without_an_end_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    is_not_a_trace(zygote, tmp_path, b"x" * (65 << 20))


def is_not_a_trace(zygote: Zygote, directory: Path, data: bytes) -> None:
    """Check that the command refuses a file of these bytes."""
    path = directory / "trace.jsonl"
    path.write_bytes(data)
    zygote.run("cli", "trace", path).check_refused(str(path))


@pytest.mark.parametrize("kind", ["/dev/zero", "a pipe", "."])
def test_a_path_that_is_not_a_file_is_refused(zygote, tmp_path, kind) -> None:
    """A pipe without a writer is empty, and nothing waits for it."""
    path = tmp_path / "trace.jsonl"
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)
    zygote.run("cli", "trace", path).check_refused(str(path))
