"""Test the CPU benchmark's arithmetic and command line, and how it handles a failing engine."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_cpu
from bench.cpu.model_bench import (
    ModelBench,
)
from bench.cpu.shapes import Format

F32 = Format(weight=4, cache=4)


@pytest.mark.parametrize(
    "words",
    [
        ["--python", "mi=/bin/python"],
        ["--rounds", "0"],
        ["--threads", "0"],
        ["--mie", "x"],
        ["--mie-variant", "half"],
    ],
)
def test_bad_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        bench_cpu.parse_arguments(words)
    assert "error: " in capsys.readouterr().err


def test_a_run_names_skipped_engines_and_measures_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ModelBench, "_measure_limits", lambda self: None)
    words = ["--quick", "--threads", "1", "--engines", "mie", "llama.cpp-F32"]
    words += ["--workloads", "decode-8", "prefill-1", "--mie-variant", "odd:nonsense=1"]
    args = bench_cpu.parse_arguments([*words, "--python", "llama.cpp=/nowhere/python"])
    bench = ModelBench("toy", tmp_path, args)
    results = bench.run()
    assert results is not None
    found = [(each.workload, each.engine) for each in results.samples]
    assert found == [("decode-8", "mie"), ("prefill-1", "mie")]
    assert results.loaded["mie"]["agreement"] == "64 of 64"
    missing, odd = bench.skipped
    assert "toy: llama.cpp-F32 (" in missing
    assert "/nowhere/python" in missing
    assert "toy: mie odd (ConfigError: " in odd
    assert "nonsense" in odd
