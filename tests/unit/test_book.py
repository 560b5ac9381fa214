"""Check that the book has the same bytes in every process, and that pages follow from results."""

import copy
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench.book import batching, capacity, chunking, prefix, pressure, published, report
from bench.book.chapter import device_costs

from mie.sim.costs import StepWork, causal_pairs

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "docs" / "book"
SLOW = ("batching", "prefix", "pressure", "policies")
DIGESTS = {
    "capacity": "931291a7bfa99e7e",
    "batching": "e13dfa647c1a3c5e",
    "prefix": "c92aab6a27df68c9",
    "pressure": "a2c9e01565dedd48",
    "chunking": "990daab1f8aaa990",
    "policies": "75fc253aacf3a660",
}
"""The simulated chapters at the small scale.

An intended change of the scheduler or of the costs also changes these digests. Then run
``scripts/benchmark.py book --output-dir docs/book`` again, and put the new digests here.
"""


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """The folder with the small results of the simulated chapters, from another process."""
    folder = tmp_path_factory.mktemp("book")
    command = [sys.executable, "-W", "error", "scripts/benchmark.py", "book", *DIGESTS]
    subprocess.run(
        [*command, "--scale", "small", "--output-dir", folder],
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        timeout=240,
    )
    return folder


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def test_results_equal_those_of_other_machines(small: Path):
    assert {name: digest((small / f"{name}.json").read_bytes()) for name in DIGESTS} == DIGESTS


@pytest.mark.parametrize(
    "name",
    [
        *("capacity", "chunking", "policies"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("batching", "prefix", "pressure")
        ),
    ],
)
def test_a_chapter_equals_the_book(tmp_path: Path, name: str):
    report.write_json(report.run_chapter(name, "full"), tmp_path)
    assert (tmp_path / f"{name}.json").read_bytes() == (BOOK / f"{name}.json").read_bytes()


# Pages.


def test_the_pages_are_made_from_the_results(tmp_path: Path):
    folder, summary = tmp_path / "book", tmp_path / "benchmarks.md"
    folder.mkdir()
    for path in BOOK.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    report.write_page(folder)
    assert (folder / "README.md").read_text() == (BOOK / "README.md").read_text()
    page = (BOOK.parent / "benchmarks.md").read_text()
    first_line = report.summary(report.read_results(BOOK), "x").partition("\n")[0]
    summary.write_text(page.replace(first_line, "old"))
    report.update_summary(summary, folder)
    assert summary.read_text() == page


def test_a_summary_file_without_marks_is_refused(tmp_path: Path):
    (tmp_path / "page.md").write_text("# nothing\n")
    with pytest.raises(ValueError, match="has no lines"):
        report.update_summary(tmp_path / "page.md", BOOK)


IDENTITIES = {"share", "watermark", "request_rate", "max_model_len", "block_size", "num_blocks"}


def changed(value, count, path=()):
    """Return a result with other numbers, except for its settings."""
    if isinstance(value, dict):
        return {name: changed(inner, count, (*path, name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [changed(inner, count, (*path, "")) for inner in value]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or "settings" in path or path[-1] in IDENTITIES:
        return copy.copy(value)
    return value * (2 + next(count) % 5)


def test_no_figure_of_a_finding_is_typed_in(small: Path):
    """With other results, every line with a finding changes."""
    for result in report.read_results(small).values():
        before, after = (findings(each) for each in (result, changed(result, itertools.count())))
        assert [here for here, other in zip(before, after, strict=True) if here == other] == []


def findings(result: dict) -> list[str]:
    """Return the column "here" of a chapter's findings."""
    table = report.section(result).split("\n\n")[0].splitlines()[2:]
    return [line.split(" | ")[1] for line in table]


# Published conditions.


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (published.lognormal_lengths, "bd04efd589fde781"),
        (published.chat_lengths, "8877c6d381adbeab"),
        (lambda: published.mixed_lengths(256, 0), "4e97e746d2a3aecf"),
        (lambda: published.poisson(300, 5).digest, "c670dd5b100b0f07"),
    ],
)
def test_draws_are_the_same_on_every_machine(values, expected):
    """Check digests of the draws.

    If this fails on a new platform, its logarithm rounds a length or an arrival differently, or
    Python draws differently. The simulated figures of the book are then not comparable.
    """
    assert digest(json.dumps(values()).encode()) == expected


def test_mixed_requests_are_like_the_published_ones():
    lengths = [pair for seed in range(20) for pair in published.mixed_lengths(256, seed)]
    answers = [answer for _, answer in lengths]
    assert sum(answers) / len(answers) == pytest.approx(31_637 / 256, rel=0.03)
    assert sum(prompt for prompt, _ in lengths) / len(lengths) == pytest.approx(103.4, rel=0.06)
    assert not [answer for answer in answers if not (32 <= answer <= 128 or 256 <= answer <= 512)]


# Chapters beside brute force.


@pytest.mark.parametrize("block_size", [1, 7, 16, 512])
def test_capacity_is_a_sum_of_ceilings(block_size):
    rng = random.Random(block_size)
    lengths = [rng.randint(1, 512) for _ in range(400)]
    num_free, count = capacity.NUM_SLOTS // block_size, 0
    while count < 400 and -(-lengths[count] // block_size) <= num_free:
        num_free -= -(-lengths[count] // block_size)
        count += 1
    found = capacity.fill(lengths, block_size)
    reserved = (capacity.NUM_SLOTS // block_size - num_free) * block_size
    assert found["num_sequences"] == count
    assert found["used"] == sum(lengths[:count]) / reserved
    assert found["wasted"] == pytest.approx(1 - found["used"])


def test_rounds_equal_those_of_seats_filled_in_turn():
    for row in batching.drain(48, 8, range(3))["rounds"]:
        answers = [answer for _, answer in published.mixed_lengths(48, row["seed"])]
        batches = [answers[start : start + 8] for start in range(0, 48, 8)]
        assert row["static"] == sum(map(max, batches))
        ends = [0] * 8  # the time at which each seat is free; the next request takes the first one
        for answer in answers:
            ends.sort()
            ends[0] += answer
        assert row["continuous"] == max(ends)


def test_a_shared_prompt_is_computed_once():
    result = prefix.run("small")
    stream = result["stream"]
    own = stream["num_requests"] * 8
    assert stream["off"]["num_prefill_tokens"] == stream["num_requests"] * 512 + own
    assert stream["on"]["num_prefill_tokens"] == 512 + own
    rates = [row["hit_rate"] for row in result["budgets"]]
    assert rates == sorted(rates)
    assert rates[0] == 0 < rates[1]


def test_every_request_that_fits_the_pool_completes():
    rows = pressure.run("small")["pools"]
    assert all(row["num_completed"] == row["num_servable"] for row in rows)
    assert rows[-1]["num_preemptions"] > 0
    assert rows[-1]["num_cut"] > 0, "the smallest pool is too large to show anything"


def test_an_unchunked_prompt_delays_the_next_token_by_its_cost():
    result = chunking.run("small")
    work = StepWork(
        num_tokens=4096,
        num_sampled=1,
        num_pairs=causal_pairs(0, 4096),
        num_context=4096,
        num_seqs=1,
        num_chunks=1,
        num_copied=0,
        num_swapped=0,
    )
    alone = device_costs().step_ns(work) / 1e6
    assert alone < result["unchunked"]["worst_itl_ms"] < 1.05 * alone
    waits = [row["worst_itl_ms"] for row in result["chunks"]]
    assert waits == sorted(waits)
    assert waits[0] < alone / 10
