"""The scheduler's benchmark runs on today's engine, at a small scale."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_sched


def test_the_parts_of_a_step_are_timed_and_reported():
    parts = bench_sched.phases(num_seqs=4, context=64, num_steps=3)
    assert list(parts) == ["schedule and memory", "pack", "update", "outputs, statistics, log"]
    assert all(milliseconds > 0 for milliseconds in parts.values())
    values = {
        "state": {"cpus": 2},
        "engines": ["mie", "nano-vllm"],
        "milliseconds": {"decode step": {"mie": [1.0, 3.0, 2.0]}},
        "phases": {"at 64": {**parts, "pack": 0.5}},
    }
    text = "\n".join(bench_sched.report(values))
    assert "| decode step | 2.000 (1.000–3.000) | – |" in text
    assert "| pack | 500 |" in text
