"""Run the scoreboard's framework with a suite of the test."""

import hashlib
import lzma
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mie.errors import TokenizerError
from scripts.scoreboard import inputs
from scripts.scoreboard.case import Case, Row, Run, Suite
from scripts.scoreboard.inputs import Input, read_table
from scripts.scoreboard.page import inputs_table, markdown, read_results, worse, write_results
from scripts.scoreboard.runner import Runner, read_suites

WORDS = b"one two three"


class Counted:
    """A suite that counts its measurements."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls = 0
        self.error = error
        case = Case("words", self.measure, inputs=("words.txt",))
        self.suite = Suite(title="Words", text="Words of a file.", cases=[case])

    def measure(self, run: Run) -> Iterator[Row]:
        self.calls += 1
        words = len(run.path("words.txt").read_text().split())
        yield Row.compared("words", str(words), "3", words == 3, source="https://example.org")
        if self.error is not None:
            raise self.error


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/words.txt").write_bytes(WORDS)
    known = Input(
        name="words.txt",
        sha256=hashlib.sha256(WORDS).hexdigest(),
        origin="https://example.org/words.txt",
    )
    return Runner(
        folders=[tmp_path / "data"],
        build=tmp_path / "build",
        is_quick=False,
        is_again=False,
        inputs={"words.txt": known},
        code="1",
    )


def changed(runner: Runner, **values: object) -> Runner:
    return replace(runner, **values)


def test_a_finished_case_is_not_measured_again(runner: Runner):
    words = Counted()
    [row] = runner.rows("vocabularies", words.suite)
    assert (row.ours, row.published, row.verdict) == ("3", "3", "reached")
    assert runner.rows("vocabularies", words.suite) == [row]
    assert words.calls == 1
    changed(runner, code="2").rows("vocabularies", words.suite)
    changed(runner, code="2", is_again=True).rows("vocabularies", words.suite)
    assert words.calls == 3


def test_a_refusal_ends_a_case_with_a_row(runner: Runner):
    words = Counted(TokenizerError(f"{runner.folders[0]}/words.txt has no merges"))
    rows = runner.rows("vocabularies", words.suite)
    assert [row.verdict for row in rows] == ["reached", "refused"]
    assert rows[1].reason == "words.txt has no merges"
    assert runner.rows("vocabularies", words.suite) == rows
    assert words.calls == 1


def test_a_failed_case_is_measured_again(runner: Runner):
    words = Counted(ValueError("broken"))
    for _ in range(2):
        row = runner.rows("vocabularies", words.suite)[-1]
        assert (row.verdict, row.reason) == ("failed", "ValueError: broken")
    assert words.calls == 2


def test_missing_inputs_and_packages_are_rows_with_their_remedy(runner: Runner, tmp_path: Path):
    words = Counted()
    (tmp_path / "data/words.txt").write_text("other words")
    [row] = runner.rows("vocabularies", words.suite)
    assert row.verdict == "skipped"
    assert "sha256" in row.reason
    (tmp_path / "data/words.txt").unlink()
    [row] = runner.rows("vocabularies", words.suite)
    assert row.reason == "words.txt is missing (get it: https://example.org/words.txt)"
    (tmp_path / "data/words.txt.xz").write_bytes(lzma.compress(WORDS))
    [row] = runner.rows("vocabularies", words.suite)
    assert row.verdict == "reached"
    case = Case("words", words.measure, packages=("no_such_package",))
    [row] = runner.rows("vocabularies", Suite(title="", text="", cases=[case]))
    assert row.reason == "the package no_such_package is not installed"


def test_missing_inputs_are_had_from_github(
    runner: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    words = Counted()
    (tmp_path / "data/words.txt").unlink()
    known = replace(runner.inputs["words.txt"], origin="https://github.com/a/b: c/words.txt")
    runner = changed(runner, inputs={"words.txt": known})
    monkeypatch.setattr(inputs, "RAW", (tmp_path / "raw").as_uri())
    runner.get_inputs(words.suite)
    [row] = runner.rows("vocabularies", words.suite)
    assert row.verdict == "skipped"
    published = tmp_path / "raw/a/b/HEAD/c/words.txt"
    published.parent.mkdir(parents=True)
    published.write_bytes(WORDS)
    runner.get_inputs(words.suite)
    [row] = runner.rows("vocabularies", words.suite)
    assert row.verdict == "reached"


def test_a_quick_run_leaves_cases_out(runner: Runner):
    words = Counted()
    case = Case("words", words.measure, inputs=("words.txt",), is_in_quick=False)
    suite = Suite(title="", text="", cases=[case])
    assert changed(runner, is_quick=True).rows("vocabularies", suite) == []


def result(*rows: Row) -> dict[str, object]:
    facts = {"commit": "abc", "date": "2026-01-02", "processor": "a CPU", "python": "3.11"}
    return {**facts, "rows": [vars(row) for row in rows]}


def test_the_page_keeps_the_rows_of_suites_that_did_not_run(tmp_path: Path):
    suites = {name: Suite(title=name.title(), text="", cases=[]) for name in ("one", "two")}
    row = Row.refused("a|b <c>", "not read")
    write_results(tmp_path, {"two": result(row)}, suites, "")
    write_results(tmp_path, {"one": result()}, suites, "")
    assert [*read_results(tmp_path)] == ["one", "two"]
    page = (tmp_path / "scoreboard.md").read_text()
    assert page == markdown(read_results(tmp_path), suites, "")
    assert "| a\\|b &lt;c> |  |  | refused: not read | 0.0 |" in page
    assert "| refused | 1 |" in page
    assert page.index("## One") < page.index("## Two")
    assert "Commit abc, 2026-01-02, a CPU, Python 3.11." in page


def test_a_row_that_fails_or_turns_is_worse():
    missed = Row.compared("lines", "1", "2", False, source="")
    reached = Row.compared("lines", "2", "2", True, source="")
    failed = Row(question="lines", verdict="failed")
    old = {"one": result(reached), "two": result(missed)}
    new = {"one": result(missed), "two": result(missed), "three": result(failed)}
    assert worse(new, old) == ["one: lines", "three: lines"]


def test_suites_name_inputs_of_the_table():
    table = read_table()
    for suite in read_suites().values():
        for case in suite.cases:
            assert table.keys() >= {*case.inputs}
    assert all(len(each.sha256) == 64 and each.origin for each in table.values())
    assert "`wiki.test.raw`" in inputs_table(table)


def test_the_committed_page_has_the_committed_rows():
    docs = Path(__file__).parents[3] / "docs"
    page = markdown(read_results(docs), read_suites(), inputs_table(read_table()))
    assert (docs / "scoreboard.md").read_text() == page


def test_the_figures_of_the_readme_stand_on_the_scoreboard():
    root = Path(__file__).parents[3]
    results = read_results(root / "docs")
    readme = (root / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| .*? \| (.*?) \|.*`python -m scripts\.scoreboard --only (\w+)`", readme, re.M
    )
    assert 0 < len(rows) <= 8
    for figure, suite in rows:
        assert any(figure in row["ours"] for row in results[suite]["rows"]), figure
