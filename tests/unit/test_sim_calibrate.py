"""Check that calibration finds known costs, and that the least squares are minimal."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mie.cli import main
from mie.config.engine import EngineConfig
from mie.errors import ConfigError, TraceError
from mie.events import read_log
from mie.memory.window import Window
from mie.sim.calibrate import fit_costs, non_negative_least_squares
from mie.sim.costs import Costs
from mie.sim.draws import LogNormal, Uniform
from mie.sim.driver import run_load
from mie.sim.loads import calibration, independent
from mie.sim.recorded import Recording, recording_of
from mie.sim.simulated import simulated
from mie.sim.workload import Answer, Text, Tokens, Workload, WorkloadRequest

TRUE = Costs(
    step_ps=900_000_000,
    matrix_ps=700_000_000,
    weights_ps=8 * 60_000_000,
    token_ps=60_000_000,
    pair_ps=90_000,
    context_ps=500_000,
    seq_ps=20_000_000,
    chunk_ps=300_000_000,
)


def record(path: Path, costs: Costs, workload: Workload, **settings: object) -> Recording:
    """Return the log of a simulated run, read back."""
    config = EngineConfig(**{"num_blocks": 2000, **settings})
    with path.open("w") as file:
        bench = simulated(costs, config, trace=file)
        run_load(bench, workload)
        bench.engine.log.close()
    return recording_of(read_log(path))


def test_costs_are_found_again(tmp_path: Path):
    recording = record(tmp_path / "run.jsonl", TRUE, calibration(max_requests=32))
    fit = fit_costs(recording.steps)
    assert fit.num_steps == len(recording.steps)
    assert max(fit.median_error, fit.p90_error, abs(fit.total_error)) < 1e-4
    for name, value in vars(TRUE).items():
        assert getattr(fit.costs, name) == pytest.approx(value, rel=0.02, abs=200_000), name


def test_costs_predict_a_load_of_another_kind(tmp_path: Path):
    """And slow steps, which no cost explains, do not move them: every ninth took five times as
    long when the calibration was recorded."""
    recording = record(tmp_path / "run.jsonl", TRUE, calibration(max_requests=32))
    noisy = [
        replace(step, duration_ns=step.duration_ns * (5 if at % 9 == 4 else 1))
        for at, step in enumerate(recording.steps)
    ]
    fit = fit_costs(noisy)
    load = independent(
        input_len=LogNormal(80, 0.7, 4, 400),
        output_len=Uniform(5, 90),
        request_rate=30.0,
        num_requests=60,
    )
    measured = record(tmp_path / "other.jsonl", TRUE, load)
    predicted = run_load(simulated(fit.costs, EngineConfig(num_blocks=2000)), measured.workload)
    assert predicted.duration_ns == pytest.approx(measured.duration_ns, rel=0.02)
    for step in measured.steps:
        assert fit.costs.step_ns(step.work) == pytest.approx(step.duration_ns, rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_are_least_and_not_negative(seed: int):
    """The conditions of Karush, Kuhn and Tucker, which only the solution satisfies."""
    rng = np.random.default_rng(seed)
    matrix = np.abs(rng.normal(size=(30, 6))) * 10.0 ** rng.integers(-3, 4, 6)
    matrix[:, 2] = 0
    target = matrix @ np.maximum(rng.normal(size=6), 0) + rng.normal(size=30)
    solution = non_negative_least_squares(matrix, target)
    gradient = matrix.T @ (matrix @ solution - target) / np.maximum(1e-300, np.abs(matrix).max(0))
    tolerance = 1e-9 * float(np.linalg.norm(target))
    assert (solution >= 0).all()
    assert gradient == pytest.approx(
        np.where(solution > 0, 0, np.maximum(gradient, 0)), abs=tolerance
    )


def test_a_load_is_read_from_its_log(tmp_path: Path):
    """The load has arrivals, lengths, choices, and the prompts whose blocks were sealed.

    Requests arrive at the steps that first see them, and shared prompts are shared again.
    """
    requests = (
        WorkloadRequest(request_id="a", prompt=(Text(0, 32), Text(1, 3)), max_tokens=4),
        WorkloadRequest(request_id="b", prompt=(Text(0, 32), Text(2, 7)), max_tokens=9, n=2),
        WorkloadRequest(request_id="c", prompt=(Text(3, 5),), max_tokens=2, arrival_ns=3_500_000),
        WorkloadRequest(request_id="d", prompt=(Text(4, 5), Answer("c")), max_tokens=2, after="c"),
    )
    workload = Workload(name="made", requests=requests)
    costs = Costs(step_ps=10**9)
    recording = record(tmp_path / "run.jsonl", costs, workload, block_size=16)
    found = recording.workload.requests
    assert [(r.max_tokens, r.n, r.arrival_ns) for r in found] == [
        (4, 1, 0),
        (9, 2, 0),
        (2, 1, 4_000_000),
        (2, 1, 6_000_000),
    ]
    shared = requests[0].token_ids(1 << 18, {})[:32]
    assert [r.prompt[0] for r in found[:2]] == [Tokens(tuple(shared))] * 2
    lengths = [len(r.token_ids(1 << 18, {})) for r in found]
    assert lengths == [35, 39, 5, 7]
    assert Workload.from_json(recording.workload.to_json()) == recording.workload
    again = run_load(simulated(costs, EngineConfig(num_blocks=2000)), recording.workload)
    assert again.duration_ns == recording.duration_ns
    assert [record.token_ns for record in again.records] == [
        record.token_ns for record in recording.records
    ]


def test_a_run_with_states_or_windows_is_read(tmp_path: Path):
    load, path = independent(num_requests=3), tmp_path / "run.jsonl"
    window = Window(size=5, num_groups=1, block_size=16, max_chunk=2048)
    for memory, expected in (
        ({"num_states": (9, 0)}, ((9, 0), False)),
        ({"window": window}, ((0, 0), True)),
    ):
        with path.open("w") as file:
            bench = simulated(TRUE, EngineConfig(num_blocks=2000), trace=file, **memory)
            run_load(bench, load)
            bench.engine.log.close()
        recording = recording_of(read_log(path))
        assert (recording.num_states, recording.has_windows) == expected
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps({"format": 1, "costs": {}}))
    assert main(("sim", "predict", str(path), "--costs", str(costs))) == 2


def test_a_trace_with_too_few_steps_is_refused(tmp_path: Path):
    load = independent(num_requests=1)
    recording = record(tmp_path / "run.jsonl", TRUE, load, max_model_len=200)
    with pytest.raises(ConfigError, match="19 steps"):
        fit_costs(recording.steps[:19])
    empty = tmp_path / "empty.jsonl"
    text = (tmp_path / "run.jsonl").read_text()
    empty.write_text(text.splitlines(keepends=True)[0])
    with pytest.raises(TraceError, match="no step"):
        recording_of(read_log(empty))
