"""Check that the book has the same bytes in every process, and that pages follow from results."""

import copy
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mie
from mie.errors import ConfigError
from mie.sim.book import TITLES, report
from mie.sim.book.plots import COLOURS
from mie.sim.book.table import CHAPTERS

SIMULATED = [name for name in TITLES if name != "engine"]
BOOK = Path(mie.__file__).parents[1] / "docs" / "book"
PROGRAM = """
import sys
from pathlib import Path
from mie.sim.book import report
for name in sys.argv[2:]:
    report.write_json(report.run_chapter(name, "small"), Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The folder with the small results of the simulated chapters, from another process."""
    return run_in_process(tmp_path_factory.mktemp("book"), "1")


def run_in_process(directory: Path, seed: str) -> Path:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(directory), *SIMULATED]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed}, timeout=120)
    return directory


def results(directory: Path) -> list[dict]:
    return list(report.read_results(directory).values())


DIGESTS = {
    "capacity": "931291a7bfa99e7e",
    "batching": "e13dfa647c1a3c5e",
    "prefix": "c92aab6a27df68c9",
    "pressure": "a2c9e01565dedd48",
    "chunking": "990daab1f8aaa990",
    "policies": "75fc253aacf3a660",
}


@pytest.mark.parametrize("name", SIMULATED)
def test_results_equal_those_of_other_machines(small: Path, name: str):
    """An intended change of the scheduler or of the costs also changes these digests.

    Then run ``mie bench all --output-dir docs/book`` again, and put the new digests here.
    """
    found = hashlib.sha256((small / f"{name}.json").read_bytes()).hexdigest()
    assert found[:16] == DIGESTS[name]


@pytest.mark.parametrize("name", ["capacity", "chunking", "policies"])
def test_the_quick_chapters_equal_the_book(tmp_path: Path, name: str):
    report.write_json(report.run_chapter(name, "full"), tmp_path)
    assert (tmp_path / f"{name}.json").read_bytes() == (BOOK / f"{name}.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batching", "prefix", "pressure"])
def test_the_slow_chapters_equal_the_book(tmp_path: Path, name: str):
    report.write_json(report.run_chapter(name, "full"), tmp_path)
    assert (tmp_path / f"{name}.json").read_bytes() == (BOOK / f"{name}.json").read_bytes()


def test_the_page_of_the_book_is_made_from_its_results(tmp_path: Path):
    for path in BOOK.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    report.write_page(tmp_path)
    assert (tmp_path / "README.md").read_text() == (BOOK / "README.md").read_text()


def test_chapters_and_titles_match():
    assert list(CHAPTERS) == list(TITLES)


def test_panels_have_points_and_units(small: Path):
    for result in [*results(small), *results(BOOK)]:
        panels = CHAPTERS[result["benchmark"]].panels(result)
        assert panels
        for panel in panels:
            assert panel.title
            assert panel.y_label
            assert 0 < len(panel.series) <= len(COLOURS)
            for series in panel.series:
                assert len(series.x) == len(series.y) > 0
                assert any(value is not None for value in series.y)


def numbers(value, path=()):
    """Yield the places of the measured numbers in a result."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from numbers(inner, (*path, index))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path


def test_no_figure_in_a_text_is_typed_in(small: Path):
    """With other results, every line with a finding changes."""
    for result in results(small):
        changed = copy.deepcopy(result)
        for index, path in enumerate(numbers(result)):
            *inner, last = path
            place = changed
            for step in inner:
                place = place[step]
            if path[0] != "settings" and last not in IDENTITIES:
                place[last] *= 2 + index % 5
        chapter = CHAPTERS[result["benchmark"]]
        pairs = zip(chapter.headlines(result), chapter.headlines(changed), strict=True)
        assert [before.what for before, after in pairs if before.here == after.here] == []


IDENTITIES = {"share", "watermark", "request_rate", "max_model_len", "block_size", "num_blocks"}


# The summary in another file.


def test_a_summary_is_written_between_its_marks(small: Path, tmp_path: Path):
    for path in small.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    folder = tmp_path / "book"
    folder.mkdir()
    for path in small.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    file = tmp_path / "benchmarks.md"
    file.write_text(f"# Before\n{report.BEGIN}\nold\n{report.END}\n# After\n")
    report.update_summary(file, folder)
    text = file.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("# After\n")
    assert "old" not in text
    for name in SIMULATED:
        assert f"[{TITLES[name]}](book/README.md#" in text
    report.update_summary(file, folder)
    assert file.read_text() == text


def test_a_summary_file_without_marks_or_elsewhere_is_refused(small: Path, tmp_path: Path):
    file = tmp_path / "page.md"
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="has no lines"):
        report.update_summary(file, tmp_path)
    file.write_text(f"{report.BEGIN}\n{report.END}\n")
    with pytest.raises(ConfigError, match="take a file above it"):
        report.update_summary(file, small)
