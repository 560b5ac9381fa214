"""The hardware's check and benchmark, gone through without hardware."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_gpu
import gpu_check

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> gpu_check.Run:
    return gpu_check.Run(directory=tmp_path, is_dry_run=True)


def results(directory: Path) -> tuple[dict[str, Any], str]:
    values = json.loads((directory / "gpu_check.json").read_text())
    return values, (directory / "gpu_check.md").read_text()


# The check.


@needs_compiler
def test_a_dry_run_goes_through_every_part(tmp_path: Path):
    assert gpu_check.main(["--dry-run", "--output", str(tmp_path), "--commit", "abc123"]) == 0
    values, page = results(tmp_path)
    statuses = {part["name"]: part["status"] for part in values["parts"]}
    assert statuses == dict.fromkeys(gpu_check.PARTS, "passed")
    assert values["state"]["commit"] == "abc123"
    assert values["parts"][1]["details"]["passed"] > 0
    assert values["parts"][-1]["details"]["attention"]
    for words in ("dry run", "* commit: abc123", "| parity | passed |", "### Decode attention"):
        assert words in page
    assert "exit code: 0" in (tmp_path / "gpu_check.log").read_text()


def test_without_a_device_one_line_says_so(tmp_path: Path):
    code = "import sys; sys.modules['cupy'] = None; import gpu_check; sys.exit(gpu_check.main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "--child", "environment"],
        cwd=ROOT / "scripts",
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert len(done.stdout.splitlines()) == 1
    assert "needs CuPy" in done.stdout


def test_nothing_runs_after_a_failed_environment(
    run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    failed = gpu_check.Outcome(status="failed", reason="no device")
    parts = {**gpu_check.PARTS, "environment": (lambda run, seconds: failed, 10)}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    assert gpu_check.check(run, list(parts), 100, {"date": "today"}) == 2
    assert len(results(run.directory)[0]["parts"]) == 1
    assert capsys.readouterr().err == "no device\n"


def test_parts_without_time_are_skipped_by_name(tmp_path: Path):
    arguments = ["--dry-run", "--output", str(tmp_path), "--seconds", "0"]
    assert gpu_check.main(arguments) == 0
    values, page = results(tmp_path)
    assert {part["status"] for part in values["parts"]} == {"skipped"}
    assert all(f"| {name} | skipped | 0 | no time left |" in page for name in gpu_check.PARTS)


def test_a_part_that_breaks_leaves_the_others_their_turn(
    run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch
):
    def broken(run: gpu_check.Run, seconds: float) -> gpu_check.Outcome:
        raise ValueError("by mistake")

    def found(run: gpu_check.Run, seconds: float) -> gpu_check.Outcome:
        return gpu_check.Outcome(status="failed", details={"failures": ["test_x: 1 is not 2"]})

    monkeypatch.setattr(gpu_check, "PARTS", {"one": (broken, 10), "two": (found, 10)})
    assert gpu_check.check(run, ["one", "two"], 100, {"date": "today"}) == 1
    values, page = results(run.directory)
    assert values["parts"][0]["reason"] == "gpu_check itself: ValueError: by mistake"
    assert "## Failed: two\n\n* `test_x: 1 is not 2`" in page


def test_a_process_ends_when_its_time_is_up(run: gpu_check.Run):
    code = "import time; print('begun', flush=True); time.sleep(60)"
    done = run.execute([sys.executable, "-c", code], 1.0)
    assert done.exit_code is None
    assert gpu_check.how_it_ended(done, 1.0) == "its time was up (1 s)"
    assert "begun" in (run.directory / "gpu_check.log").read_text()


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        (("clean", "clean", "clean"), "passed"),
        (("clean", "its time was up (9 s)", "clean"), "passed"),
        (("its time was up (9 s)",) * 3, "skipped"),
        (("clean", "2 hazards displayed", "its time was up (9 s)"), "failed"),
    ],
)
def test_verdicts_of_the_sanitizers(
    run: gpu_check.Run, monkeypatch: pytest.MonkeyPatch, verdicts: tuple[str, ...], status: str
):
    answers = dict(zip(gpu_check.SANITIZERS, verdicts, strict=True))
    monkeypatch.setattr(gpu_check, "sanitize", lambda run, tool, seconds: answers[tool])
    assert gpu_check.sanitizers(run, 30).status == status


def test_tests_are_counted_from_their_junit_file(tmp_path: Path):
    path = tmp_path / "tests.xml"
    path.write_text(
        "<testsuites><testsuite>"
        "<testcase name='a'/><testcase name='b'><skipped/></testcase>"
        "<testcase name='c'><failure message='1 != 2&#10;more'/></testcase>"
        "</testsuite></testsuites>"
    )
    counts = gpu_check.junit_counts(path)
    assert counts == {"passed": 1, "failed": 1, "skipped": 1, "failures": ["c: 1 != 2"]}


def test_no_test_run_is_a_failure(run: gpu_check.Run):
    outcome = gpu_check.run_pytest(run, "none", ["tests/unit/test_sizes.py"], "no_such_test", 60)
    assert outcome.status == "failed"


# The benchmark.


@pytest.mark.parametrize(("num_seqs", "context"), [(64, 4096), (256, 1024), (8, 4096), (3, 40)])
def test_ragged_lengths_have_the_same_sum(num_seqs: int, context: int):
    lengths = bench_gpu.ragged_lengths(num_seqs, context)
    assert len(lengths) == num_seqs
    assert sum(lengths) == num_seqs * context
    assert min(lengths) >= max(1, context // 32)
    assert max(lengths) <= 8192
    assert len(set(lengths)) > 1


def test_useful_bytes_are_those_of_the_notes():
    """Keys and values of the first row are 1073.7 MB; queries and outputs add 1 MB."""
    first = bench_gpu.UNIFORM[0]
    assert first.useful_bytes == 2**30 + 2 * 64 * 32 * 128 * 2


def test_rounding_by_bits_is_rounding():
    wide = np.random.default_rng(0).standard_normal(1000)
    dtype = bench_gpu.DTYPES["bfloat16"]
    got = bench_gpu.rounded(wide, dtype).astype(float)
    np.testing.assert_allclose(got, wide, rtol=2**-8)


class FakeCuda:
    """Streams, graphs and events that count; ``refuses``: nothing can be captured."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.num_replays, self.now = refuses, 0, 0.0
        cuda = SimpleNamespace(
            MemoryPool=lambda: SimpleNamespace(malloc=None),
            using_allocator=lambda malloc: self,
            Event=lambda: SimpleNamespace(record=self._record, synchronize=lambda: None),
            get_elapsed_time=lambda start, end: 2.0,
        )
        self.xp = SimpleNamespace(cuda=cuda)

    def _record(self, stream: Any) -> None:
        self.now += 1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass

    # The stream.

    def synchronize(self) -> None:
        pass

    def begin_capture(self) -> None:
        if self.refuses:
            raise RuntimeError("not permitted\nreally")

    def end_capture(self) -> Any:
        return SimpleNamespace(launch=self._replay)

    def _replay(self, stream: Any) -> None:
        self.num_replays += 1


