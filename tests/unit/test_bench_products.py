"""Test that the benchmark of products measures what an engine does after its first steps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mie.ops_cpu import crew
from mie.ops_cpu.processes import helpers
from mie.ops_cpu.threads.gains import Gains

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_products

SMALL = 1 << 20


@pytest.mark.skipif(
    not helpers.IS_AVAILABLE, reason="helper processes need Linux's eventfd and pidfd"
)
@pytest.mark.parametrize("num_rows", [1, 4, 64, 128])
def test_products_are_measured_after_the_engine_has_chosen(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
):
    # Helpers start after as many steps as with the real sizes.
    monkeypatch.setattr(crew, "START_BYTES", crew.START_BYTES * SMALL // bench_products.CACHE_BYTES)
    monkeypatch.setattr(bench_products, "CACHE_BYTES", SMALL)
    monkeypatch.setattr(bench_products, "TURN_SECONDS", 0)
    monkeypatch.setattr(crew, "available_cpus", lambda: 64)
    monkeypatch.setattr(helpers, "PATIENCE", 120.0)
    monkeypatch.setattr(Gains, "are_paused", lambda self, now: False)
    pair = bench_products.Pair(64, 128, {"linear_plan": "tiled", "num_threads": 2})
    try:
        assert pair.warm_up(num_rows) == bench_products.LEAST_CALLS
        trials = pair._backend._crew._trials
        assert {kind: each.is_trial for kind, each in trials.items()} == {
            num_rows.bit_length(): False
        }
    finally:
        pair.close()
