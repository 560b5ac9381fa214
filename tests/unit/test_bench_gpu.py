"""Run the GPU benchmark without a GPU: shapes, floors, tables, and peers by name."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from emulated import needs_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench.gpu import attention, peers
from bench.gpu.device import DryDevice
from bench.gpu.inputs import decode_inputs, prefill_inputs
from bench.gpu.page import as_markdown
from bench.gpu.report import BenchReport
from bench.gpu.shapes import TINY, TINY_PREFILL


def report(is_dry_run: bool = True) -> BenchReport:
    return BenchReport(state={}, prefix=None, is_dry_run=is_dry_run)


# Shapes and floors.


# Inputs and correct results.


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_kernels_are_correct_on_the_benchmarks_inputs(dtype: str):
    device = DryDevice()
    for shape in (replace(TINY, dtype=dtype), replace(TINY, dtype=dtype, kv_cache_dtype="int8")):
        inputs = decode_inputs(device, shape)
        assert len(inputs.checked_places()) == 2
        assert 0 < inputs.error() < attention.ERRORS[dtype]
    prompts = prefill_inputs(device, replace(TINY_PREFILL, dtype=dtype))
    assert len(prompts.checked_places()) == 3
    assert 0 < prompts.error() < attention.ERRORS[dtype]


# Peers.


@needs_compiler
def test_a_wrong_or_failing_peer_is_a_row(monkeypatch: pytest.MonkeyPatch):
    inputs = peers.TorchInputs(decode_inputs(DryDevice(), TINY))

    def broken(inputs: peers.TorchInputs) -> peers.Attend:
        raise RuntimeError("no kernel for this device\nand more")

    ways = {"broken": broken, "wrong": lambda inputs: inputs.mie.attend}
    monkeypatch.setattr(peers, "error_of", lambda inputs, attend: 0.5)
    found = {name: peers.Peer(way=way, inputs=inputs) for name, way in ways.items()}
    monkeypatch.setattr(attention, "decode_peers", lambda inputs, report: found)
    results = report()
    results.ceilings = {"copy_gb_per_s": 1.0, "read_gb_per_s": 1.0}
    attention.bench_decode(DryDevice(), TINY, results)
    rows = {row["version"]: row for row in results.decode}
    assert rows["mie"]["median_us"] > 0
    assert rows["broken"]["reason"] == "RuntimeError: no kernel for this device"
    assert rows["wrong"]["reason"] == "ValueError: its result is off by 5.0e-01"
    assert "| broken | n/a: RuntimeError: no kernel for this device |" in as_markdown(vars(results))
    assert not results.failures


# Goals and time limits.