@pytest.mark.parametrize("refuses", [False, True])
def test_samples_are_of_a_graph_or_say_why_not(refuses: bool):
    fake, called = FakeCuda(refuses), []
    device = object.__new__(bench_gpu.CupyDevice)
    device.xp = fake.xp
    device._stream = fake
    samples = device.samples([lambda: called.append(1)] * 4, 5)
    assert samples.values == [500.0] * 5  # 2 ms for 4 calls
    if refuses:
        assert samples.method == "eager (RuntimeError: not permitted)"
        assert len(called) == 4 + 6 * 4
    else:
        assert samples.method == "graph"
        assert (len(called), fake.num_replays) == (8, 7)


def test_versions_take_turns_and_one_that_fails_is_a_row():
    order: list[str] = []

    def version(name: str, us: float) -> Any:
        def measure() -> bench_gpu.Samples:
            order.append(name)
            return bench_gpu.Samples(method="graph", values=[us + len(order), us])

        return measure

    def broken() -> bench_gpu.Samples:
        raise RuntimeError("no kernel")

    timings = bench_gpu.timed_in_turns({"a": version("a", 1), "bad": broken, "b": version("b", 5)})
    assert order == ["a", "b", "b", "a"]
    assert timings["bad"] == {"reason": "RuntimeError: no kernel"}
    assert timings["a"]["num_samples"] == 4
    assert timings["a"]["noise"] > 0


@needs_compiler
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    report = bench_gpu.Report(state={}, prefix=None, is_dry_run=True)
    monkeypatch.setattr(bench_gpu, "attention_error", lambda *_: math.nan)
    bench_gpu.bench_attention(bench_gpu.DryDevice(), bench_gpu.TINY_SHAPE, report)
    [row] = report.attention
    assert row["reason"] == "wrong result, not timed"
    assert report.failures
    page = bench_gpu.as_markdown(vars(report))
    assert "n/a: wrong result, not timed" in page
    assert "### Failed" in page


def test_goals_are_met_or_missed():
    def engine(name: str, rate: float, **more: float) -> dict[str, Any]:
        sizes = {"num_requests": 64, "num_tokens": 150, "peak_bytes": None}
        return {"model": "m", "engine": name, "tokens_per_s": rate, **sizes, **more}

    row = {
        **vars(bench_gpu.UNIFORM[0]),
        "shape": str(bench_gpu.UNIFORM[0]),
        "version": "mie",
        "median_us": 290.0,
        "share_of_copy": 0.9,
        "share_of_read": 0.86,
    }
    report = bench_gpu.Report(state={}, prefix=None, is_dry_run=False)
    report.attention = [row]
    report.end_to_end = [engine("mie", 2000, over_floor=1.7), engine("transformers", 50)]
    lines = "\n".join(bench_gpu.goals(vars(report)))
    assert "share of the ceiling: 0.86 of 0.85: met" in lines
    assert "decode at 64: 1.70 × the floor of 1.5: missed" in lines
    assert "64 requests over generate: 40.00 of 30: met" in lines
