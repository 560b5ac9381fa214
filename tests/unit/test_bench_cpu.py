"""Test the CPU benchmark's arithmetic and command line, and how it handles a failing engine."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_cpu
from bench.cpu.engines import EngineSpec
from bench.cpu.metrics import WORKLOADS, Limits, ModelResults, Sample, rate, shares
from bench.cpu.model_bench import (
    Child,
    ModelBench,
    PeerError,
    agreement,
    entries_of,
    grouped,
    parse_settings,
)
from bench.cpu.shapes import LLAMA, SHAPES, Costs, Format
from bench.harness import Spread, user_environment

from mie.checkpoint.config import ModelConfig

TOY = Costs.of(ModelConfig.from_hf({**LLAMA, **SHAPES["toy"]}))
F32 = Format(weight=4, cache=4)


def test_costs_of_a_toy_model_equal_a_count_by_hand():
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    weights = 2 * (attention + 3 * 64 * 128)
    assert TOY.num_weights == weights + 512 * 64  # the head, but not the embedding
    assert TOY.num_parameters == weights + 2 * 512 * 64
    assert TOY.decode_bytes(3, 10, F32) == 4 * (weights + 512 * 64) + 3 * 10 * 2 * 2 * 2 * 16 * 4
    assert TOY.decode_flops(3, 10) == 3 * (2 * TOY.num_weights + 4 * 10 * 2 * 4 * 16)
    assert TOY.prefill_flops(5) == 5 * 2 * weights + 2 * 512 * 64 + 2 * 25 * 2 * 4 * 16


def test_rates_count_as_the_workload_says():
    # The second request has its first token at 2 s; the first ends at 4 s. Between: 2 + 3 tokens.
    times = [[1.0, 2.0, 3.0, 4.0], [2.0, 2.5, 3.5, 4.0, 5.0]]
    assert rate(WORKLOADS["decode-8"], times) == pytest.approx(5 / 2)
    assert rate(WORKLOADS["prefill-4"], [[1.0], [4.0]]) == 2 * 512 / 4
    assert rate(WORKLOADS["end-to-end-64"], [[1.0, 2.0], [1.0, 5.0]]) == 4 / 5
    with pytest.raises(ValueError, match="no moment at which all decode"):
        rate(WORKLOADS["decode-8"], [[1.0, 2.0], [2.0, 3.0]])


def test_rates_are_fractions_of_the_machines():
    workload = WORKLOADS["decode-16"]  # 40 tokens of context on average
    limits = Limits(bandwidth=1e10, sgemm=1e11)
    bandwidth, sgemm = shares(workload, 160.0, TOY, F32, limits)  # ten steps a second
    assert bandwidth == pytest.approx(10 * TOY.decode_bytes(16, 40, F32) / 1e10)
    assert sgemm == pytest.approx(10 * TOY.decode_flops(16, 40) / 1e11)
    bandwidth, sgemm = shares(WORKLOADS["prefill-1"], 1024.0, TOY, F32, limits)
    assert bandwidth is None
    assert sgemm == pytest.approx(2 * TOY.prefill_flops(512) / 1e11)


def sampled(engine: str, workload: str, moment: tuple[int, int], value: float) -> Sample:
    return Sample(
        engine=engine, workload=workload, moment=moment, rate=value, time_to_first_token=0.1
    )


@pytest.fixture
def results() -> ModelResults:
    peer = "transformers-f32"
    samples = [
        *(sampled("mie", "decode-64", (0, i), value) for i, value in enumerate((10.0, 20.0, 90.0))),
        *(sampled(peer, "decode-64", (0, i), value) for i, value in enumerate((5.0, 4.0, 30.0))),
        sampled("mie", "decode-64", (1, 0), 1000.0),  # the peer was not beside it
        sampled(f"{peer}, one by one", "end-to-end-64", (0, 0), 2.0),
        sampled("mie", "end-to-end-64", (0, 0), 50.0),
    ]
    facts = {"version": "1", "load_seconds": 1.0, "loaded_bytes": 1, "peak_bytes": 2**30}
    return ModelResults(
        name="TinyLlama-1.1B",
        costs=TOY,
        limits=Limits(bandwidth=5e10, sgemm=4e11),
        formats={"mie": F32, peer: F32},
        loaded={name: facts | {"agreement": "64 of 64"} for name in ("mie", peer)},
        workloads={name: WORKLOADS[name] for name in ("decode-64", "end-to-end-64")},
        samples=samples,
    )


def test_ratios_are_taken_within_a_round(results: ModelResults):
    assert results.ratio("decode-64", "transformers-f32") == Spread(3.0, 2.0, 5.0)
    assert results.ratio("decode-64", "llama.cpp-F32") is None


def test_the_report_has_every_row_and_reads_back(results: ModelResults):
    state: dict[str, Any] = {"processor": "one"}
    values, lines = bench_cpu.report(state, [results], ["toy: ctranslate2-int8 (not installed)"])
    text = "\n".join(lines)
    assert "* skipped: toy: ctranslate2-int8 (not installed)" in text
    assert "| transformers-f32 | 5.00 (4.00–30.0) | 3.00 (2.00–5.00) × | 100.0 |" in text
    assert "| transformers-f32, one by one | 2.00 (2.00–2.00) | 25.0 (25.0–25.0) × | – |" in text
    assert len([line for line in lines if line.startswith("| mie |")]) == 3
    [read] = json.loads(json.dumps(values))["models"]
    assert read["samples"][0]["rate"] == 10.0


def test_settings_are_python_values_or_texts():
    expected = {"a": 1, "b": True, "c": "bfloat16", "d": "4", "e": "x=y"}
    assert parse_settings(["a=1", "b=True", "c=bfloat16", "d='4'", "e=x=y"]) == expected


def test_engines_are_called_by_name_or_family_and_variants_stand_beside_mie():
    variants = ["half:weight_dtype=bfloat16,seed=1", "f32:weight_dtype=float32", "np:backend=numpy"]
    names = ["llama.cpp", "mie", "ctranslate2-int8"]
    entries = entries_of(names, ["num_threads=1"], variants)
    assert [each.name for each in entries] == [
        *("mie", "mie half", "mie f32", "mie np"),
        *("llama.cpp-F32", "llama.cpp-F16", "llama.cpp-Q8_0", "ctranslate2-int8"),
    ]
    assert entries[1].settings == {"num_threads": 1, "weight_dtype": "bfloat16", "seed": 1}
    # The files are bfloat16, which backend jit keeps.
    assert [each.stored.weight for each in entries[:4]] == [2, 2, 4, 4]


def test_groups_fit_the_memory_and_share_the_first_engine():
    needs = {"mie": 4.0, "a": 4.0, "b": 3.0, "c": 5.0, "huge": 99.0, "d": 1.0}
    assert grouped(needs, 12) == [["mie", "a", "b"], ["mie", "c"], ["mie", "huge"], ["mie", "d"]]
    assert grouped({"mie": 99.0}, 12) == [["mie"]]


def test_agreement_ends_at_the_first_difference():
    assert agreement([[1, 2, 3], [4, 9, 6]], [[1, 2, 3], [4, 5, 6]]) == "4 of 6"


def test_children_get_a_users_environment(monkeypatch: pytest.MonkeyPatch):
    for name in ("OPENBLAS_CORETYPE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HOME_OF_MIE", "here")
    environment = user_environment()
    assert environment["HOME_OF_MIE"] == "here"
    assert not [name for name in environment if name.startswith(("OPENBLAS", "OMP_", "MKL_"))]


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


def test_a_failing_child_reports_the_reason(tmp_path: Path):
    spec = EngineSpec(
        family="mie",
        kind="f32",
        directory=str(tmp_path),
        converted=str(tmp_path / "converted"),
        threads=1,
        max_num_seqs=8,
        max_model_len=64,
        kv_cache_bytes=1 << 20,
    )
    for python, reason in (
        (sys.executable, r"ModelError: .*config\.json"),
        (str(tmp_path / "python"), "No such file"),
        ("false", "ended with"),
    ):
        with pytest.raises(PeerError, match=reason):
            Child(python, spec)


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
