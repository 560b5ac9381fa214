"""Test ``mie bench`` on a simulated device and on the real engine."""

import json
import subprocess
from pathlib import Path

import pytest
from command_line import COMMAND, ENVIRONMENT, mie
from deadlines import PATIENCE

from mie.base.version import __version__

SIMULATED = ("--device", "a10g", "--model-shape", "TinyLlama-1.1B")


def results(*arguments: str | Path) -> dict:
    """Return the object that ``--json`` printed."""
    process = mie("bench", *arguments, "--json")
    assert process.returncode == 0, process.stderr.decode()
    assert process.stderr == b""
    return json.loads(process.stdout)


def computed(text: bytes) -> str:
    """Return the results of a run as text, without the date and the file's name."""
    found = json.loads(text)
    del found["date"], found["settings"]["result_filename"]
    return json.dumps(found)


@pytest.mark.slow
def test_a_simulation_gives_the_same_bytes_in_another_process(tmp_path: Path):
    """The other process has other hash seeds. The run has preemptions, chunks, prefix hits and
    forks."""
    path = tmp_path / "agents.json"
    assert mie("sim", "workload", "agents", "-o", path).returncode == 0
    options = ["--num-blocks", "150", "--max-num-seqs", "16", "--save-detailed", "--json"]
    command = [*COMMAND, "bench", "serve", *SIMULATED, "--workload", str(path), *options]
    outputs = [
        subprocess.run(
            [*command, "--result-dir", str(tmp_path), "--result-filename", f"{seed}.json"],
            capture_output=True,
            env={**ENVIRONMENT, "PYTHONHASHSEED": str(seed)},
            check=True,
            timeout=PATIENCE,
        ).stdout
        for seed in (1, 2)
    ]
    assert computed(outputs[0]) == computed(outputs[1])
    found = json.loads(outputs[0])
    assert found["num_preemptions"] > 0
    assert found["num_cached_tokens"] > 0
    files = [(tmp_path / f"{seed}.json").read_bytes() for seed in (1, 2)]
    assert computed(files[0]) == computed(files[1])
    details = json.loads(files[0])
    assert len(details["ttfts"]) == found["num_prompts"] == found["completed"]
    assert sum(details["output_lens"]) == found["total_output_tokens"]


def test_simulated_figures_have_not_changed():
    """All quantities are integers, so these figures hold on every machine."""
    found = results("serve", *SIMULATED, "--num-prompts", "40", "--request-rate", "10")
    names = ("duration", "num_steps", "median_ttft_ms", "mean_e2el_ms", "p99_itl_ms", "peak_blocks")
    assert {name: found[name] for name in names} == FIGURES


FIGURES = {
    "duration": 4.975609309,
    "num_steps": 858,
    "median_ttft_ms": 9.611235,
    "mean_e2el_ms": 361.541831875,
    "p99_itl_ms": 7.37364449,
    "peak_blocks": 61,
}


def test_bench_serve_has_vllms_fields():
    options = ("--goodput", "ttft:30", "--metric-percentiles", "50,99.9", "--max-concurrency", "4")
    found = results(
        "serve", *SIMULATED, "--num-prompts", "12", *options, "--percentile-metrics", "ttft,e2el"
    )
    assert found["request_rate"] == "inf"
    assert found["max_concurrency"] == 4
    assert 0 < found["request_goodput"] <= found["request_throughput"]
    assert found["p50_ttft_ms"] == found["median_ttft_ms"] <= found["p99.9_ttft_ms"]
    assert "p99_ttft_ms" not in found
    assert "mean_itl_ms" not in found
    assert found["errors"] == {}


def test_bench_throughput_has_vllms_fields_and_writes_them(tmp_path: Path):
    path = tmp_path / "out.json"
    options = ("--num-prompts", "5", "--random-input-len", "40", "--random-range-ratio", "0.5")
    found = results("throughput", *SIMULATED, *options, "--output-json", path)
    assert json.loads(path.read_text()) == found
    assert found["mie"] == __version__
    assert found["settings"]["random_input_len"] == 40
    assert found["num_requests"] == 5
    assert found["total_num_tokens"] == found["total_input_tokens"] + found["total_output_tokens"]
    assert 5 * 20 <= found["total_input_tokens"] <= 5 * 60
    assert 5 * 32 <= found["total_output_tokens"] <= 5 * 96
    assert found["tokens_per_second"] == found["total_num_tokens"] / found["elapsed_time"]


def test_bench_latency_has_vllms_fields():
    found = results(
        "latency", *SIMULATED, "--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "0"
    )
    assert len(found["latencies"]) == 3
    assert (found["simulated"], found["device"]) == (True, "a10g")
    assert found["model_id"] == "TinyLlama-1.1B"
    assert found["percentiles"]["50"] == pytest.approx(found["avg_latency"], rel=1e-6)


def test_the_table_is_markdown():
    process = mie("bench", "serve", *SIMULATED, "--num-prompts", "3")
    place, blank, *lines = process.stdout.decode().splitlines()
    assert (place, blank) == ("Simulated: TinyLlama-1.1B on a10g", "")
    assert lines[2].split() == ["|", "Successful", "requests", "|", "3", "|"]
    assert any(line.startswith("| Time to first token   |") for line in lines)
    assert all(line.startswith("|") for line in lines if line)


def test_the_real_engine_is_measured(tiny, tmp_path: Path):
    trace = tmp_path / "run.jsonl"
    model = ("--model", tiny["llama"].directory, "--num-blocks", "64")
    options = ("--num-prompts", "6", "--random-input-len", "9", "--random-output-len", "5")
    found = results("serve", *model, *options, "--n", "2", "--trace", trace)
    assert found["simulated"] is False
    assert found["completed"] == 6
    assert found["total_output_tokens"] == 60
    assert found["mean_ttft_ms"] > 0
    assert trace.read_text().count('"event":"add"') == 6


def test_a_refused_request_is_named(tiny):
    model = ("--model", tiny["llama"].directory, "--max-model-len", "50")
    process = mie("bench", "throughput", *model, "--num-prompts", "1", "--json")
    assert process.returncode == 1
    found = json.loads(process.stdout)
    assert found["failed"] == 1
    assert "128 tokens; the context holds 50" in found["errors"]["0"]
