"""The scheduler's benchmark runs on today's engine, at a small scale."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_sched


def test_the_parts_of_a_step_are_timed():
    parts = bench_sched.phases(num_seqs=4, context=64, num_steps=3)
    assert list(parts) == ["schedule and memory", "pack", "update", "outputs, statistics, log"]
    assert all(milliseconds > 0 for milliseconds in parts.values())


@pytest.mark.parametrize("num_children", [0, 3])
def test_a_cached_prompt_is_admitted_again_and_again(num_children: int):
    """`admit` itself asserts that one token is left to compute."""
    admission = bench_sched.Mie(num_children).start_admission(num_cached=64)
    for _ in range(3):
        admission.admit()
        admission.take_out()


def test_the_log_has_a_share_of_a_real_step():
    step_ms, log_us, share = bench_sched.log_share(num_requests=2, num_steps=4)
    assert share == pytest.approx(log_us / (1e3 * step_ms))
    assert share > 0


def test_the_report_has_a_row_for_each_measurement():
    report = {
        "state": {"cpus": 2},
        "versions": {"nano-vllm": "abc"},
        "milliseconds": {"decode step": {"mie": [1.0, 3.0, 2.0]}},
        "phases": {"at 128": {"pack": 0.5}},
        "log": {1: (2.0, 20.0, 0.01)},
    }
    text = bench_sched.as_markdown(report)
    assert "| decode step | 2.000 (1.000–3.000) | – |" in text
    assert "| pack | 500 |" in text
    assert "| 1 | 2.00 | 20.0 | 1.00% |" in text
