"""Test the files of benchmark results: provenance, and refusals before a measurement."""

import json
import platform
import re
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from mie.base.version import __version__
from mie.cli import bench, main
from mie.lab.sim import cluster

SHORT = ("--device", "a10g", "--model-shape", "TinyLlama-1.1B")
LOAD = ("--num-prompts", "2", "--random-input-len", "8", "--random-output-len", "2")
COMMANDS: dict[str, tuple[str, ...]] = {
    "throughput": ("bench", "throughput", *SHORT, *LOAD),
    "latency": ("bench", "latency", *SHORT, "--input-len", "8", "--output-len", "2"),
    "serve": ("bench", "serve", *SHORT, *LOAD),
    "cluster": ("sim", "cluster", "--replicas", "1", "--requests-per-replica", "2"),
}


@pytest.fixture(params=COMMANDS)
def command(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return COMMANDS[request.param]


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is measured."""

    def measure(*_: Any, **__: Any) -> None:
        raise AssertionError("the measurement began")

    monkeypatch.setattr(bench, "open_bench", measure)
    monkeypatch.setattr(cluster, "simulate_cluster", measure)


def test_results_have_the_version_the_commit_the_date_the_machine_and_the_settings(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    before = datetime.now(timezone.utc).replace(microsecond=0)
    assert main((*command, "--output-json", str(path))) == 0
    found = json.loads(path.read_text())
    assert found["mie"] == __version__
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found["commit"])
    assert before <= datetime.fromisoformat(found["date"]) <= datetime.now(timezone.utc)
    assert found["machine"]["python"] == platform.python_version()
    assert found["machine"]["num_cpus"] >= 1
    assert "numpy" in found["machine"]["packages"]
    assert found["settings"]["device"] == "a10g"
    assert "Infinity" not in path.read_text()


def test_a_file_that_exists_is_kept_and_refused_before_the_measurement(
    command: tuple[str, ...], tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    path.write_text("kept")
    assert main((*command, "--output-json", str(path))) == 2
    assert f"--output-json {path} exists" in capsys.readouterr().err
    assert path.read_text() == "kept"


def test_a_missing_folder_is_refused_before_the_measurement(
    command: tuple[str, ...], tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "absent" / "out.json"
    assert main((*command, "--output-json", str(path))) == 2
    assert f"there is no folder {path.parent}" in capsys.readouterr().err


def test_a_folder_is_no_file_of_results(
    command: tuple[str, ...], tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main((*command, "--output-json", str(tmp_path), "--overwrite")) == 2
    assert "is not a file" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--save-result", "--save-detailed"])
def test_the_file_of_save_result_is_checked_too(
    option: str, tmp_path: Path, unmeasured: None, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = ("bench", "serve", *LOAD, option, "--result-dir")
    assert main((*saved, str(tmp_path / "absent"))) == 2
    assert "there is no folder" in capsys.readouterr().err
    (tmp_path / "mie-serve.json").write_text("kept")
    assert main((*saved, str(tmp_path))) == 2
    assert "add --overwrite" in capsys.readouterr().err
    other = tmp_path / "one.json"
    one = (str(tmp_path), "--result-filename", other.name, "--output-json", str(other))
    assert main((*saved, *one)) == 2
    assert "name one file" in capsys.readouterr().err


def test_overwrite_replaces_a_file(command: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    assert main((*command, "--output-json", str(path), "--overwrite")) == 0
    assert json.loads(path.read_text())["mie"] == __version__
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


@pytest.mark.parametrize("name", ["throughput", "latency", "serve"])
def test_a_bar_counts_every_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    totals: list[int] = []

    class Shown:
        def __enter__(self) -> Callable[[int], object]:
            return counts.append

        def __exit__(self, *_: object) -> None:
            pass

    def bar(what: str, unit: str, number: int) -> Shown:
        totals.append(number)
        return Shown()

    monkeypatch.setattr(bench, "bar", bar)
    assert main(COMMANDS[name]) == 0
    assert totals == [sum(counts)]
    assert sum(counts) > 0


def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str], **runs: tuple[str, ...]) -> str:
    paths = []
    for name, words in runs.items():
        paths.append(str(tmp_path / f"{name}.json"))
        assert main((*words, "--output-json", paths[-1])) == 0
    capsys.readouterr()
    assert main(("bench", "compare", *paths)) == 0
    return capsys.readouterr().out


def test_runs_of_one_load_are_compared_in_one_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ("bench", "serve", "--device", "h200", *SHORT[2:], *LOAD)
    out = compared(tmp_path, capsys, small=COMMANDS["serve"], large=other)
    assert "small: Simulated: TinyLlama-1.1B on a10g" in out
    assert "large: Simulated: TinyLlama-1.1B on h200" in out
    assert "different loads" not in out
    cells = [line.replace(" ", "") for line in out.splitlines()]
    assert "|Successfulrequests|2|2|" in cells


def test_a_figure_that_a_run_lacks_is_a_dash_and_different_loads_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = compared(tmp_path, capsys, serve=COMMANDS["serve"], latency=COMMANDS["latency"])
    assert "different loads" in out
    cells = [line.replace(" ", "") for line in out.splitlines()]
    assert any(line.startswith("|Successfulrequests|2|–|") for line in cells)


def test_a_file_without_results_cannot_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert main(("bench", "compare", str(path))) == 2
    assert "holds no results of mie bench" in capsys.readouterr().err
