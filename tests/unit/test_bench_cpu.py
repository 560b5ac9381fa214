"""Test the CPU benchmark's arithmetic and command line, and how it handles a failing engine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_cpu
from bench.cpu import model_bench
from bench.cpu.children import Child, PeerError, child_environment
from bench.cpu.engines import EngineSpec
from bench.cpu.entries import entries_of, grouped, mie_entries, parse_settings
from bench.cpu.goals import GOALS, goals_reached, verdict
from bench.cpu.metrics import (
    WORKLOADS,
    Limits,
    Sample,
    attention_share,
    overhead,
    quick,
    rate,
    sample,
    shares,
)
from bench.cpu.model_bench import ModelBench, agreement
from bench.cpu.report import as_json, markdown
from bench.cpu.results import ModelResults, ratio, rows_of
from bench.cpu.shapes import LLAMA, SHAPES, Costs, Format

from mie.checkpoint.config import ModelConfig

TOY = Costs.of(ModelConfig.from_hf({**LLAMA, **SHAPES["toy"]}))
F32 = Format(weight=4, cache=4)
LIMITS = Limits(bandwidth=1e10, sgemm=1e11)


def test_costs_of_a_toy_model_equal_a_count_by_hand() -> None:
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    weights = 2 * (attention + 3 * 64 * 128)
    assert TOY.num_weights == weights + 512 * 64  # the head, but not the embedding
    assert TOY.num_parameters == weights + 2 * 512 * 64
    assert TOY.decode_bytes(3, 10, F32) == 4 * (weights + 512 * 64) + 3 * 10 * 2 * 2 * 2 * 16 * 4
    assert TOY.decode_flops(3, 10) == 3 * (2 * TOY.num_weights + 4 * 10 * 2 * 4 * 16)
    assert TOY.prefill_flops(5) == 5 * 2 * weights + 2 * 512 * 64 + 2 * 25 * 2 * 4 * 16


def test_a_tied_head_is_read_once() -> None:
    costs = Costs.of(ModelConfig.from_hf({**LLAMA, **SHAPES["SmolLM2-135M"]}))
    assert costs.num_weights == costs.num_parameters
    assert round(costs.num_parameters / 1e6) == 134


def test_decode_rate_counts_only_steps_when_all_requests_decode() -> None:
    # The second request has its first token at 2 s; the first ends at 4 s. Between: 2 + 3 tokens.
    times = [[1.0, 2.0, 3.0, 4.0], [2.0, 2.5, 3.5, 4.0, 5.0]]
    assert rate(WORKLOADS["decode-8"], times) == pytest.approx(5 / 2)
    assert overhead([(2.0, 0.9), (3.0, 0.75), (4.0, 0.75), (5.0, 0.1)], times) == pytest.approx(
        0.25
    )


def test_decode_rate_needs_a_moment_when_all_requests_decode() -> None:
    with pytest.raises(ValueError, match="no moment at which all decode"):
        rate(WORKLOADS["decode-8"], [[1.0, 2.0], [2.0, 3.0]])


def test_prefill_and_end_to_end_rates() -> None:
    assert rate(WORKLOADS["prefill-4"], [[1.0], [4.0]]) == 2 * 512 / 4
    assert rate(WORKLOADS["end-to-end-64"], [[1.0, 2.0], [1.0, 5.0]]) == 4 / 5


def test_a_sample_is_the_median_of_a_round() -> None:
    answers = [{"times": [[t, 2 * t]], "steps": [(2 * t, 0.5 * t)]} for t in (1.0, 2.0, 4.0)]
    got = sample(WORKLOADS["decode-1"], answers, model="toy", engine="mie", moment=(0, 0))
    assert (got.rate, got.time_to_first_token, got.overhead) == (0.5, 2.0, 0.5)


def test_rates_are_fractions_of_the_machines() -> None:
    workload = WORKLOADS["decode-16"]  # 40 tokens of context on average
    bandwidth, sgemm = shares(workload, 160.0, TOY, F32, LIMITS)  # ten steps a second
    assert bandwidth == pytest.approx(10 * TOY.decode_bytes(16, 40, F32) / 1e10)
    assert sgemm == pytest.approx(10 * TOY.decode_flops(16, 40) / 1e11)
    bandwidth, sgemm = shares(WORKLOADS["prefill-1"], 1024.0, TOY, F32, LIMITS)
    assert bandwidth is None
    assert sgemm == pytest.approx(2 * TOY.prefill_flops(512) / 1e11)


def test_attention_share_takes_the_weights_out() -> None:
    """The machine reads weights at any speed, and the cache at half the bandwidth."""
    limits = Limits(bandwidth=1e6, sgemm=1e10)
    cache = 16 * TOY.num_kv_numbers * 4
    long, short = WORKLOADS["context-16"], WORKLOADS["decode-16"]
    rates = [16 / (0.3 + cache * each.mean_context / 0.5e6) for each in (long, short)]
    share = attention_share((long, rates[0]), (short, rates[1]), TOY, F32, limits)
    assert share == pytest.approx(0.5)


def sampled(engine: str, workload: str, moment: tuple[int, int], value: float) -> Sample:
    return Sample(
        model="toy",
        engine=engine,
        workload=workload,
        moment=moment,
        rate=value,
        time_to_first_token=0.1,
        overhead=0.02 if engine == "mie" else None,
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


def test_ratios_are_taken_within_a_round(results: ModelResults) -> None:
    spread = ratio(results, "decode-64", "mie", "transformers-f32")
    assert spread is not None
    assert (spread.least, spread.median, spread.most) == (2.0, 3.0, 5.0)
    assert ratio(results, "decode-64", "mie", "llama.cpp-F32") is None


def test_goals_are_met_or_missed_by_ratio(results: ModelResults) -> None:
    found = {each.goal.text: each for each in goals_reached([results], avx512=True)}
    assert {text: each.values["mie"] for text, each in found.items()} == {
        "the same, against transformers, one static batch": 3.0,
        "64 requests end to end, against transformers one by one": 25.0,
        "everything but forward pass and sampling, 64 requests, of the step": 0.02,
    }
    assert [verdict(each.goal, each.values["mie"]) for each in found.values()] == [
        "aim",
        "must",
        "must",
    ]
    assert goals_reached([results], avx512=False) == []
    assert all(verdict(goal, goal.must) in ("must", "aim") for goal in GOALS)
    assert all(verdict(goal, 0.999 * goal.must) == "missed" for goal in GOALS[:9])


def test_report_has_every_row_and_reads_back(results: ModelResults) -> None:
    state: dict[str, Any] = {"cpu": "one", "avx512": True}
    text = markdown(state, [results], ["toy: ctranslate2-int8 (not installed)"])
    assert "* skipped: toy: ctranslate2-int8 (not installed)" in text
    assert "| transformers-f32 | 5.00 (4.00–30.0) | 3.00 (2.00–5.00) × | 100.0 |" in text
    assert "| transformers-f32, one by one | 2.00 (2.00–2.00) | 25.0 (25.0–25.0) × |" in text
    widths = [line.count("|") for line in text.splitlines() if line.startswith("| mie |")]
    assert widths == [8, 8, 8]  # the engine's facts and two workloads
    read = json.loads(json.dumps(as_json(state, [results], [])))
    assert len(read["models"][0]["rows"]) == len(rows_of(results)) == 4
    assert read["models"][0]["samples"][0]["rate"] == 10.0


def test_settings_are_python_values_or_texts() -> None:
    assert parse_settings(["a=1", "b=True", "c=bfloat16", "d='4'", "e=x=y"]) == {
        "a": 1,
        "b": True,
        "c": "bfloat16",
        "d": "4",
        "e": "x=y",
    }
    with pytest.raises(ValueError, match="KEY=VALUE; got 'a'"):
        parse_settings(["a"])


def test_variants_are_listed_beside_mie() -> None:
    variants = ["half:weight_dtype=bfloat16,seed=1", "f32:weight_dtype=float32", "np:backend=numpy"]
    mine = mie_entries(["num_threads=1"], variants)
    assert [each.name for each in mine] == ["mie", "mie half", "mie f32", "mie np"]
    assert mine[1].settings == {"num_threads": 1, "weight_dtype": "bfloat16", "seed": 1}
    # The files are bfloat16, which backend jit keeps.
    assert [each.stored.weight for each in mine] == [2, 2, 4, 4]
    with pytest.raises(ValueError, match=r"NAME:KEY=VALUE,\.\.\.; got 'half'"):
        mie_entries([], ["half"])


def test_engines_are_called_by_name_or_family() -> None:
    mine = mie_entries([], [])
    names = [each.name for each in entries_of(["llama.cpp", "mie", "ctranslate2-int8"], mine)]
    assert names == ["mie", "llama.cpp-F32", "llama.cpp-F16", "llama.cpp-Q8_0", "ctranslate2-int8"]


def test_groups_fit_a_table_and_share_the_first_engine() -> None:
    needs = {"mie": 4.0, "a": 4.0, "b": 3.0, "c": 5.0, "huge": 99.0, "d": 1.0}
    assert grouped(needs, 12) == [["mie", "a", "b"], ["mie", "c"], ["mie", "huge"], ["mie", "d"]]
    assert grouped({"mie": 99.0}, 12) == [["mie"]]


def test_agreement_ends_at_the_first_difference() -> None:
    assert agreement([[1, 2, 3], [4, 9, 6]], [[1, 2, 3], [4, 5, 6]]) == "4 of 6"


def test_children_get_a_users_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_CORETYPE", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HOME_OF_MIE", "here")
    environment = child_environment(without_avx512=False)
    assert environment["HOME_OF_MIE"] == "here"
    assert not [name for name in environment if name.startswith(("OPENBLAS", "OMP_", "MKL_"))]
    assert child_environment(without_avx512=True)["OPENBLAS_CORETYPE"] == "Haswell"


@pytest.mark.parametrize(
    "words",
    [["--python", "mi=/bin/python"], ["--rounds", "0"], ["--threads", "0"], ["--mie", "x"]],
)
def test_bad_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_cpu.parse_arguments(words)
    assert "error: " in capsys.readouterr().err


def spec(family: str, directory: Path) -> EngineSpec:
    return EngineSpec(
        family=family,
        kind="f32",
        directory=str(directory),
        converted=str(directory / "converted"),
        threads=1,
        max_num_seqs=8,
        max_model_len=64,
        kv_cache_bytes=1 << 20,
    )


def test_a_failing_child_reports_the_reason(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"ModelError: .*config\.json"):
        Child(sys.executable, spec("mie", tmp_path), child_environment(False))
    with pytest.raises(PeerError, match="No such file"):
        Child(str(tmp_path / "python"), spec("mie", tmp_path), child_environment(False))
    with pytest.raises(PeerError, match="ended with"):
        Child("false", spec("mie", tmp_path), child_environment(False))


def test_a_run_names_skipped_engines_and_measures_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelBench, "_measure_limits", lambda self: self._limits.append(LIMITS))
    words = ["--quick", "--threads", "1", "--engines", "mie", "llama.cpp-F32"]
    words += ["--workloads", "decode-8", "prefill-1", "--mie-variant", "odd:nonsense=1"]
    args = bench_cpu.parse_arguments([*words, "--python", "llama.cpp=/nowhere/python"])
    bench = model_bench.ModelBench("toy", tmp_path, args)
    results = bench.run()
    assert results is not None
    assert [(row.workload, row.engine) for row in rows_of(results)] == [
        ("decode-8", "mie"),
        ("prefill-1", "mie"),
    ]
    decoded = rows_of(results)[0]
    assert decoded.overhead is not None
    assert 0 < decoded.overhead < 1
    assert results.loaded["mie"]["agreement"] == "64 of 64"
    assert len(bench.skipped) == 2
    assert "toy: llama.cpp-F32 (" in bench.skipped[0]
    assert "/nowhere/python" in bench.skipped[0]
    assert "toy: mie odd (ConfigError: " in bench.skipped[1]
    assert "nonsense" in bench.skipped[1]


def test_quick_workloads_are_small() -> None:
    for workload in map(quick, WORKLOADS.values()):
        assert workload.length <= 76
        assert workload.num_new_tokens == 1 or workload.num_new_tokens == 12
