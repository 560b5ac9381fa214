"""Test the simulation of more cores on a few steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_cores


def test_more_cores_are_faster_in_every_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--models", "TinyLlama-1.1B", "--cores", "1", "2", "16"]
    monkeypatch.setattr(sys, "argv", ["bench_cores.py", *arguments])
    assert bench_cores.main() == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| TinyLlama")]
    assert len(rows) == len(bench_cores.STEPS)
    for row in rows:
        one, two, many = (float(factor) for factor in re.findall(r"\(([\d.]+) ×\)", row))
        assert 1 == one < two <= 2 < many <= 16


def test_processes_in_lockstep_wait_for_the_slowest_and_for_each_round() -> None:
    machine = bench_cores.Machine(
        cores=4, flops=1e9, core_bandwidth=1e9, bandwidth=1e9, gil=1.0, wake=1.0, meet=1e-3
    )
    shares = [(1e6, 0.0), (3e6, 0.0), (0.0, 1e6), (0.0, 0.0)]
    # The shares of bandwidth are a quarter each.
    assert machine.lockstep_seconds(shares) == pytest.approx(2e-3 + 4e-3)


def test_a_prompt_goes_to_processes_that_each_get_enough_tokens() -> None:
    """With more cores than that, threads share its products."""

    def ways(cores: int) -> dict[str, float]:
        machine = bench_cores.Machine(
            cores=cores,
            flops=2e11,
            core_bandwidth=3e10,
            bandwidth=5e10,
            gil=8e-6,
            wake=2e-6,
            meet=1e-6,
        )
        return bench_cores.step_seconds(
            machine, bench_cores.find_shape("SmolLM2-135M"), "prefill 512"
        )

    assert set(ways(1)) == set(ways(32)) == {"threads"}
    assert set(ways(2)) == set(ways(16)) == {"threads", "processes"}
    one, two = ways(1)["threads"], ways(2)["processes"]
    assert one / 2 < two < one / 1.9


def test_processes_that_share_tokens_each_read_all_weights() -> None:
    machine = bench_cores.Machine(
        cores=4, flops=1e15, core_bandwidth=1e9, bandwidth=2e9, gil=1.0, wake=1.0, meet=1.0
    )
    # Each process has half of a core's bandwidth.
    assert bench_cores.by_token(machine, 1024, 2048, 512) == pytest.approx(4 * 1024 * 2048 / 5e8)


@pytest.mark.parametrize("cores", ["0", "-1", "many"])
def test_a_number_of_cores_that_cannot_be_is_refused(
    cores: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_cores.py", f"--cores={cores}"])
    with pytest.raises(SystemExit):
        bench_cores.main()
    assert f"got {cores!r}; give a number from 1 on" in capsys.readouterr().err
