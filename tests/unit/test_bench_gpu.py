"""Run the GPU benchmark without a GPU: shapes, floors, and tables."""

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

from bench.gpu import attention, main
from bench.gpu.device import DryDevice
from bench.gpu.end_to_end import row_of
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
    weights = 2 * (4 * 4 * 4 + 3 * 4 * 8 + 16 * 4)  # q, k, v, o, mlp, head, in 16 bits
    cache = 4 * (16 + 4) * 2 * 4 * 2
    floor = 1e-6 * (weights + cache) / 2
    ceilings = {"copy_gb_per_s": 1.0, "read_gb_per_s": 2.0}
    times = [[1.0 + 3e-3 * floor * number for number in range(8)]] * 4
    row = row_of(config, 4, 8, {"seconds": 2.0, "times": times, "peak_bytes": None}, ceilings)
    assert row["floor_ms"] == pytest.approx(floor)
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


def test_a_failing_part_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch):
    def broken(device: Any, shape: Any, report: BenchReport) -> None:
        raise ValueError("by mistake")

    monkeypatch.setattr(main, "measure_ceilings", lambda device, report: None)
    for name in ("bench_decode", "bench_prefill"):
        monkeypatch.setattr(main, name, broken)
    monkeypatch.setattr(main, "bench_end_to_end", lambda *_: None)
    found = report()
    device: Any = SimpleNamespace(xp=np)
    main.bench(device, found, 60)
    assert len(found.failures) == 4
    assert found.failures[-1] == f"prefill, {TINY_PREFILL}: ValueError: by mistake"
