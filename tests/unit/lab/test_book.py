"""Check that the book has the same bytes in every process, and that pages follow from results."""

import hashlib
import os
import random
import subprocess
import sys
from itertools import accumulate, product
from pathlib import Path

import pytest
from bench.book import foresight, plots, report, tiers

ROOT = Path(__file__).parents[3]
BOOK = ROOT / "docs" / "book"
DIGESTS = {
    "capacity": "931291a7bfa99e7e",
    "batching": "e13dfa647c1a3c5e",
    "prefix": "c92aab6a27df68c9",
    "tiers": "fb031b1d08094d05",
    "pressure": "a2c9e01565dedd48",
    "chunking": "990daab1f8aaa990",
    "drafts": "f54cb93c05ee67cb",
    "policies": "75fc253aacf3a660",
    "snapshots": "493f48f4fdc77cb2",
}
"""The simulated chapters at the small scale.

An intended change of the scheduler or of the costs also changes these digests. Then run
``scripts/benchmark.py book --output-dir docs/book`` again, and put the new digests here.
"""


QUICK = ["capacity", "chunking"]


@pytest.mark.parametrize(
    "chapters", [QUICK, pytest.param([*DIGESTS], marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_results_equal_those_of_other_machines(tmp_path: Path, chapters: list[str]):
    """The small results come from another process."""
    command = [sys.executable, "-W", "error", "scripts/benchmark.py", "book", *chapters]
    subprocess.run(
        [*command, "--scale", "small", "--output-dir", tmp_path],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        timeout=240,
    )
    found = {name: digest((tmp_path / f"{name}.json").read_bytes()) for name in chapters}
    assert found == {name: DIGESTS[name] for name in chapters}


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


@pytest.mark.parametrize(
    "name",
    [
        *("capacity", "chunking"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("batching", "prefix", "pressure", "drafts", "policies", "snapshots")
        ),
    ],
)
def test_a_chapter_equals_the_book(tmp_path: Path, name: str):
    report.write_json(report.run_chapter(name, "full"), tmp_path)
    assert (tmp_path / f"{name}.json").read_bytes() == (BOOK / f"{name}.json").read_bytes()


@pytest.mark.parametrize("seed", range(40))
def test_foresight_is_the_best_of_all_choices(seed: int):
    """The flow is compared with every choice of which request uses which state."""
    rng, num_requests = random.Random(seed), 7
    intervals = [
        (start, end, rng.randint(1, 9))
        for end in range(1, num_requests)
        for start in range(end)
        if rng.random() < 0.4
    ]
    choices = [
        [None, *(each for each in intervals if each[1] == end)] for end in range(num_requests)
    ]
    best = [0] * num_requests
    for choice in product(*choices):
        chosen = [each for each in choice if each is not None]
        load = max(sum(s <= t < e for s, e, _ in chosen) for t in range(num_requests))
        best[load] = max(best[load], sum(gain for *_, gain in chosen))
    saved = foresight.most_saved(intervals, num_requests)
    assert saved == list(accumulate(best, max))[: len(saved)]
    assert saved[-1] == max(best)


def test_a_state_is_used_by_the_next_request_that_has_its_tokens():
    """Request 1 has 4 tokens in common with request 0, and 6 with a prompt that ends after 6."""
    first, other = [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 8]
    histories = [first, other, first, [9, 9, 9]]
    assert foresight.reuses(histories, [7, 6, 6, 3], 2) == [(0, 1, 4), (1, 2, 4)]
    assert foresight.reuses(histories, [7, 6, 7, 3], 2) == [(0, 1, 4), (1, 2, 4), (0, 2, 6)]


def test_no_rule_beats_foresight():
    for values in report.read_results(BOOK)["snapshots"]["loads"].values():
        for runs in values["rules"].values():
            rates = [run["hit_rate"] for run in runs]
            assert all(rate <= best for rate, best in zip(rates, values["best"], strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_the_best_cache_is_the_best_of_all_choices(seed: int):
    """Each block that is used again is kept until then or not, and all choices are compared."""
    rng = random.Random(seed)
    requests = [[0, *rng.sample(range(1, 5), rng.randint(0, 2))] for _ in range(5)]
    spans, last = [], {}
    for number, request in enumerate(requests):
        spans += [(last[block], number) for block in request if block in last]
        last |= dict.fromkeys(request, number)
    for size in range(4):
        best = 0
        for chosen in product([False, True], repeat=len(spans)):
            kept = [span for span, is_kept in zip(spans, chosen, strict=True) if is_kept]
            if all(sum(s <= t < e for s, e in kept) <= size for t in range(len(requests))):
                best = max(best, len(kept))
        assert tiers.most_hits(requests, size) == best


def test_no_cache_beats_the_best_and_a_disk_for_all_finds_what_was_seen():
    result = report.read_results(BOOK)["tiers"]
    assert result["all"]["num_found"] == result["num_seen"] == 105_710
    for row in result["memory"]:
        assert row["alone"]["num_found"] <= row["best"] <= result["num_seen"]
        assert row["large_disk"]["num_found"] == result["num_seen"]


# Pages.


def test_each_chapter_has_a_question_a_plot_a_command_and_a_surprise() -> None:
    text = (BOOK / "README.md").read_text(encoding="utf-8")
    chapters = text.split("\n## ")[1:]
    assert len(chapters) == len(report.CHAPTERS)
    for name, chapter in zip(report.CHAPTERS, chapters, strict=True):
        assert "\n\n**Question:** " in chapter, name
        assert f"](plots/{name}.svg)" in chapter, name
        assert "\n\n**Surprise:** " in chapter, name
        assert f"`python scripts/benchmark.py book {name}`" in chapter, name
        plot = (BOOK / "plots" / f"{name}.svg").read_text(encoding="utf-8")
        assert "prefers-color-scheme:dark" in plot
        assert plots.INK not in plot


def test_a_plot_follows_its_data(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install '.[docs]')")
    result = report.read_results(BOOK)["drafts"]
    plots.draw(result, tmp_path / "same.svg")
    plots.draw(result, tmp_path / "again.svg")
    result["shares"][1]["gains"][0] *= 2
    plots.draw(result, tmp_path / "other.svg")
    same, again, other = (
        (tmp_path / f"{name}.svg").read_text() for name in ("same", "again", "other")
    )
    assert same == again
    assert same != other


def test_the_pages_are_made_from_the_results(tmp_path: Path):
    folder, summary = tmp_path / "book", tmp_path / "benchmarks.md"
    folder.mkdir()
    for path in BOOK.glob("*.*"):
        (folder / path.name).write_bytes(path.read_bytes())
    report.write_page(folder)
    assert (folder / "README.md").read_text() == (BOOK / "README.md").read_text()
    page = (BOOK.parent / "benchmarks.md").read_text()
    first_line = report.summary(report.read_results(BOOK), "x").partition("\n")[0]
    summary.write_text(page.replace(first_line, "old"))
    report.update_summary(summary, folder)
    assert summary.read_text() == page
