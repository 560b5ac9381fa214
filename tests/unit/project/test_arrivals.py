"""Run the benchmark of arrivals on a simulated device, and its loads."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from bench import arrivals
from bench.azure import read_azure

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,80
2023-11-16 18:17:13.9799600,80,4000
2023-11-16 18:17:23.9799600,3,1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in arrivals.TRACES:
        (tmp_path / f"azure_{name}.csv").write_text(TRACE)
    return tmp_path


def run(folder: Path, *options: str) -> list[Any]:
    output = folder / "out"
    argv = ["--device", "h200", "--requests", "40", "--rates", "100", "--max-model-len", "256"]
    assert arrivals.main([*argv, *options, "--output", str(output)]) == 0
    assert "## " not in output.with_suffix(".md").read_text()
    rows: list[Any] = json.loads(output.with_suffix(".json").read_text())["rows"]
    return rows


def test_both_settings_get_the_same_requests_and_all_steps_are_counted(folder: Path):
    common = ("--azure", str(folder), "--set", "max_num_seqs=16")
    rows = run(folder, *common, "--compare", "max_num_batched_tokens=32")
    loads = ["Poisson", "Azure, conv", "Azure, code"]
    assert [row["load"] for row in rows] == [load for load in loads for _ in range(2)]
    assert {row["setting"] for row in rows} == {"max_num_seqs=16", "max_num_batched_tokens=32"}
    for row in rows:
        counts = {"decodes": 0, "chunks": 0}
        for has_chunks, launch, count in row["launched"]:
            assert launch in arrivals.LAUNCHES
            counts["chunks" if has_chunks else "decodes"] += count
        assert counts == {what: each["number"] for what, each in row["steps"].items()}
    for plain, small in zip(rows[::2], rows[1::2], strict=True):
        tokens = [row["tokens/s"] * row["duration"] for row in (plain, small)]
        assert tokens[0] == pytest.approx(tokens[1])
        assert small["steps"]["chunks"]["number"] > plain["steps"]["chunks"]["number"]
    assert run(folder, *common)[0]["p99_ttft_ms"] == rows[0]["p99_ttft_ms"]


def test_a_trace_keeps_its_bursts_at_another_rate(folder: Path):
    path = folder / "azure_conv.csv"
    assert [each.time_ns for each in read_azure(path)] == [0, 52_000_000, 10**10, 2 * 10**10]
    assert len(read_azure(path, 2)) == 2
    args = argparse.Namespace(azure=folder, requests=4, max_model_len=512, scale=8)
    load = arrivals.trace_of("conv", 2.0, args)
    requests = load.workload.requests
    assert [each.arrival_ns for each in requests] == [0, 5_200_000, 10**9, 2 * 10**9]
    assert [len(each.token_ids(1000, {})) for each in requests] == [256, 256, 10, 1]
    assert [each.max_tokens for each in requests] == [1, 10, 256, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rates", "0"], "--rates must be above 0; got 0"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--azure", "nowhere"], "there is no nowhere/azure_conv.csv and no azure_conv.csv.xz"),
        (["--compare", "eager"], "a setting is KEY=VALUE; got 'eager'"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: Any):
    with pytest.raises(SystemExit):
        arrivals.main(options)
    assert message in capsys.readouterr().err


def test_a_refused_setting_gives_one_line(tmp_path: Path, capsys: Any):
    assert arrivals.main(["--device", "h200", "--set", "max_num_seqs=0"]) == 2
    assert "max_num_seqs" in capsys.readouterr().err
