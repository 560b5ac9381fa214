"""Test the commands for the book of benchmarks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ENVIRONMENT, error_line, mie

from mie.sim.book import TITLES
from mie.sim.book.table import CHAPTERS

WITHOUT = "import sys; sys.modules['matplotlib'] = None; import mie.cli; sys.exit(mie.cli.main())"


def test_a_chapter_prints_its_findings_and_writes_files(tmp_path: Path):
    command = [sys.executable, "-W", "error", "-c", WITHOUT, "bench", "capacity"]
    command += ["--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=240, check=True)
    text, said = done.stdout.decode(), done.stderr.decode()
    assert "16 → 112 (7.00 ×)" in text
    assert "Simulated: the scheduler and the allocator are real, and no model runs." in text
    assert "PNG skipped: plots need matplotlib (pip install mie[plot])" in said
    assert json.loads((tmp_path / "capacity.json").read_text())["benchmark"] == "capacity"
    page = (tmp_path / "README.md").read_text()
    assert "16 → 112 (7.00 ×)" in page
    assert ".png" not in page


def test_a_plot_is_a_png(tmp_path: Path):
    pytest.importorskip("matplotlib")
    mie("bench", "capacity", "--output-dir", tmp_path)
    assert (tmp_path / "capacity.png").read_bytes().startswith(b"\x89PNG")


def test_the_whole_book_runs_at_a_small_scale(tmp_path: Path):
    """This includes the real engine, in child processes."""
    done = mie("bench", "all", "--scale", "small", "--json", "--output-dir", tmp_path)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert list(found) == list(TITLES)
    assert [name for name in found if not found[name]["simulated"]] == ["engine"]
    page = (tmp_path / "README.md").read_text()
    assert [title for title in TITLES.values() if f"## {title}\n" not in page] == []
    assert CHAPTERS["engine"].panels(found["engine"])
    [model] = found["engine"]["models"]
    assert model["mie"]["peak_bytes"] is None or model["mie"]["peak_bytes"] > 10**7
    assert all(seconds > 0 for load in model["mie"]["loads"] for seconds in load["seconds"])
    contiguous, paged = (model["caches"][kind]["peak_running"] for kind in ("contiguous", "paged"))
    assert (contiguous, paged) == (8, 12)
    assert len(model["predicted"]) == len(model["mie"]["loads"])
    peer = model["transformers"]
    assert "is not installed" in peer["skipped"] if "skipped" in peer else peer["loads"]


def test_a_summary_needs_an_output_directory():
    assert "--summary needs --output-dir" in error_line(
        mie("bench", "capacity", "--summary", "page.md")
    )


def test_an_unwritable_directory_is_refused_before_the_measurement(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("no marks")
    done = mie("bench", "capacity", "--output-dir", tmp_path / "book", "--summary", page)
    assert "has no lines <!-- book: begin" in error_line(done)
    assert not done.stdout
    (tmp_path / "file").write_text("")
    done = mie("bench", "capacity", "--output-dir", tmp_path / "file" / "book")
    assert done.returncode == 2
    assert not done.stdout
