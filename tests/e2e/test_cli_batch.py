"""`mie batch` without Ray: records, restarts, and refusals."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from mie.cli import main

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SMALL = ("--num-blocks", "64", "--max-num-seqs", "4")


def line(key: object, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": key, "method": "POST", "url": url, "body": body}


LINES = [
    line("greedy", prompt="Once upon a time", max_tokens=6, temperature=0),
    line("sampled", prompt="Once upon a time", max_tokens=20),
    line("sampled again", prompt="Once upon a time", max_tokens=20),
    line("chat", CHAT, messages=[{"role": "user", "content": "Who is Mia?"}], max_tokens=6),
    line("ids", prompt=[5, 6, 7], max_tokens=3, n=2),
    line("bad", prompt="x", temperature=-1),
    line("too long", prompt="word " * 4000),
    line("unknown", "/v1/embeddings", input="x"),
]
FAILED = {"bad", "too long", "unknown"}


class Files:
    """IN and OUT of a run."""

    def __init__(self, directory: Path) -> None:
        self.input, self.output = directory / "in.jsonl", directory / "out.jsonl"

    def run(self, lines: list[Any], *options: str) -> int:
        self.input.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
        return main(["batch", str(self.input), str(self.output), *SMALL, *options])

    def records(self) -> dict[str, Any]:
        """The records by their ids, each once, without the fields that differ from run to run."""
        records = [json.loads(text) for text in self.output.read_text().splitlines()]
        for record in records:
            if record["response"] is not None:
                del record["response"]["body"]["created"], record["response"]["body"]["usage"]
            else:  # the message says where the line was
                record["error"]["message"] = record["error"]["message"].partition(": ")[2]
        found = {record["custom_id"]: record for record in records}
        assert len(found) == len(records)
        return found


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The answers of one run to all lines."""
    files = Files(tmp_path_factory.mktemp("batch"))
    assert files.run(LINES) == 1
    return files.records()


def test_every_line_has_a_record(expected: dict[str, Any]):
    assert expected.keys() == {each["custom_id"] for each in LINES}
    assert {key for key, record in expected.items() if record["error"] is not None} == FAILED
    assert expected["chat"]["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert len(expected["ids"]["response"]["body"]["choices"]) == 2
    assert "temperature" in expected["bad"]["error"]["message"]


def test_a_line_gets_what_the_model_recommends(files: Files, expected, capsys):
    neutral = ("--generation-config", "vllm")
    warmer = [line(each["custom_id"], **each["body"], temperature=0.7) for each in LINES[1:3]]
    assert files.run(warmer, *neutral) == 0
    assert "sampling defaults" not in capsys.readouterr().err
    assert files.records() == {key: expected[key] for key in ("sampled", "sampled again")}
    files.output.unlink()
    assert files.run(LINES[1:3], *neutral) == 0
    assert files.records() != {key: expected[key] for key in ("sampled", "sampled again")}
    files.output.unlink()
    assert files.run(LINES[1:3]) == 0
    assert "sampling defaults of the model: temperature=0.7" in capsys.readouterr().err


def test_a_restart_goes_on_and_changes_no_answer(files: Files, expected, capsys):
    assert files.run(LINES[:3]) == 0
    begun = files.output.read_bytes()
    assert files.run(LINES[::-1]) == 1
    assert files.output.read_bytes().startswith(begun)
    assert files.records() == expected
    capsys.readouterr()
    assert files.run(LINES) == 0  # nothing is left to do
    assert capsys.readouterr().err == "[0 requests answered · 8 done before]\n"
    assert files.records() == expected


@pytest.mark.parametrize("num_whole", [0, 1])
@pytest.mark.parametrize("end", [b"", b"\n", b"\0" * 9, b"\0" * 9 + b"\n"])
@pytest.mark.few
def test_a_torn_line_is_cut_be_it_the_first_or_not(files: Files, expected, num_whole, end):
    assert files.run(LINES[:2]) == 0
    lines = files.output.read_bytes().splitlines(keepends=True)
    files.output.write_bytes(b"".join(lines[:num_whole]) + lines[num_whole][:40] + end)
    assert files.run(LINES) == 1
    assert files.records() == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a file of somebody's", "line 1 is not JSON"),
        ("a file of somebody's\n", "line 1 is not JSON"),
        ('{"custom_id": "a", "resp\n{"custom_id": "b"}\n', "line 1 is not JSON: "),
        ('{"custom_id": "a", "resp\n{"custom_id": "b"}\n', "delete the line, and its request is"),
        (
            '{"custom_id": "a", "response": {}}\n{"response": {}}',
            "line 2 is no record of an answer",
        ),
        (
            json.dumps(LINES[0]) + "\n",
            "line 1 is no record of an answer: it needs a custom_id and a response",
        ),
    ],
)
def test_an_out_that_is_no_file_of_records_is_left_as_it_is(files: Files, capsys, text, message):
    files.output.write_text(text)
    assert files.run(LINES[:1]) == 2
    assert message in capsys.readouterr().err
    assert files.output.read_text() == text


def test_an_answer_that_cannot_be_written_is_not_lost(files: Files, expected, monkeypatch):
    """An interrupt leaves whole records, and the next run answers the others."""
    import mie.cli.batch as module

    def interrupted(*arguments: Any) -> Any:
        for number, answer in enumerate(original(*arguments)):
            if number == 2:
                raise KeyboardInterrupt
            yield answer

    original = module._answers
    monkeypatch.setattr(module, "_answers", interrupted)
    assert files.run(LINES) == 130
    assert len(files.records()) == 3  # one refused at once, and two answers
    monkeypatch.undo()
    files.run(LINES)
    assert files.records() == expected


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line("a", prompt="x"), line("a", prompt="y")], "line 2: custom_id 'a' is also that of"),
        ([line(None, prompt="x")], "line 1 needs a custom_id"),
        ([line(7, prompt="x")], "got 7"),
        ([{"prompt": "x"}], "needs a custom_id"),
        ([[1]], "must be a JSON object"),
    ],
)
def test_ids_that_cannot_be_told_apart_are_refused(files: Files, capsys, lines, message):
    assert files.run(lines) == 2
    assert message in capsys.readouterr().err
    assert not files.output.exists()


def test_two_runs_do_not_write_one_file(files: Files, capsys):
    with files.output.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert files.run(LINES) == 2
    assert "another mie batch" in capsys.readouterr().err
