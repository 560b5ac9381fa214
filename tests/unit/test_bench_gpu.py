"""Run the GPU benchmark without a GPU: shapes, floors, tables, and peers by name."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_gpu
from bench.gpu import attention, peers
from bench.gpu.device import DryDevice
from bench.gpu.end_to_end import GpuWorkload, row_of, step_floor_ms
from bench.gpu.inputs import Inputs, decode_inputs, prefill_inputs
from bench.gpu.page import as_markdown
from bench.gpu.report import BenchReport
from bench.gpu.shapes import TINY, TINY_PREFILL, UNIFORM

from mie.checkpoint.config import ModelConfig

ROOT = Path(__file__).parents[2]


def report(is_dry_run: bool = True) -> BenchReport:
    return BenchReport(state={}, prefix=None, is_dry_run=is_dry_run)


# Shapes and floors.


def test_useful_bytes_equal_a_count_by_hand():
    """Keys and values of the first row are 1073.7 MB. Queries and outputs add 1 MB."""
    first = UNIFORM[0]
    assert first.useful_bytes == 2**30 + 2 * 64 * 32 * 128 * 2


def test_a_quantised_cache_has_half_the_bytes_plus_scales():
    first = replace(UNIFORM[0], kv_cache_dtype="int8")
    kv = 2 * 64 * 4096 * 8
    assert first.useful_bytes == kv * (128 + 4) + 2 * 64 * 32 * 128 * 2
    assert "int8 cache" in str(first)


def test_the_floor_of_a_step_uses_the_higher_bandwidth():
    config = ModelConfig.from_hf({**small_llama(), "num_hidden_layers": 1})
    workload = GpuWorkload(num_requests=4, num_tokens=8, num_generated=1)
    weights = 2 * (4 * 4 * 4 + 3 * 4 * 8 + 16 * 4)  # q, k, v, o, mlp, head, in 16 bits
    cache = 4 * (16 + 4) * 2 * 4 * 2
    floor = step_floor_ms(config, workload, {"copy_gb_per_s": 1.0, "read_gb_per_s": 2.0})
    assert floor == pytest.approx(1e-6 * (weights + cache) / 2)
    row = row_of("mie", workload, {"seconds": 2.0, "step_ms": 3 * floor}, floor)
    assert row["over_floor"] == pytest.approx(3)
    assert row["tokens_per_s"] == 16


def small_llama() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }


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


@needs_compiler
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch):
    found = report()
    monkeypatch.setattr(Inputs, "error", lambda self: math.inf)
    attention.bench_decode(DryDevice(), TINY, found)
    [row] = found.decode
    assert row["reason"] == "wrong result, not timed"
    assert found.failures
    page = as_markdown(vars(found))
    assert "n/a: wrong result, not timed" in page
    assert "### Failed" in page


# Peers.


@needs_compiler
def test_peers_that_cannot_run_are_skipped_by_name(monkeypatch: pytest.MonkeyPatch):
    found = report(is_dry_run=False)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    for shape in (TINY, replace(TINY, is_ragged=True), replace(TINY, kv_cache_dtype="int8")):
        assert peers.decode_peers(decode_inputs(DryDevice(), shape), found) == {}
    skipped = {each["name"]: each["reason"] for each in found.skipped}
    assert skipped["FlexAttention"] == "torch is not installed"
    assert skipped["torch SDPA cudnn_attention"] == "torch is not installed"
    assert "one length" in skipped["torch SDPA and FlexAttention, ragged"]
    assert "formats" in skipped["peers of a quantised cache"]


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


def test_a_failing_part_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch):
    def broken(device: Any, shape: Any, report: BenchReport) -> None:
        raise ValueError("by mistake")

    monkeypatch.setattr(bench_gpu, "measure_ceilings", lambda device, report: None)
    for name in ("bench_decode", "bench_prefill"):
        monkeypatch.setattr(bench_gpu, name, broken)
    monkeypatch.setattr(bench_gpu, "bench_end_to_end", lambda *_: None)
    found = report()
    device: Any = SimpleNamespace(xp=np)
    bench_gpu.bench(device, found, 60)
    assert len(found.failures) == 4
    assert found.failures[-1] == f"prefill, {TINY_PREFILL}: ValueError: by mistake"
