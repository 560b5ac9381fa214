"""Test ``mie sim``: from a recorded run to a prediction of another."""

import json
from pathlib import Path

import pytest
from command_line import mie

from mie.sim.loads import PRESETS, calibration


def run(*arguments: str | Path) -> str:
    """Return the standard output of a successful command."""
    process = mie(*arguments)
    assert process.returncode == 0, process.stderr.decode()
    return process.stdout.decode()


def test_a_workload_is_written_to_standard_output_or_a_file(tmp_path: Path):
    path = tmp_path / "load.json"
    assert run("sim", "workload", "burst", "--seed", "3", "-o", path) == ""
    text = path.read_text(encoding="utf-8")
    assert (
        run("sim", "workload", "burst", "--seed", "3") == text == PRESETS["burst"](seed=3).to_json()
    )
    assert run("sim", "workload", "list").split() == list(PRESETS)


def test_devices_and_models_are_listed():
    text = run("sim", "devices")
    assert "| h200             | 4,800 |   989.0 |" in text
    assert "data sheet" in text
    assert "1,100,048,384" in text


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory, tiny) -> Path:
    """The log of the tiny model under a small calibration load."""
    root = tmp_path_factory.mktemp("trace")
    load = root / "load.json"
    load.write_text(calibration(max_requests=4, output_len=6).to_json(), encoding="utf-8")
    path = root / "run.jsonl"
    model = ("--model", tiny["llama"].directory, "--num-blocks", "400")
    assert mie("bench", "throughput", *model, "--workload", load, "--trace", path).returncode == 1
    return path  # the prompts that are longer than the tiny context were refused


def test_a_recorded_run_can_be_calibrated_and_predicted(trace: Path, tmp_path: Path):
    costs = tmp_path / "costs.json"
    process = mie("sim", "calibrate", trace, "-o", costs)
    assert process.returncode == 0
    assert b"| a step " in process.stdout
    assert b"relative error of a step: median" in process.stderr
    assert json.loads(costs.read_text())["trace"] == "run.jsonl"
    assert json.loads(run("sim", "calibrate", trace)) == json.loads(costs.read_text())
    found = json.loads(run("sim", "predict", trace, "--costs", costs, "--json"))
    assert found["predicted"]["completed"] == found["measured"]["completed"]
    assert found["predicted"]["total_output_tokens"] == found["measured"]["total_output_tokens"]
    table = run("sim", "predict", trace, "--costs", costs)
    assert "| duration (s)      |" in table
    simulated = f"Simulated with the costs in {costs}: device and model as recorded in run.jsonl"
    assert table.startswith(f"Predicted: {simulated}\n")
    assert found["predicted"]["simulated"] is True
    assert found["predicted"]["device"] == "as recorded in run.jsonl"
    assert found["measured"]["simulated"] is False
    load = tmp_path / "recorded.json"
    assert run("sim", "extract", trace, "-o", load) == ""
    bench = ("bench", "throughput", "--costs", costs, "--num-blocks", "400", "--json")
    again = json.loads(run(*bench, "--workload", load))
    assert again["duration"] == found["predicted"]["duration"]
    assert (again["simulated"], again["model_id"]) == (True, "as recorded in run.jsonl")


def test_a_pool_that_is_too_small_is_reported(trace: Path, tmp_path: Path):
    costs = tmp_path / "costs.json"
    costs.write_text('{"format": 1, "costs": {"step_ps": 1000}}')
    process = mie("sim", "predict", trace, "--costs", costs, "--num-blocks", "2")
    assert process.returncode == 1
    assert b"the context holds 33" in process.stderr
