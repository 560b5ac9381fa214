"""Run the GPU benchmark without a GPU: shapes, floors, tables, and peers by name."""

from __future__ import annotations

import math
import subprocess
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
from bench.gpu.device import CupyDevice, DryDevice, Samples
from bench.gpu.end_to_end import GpuWorkload, row_of, step_floor_ms
from bench.gpu.inputs import Inputs, decode_inputs, prefill_inputs
from bench.gpu.numbers import relative_error, rounded
from bench.gpu.page import as_markdown, goals
from bench.gpu.report import BenchReport
from bench.gpu.shapes import PREFILL, TINY, TINY_PREFILL, UNIFORM, batch_of, ragged_lengths
from bench.gpu.timing import timed_in_turns

from mie.checkpoint.config import ModelConfig
from mie.ops_gpu.arrays import DTYPES

ROOT = Path(__file__).parents[2]


def report(is_dry_run: bool = True) -> BenchReport:
    return BenchReport(state={}, prefix=None, is_dry_run=is_dry_run)


def test_every_module_imports_without_torch_and_cupy():
    """All modules except the peer that uses Triton."""
    names = sorted(path.stem for path in (ROOT / "scripts" / "bench" / "gpu").glob("*.py"))
    names = [f"bench.gpu.{name}" for name in names if name not in ("__init__", "triton_decode")]
    code = "import sys; sys.modules.update(torch=None, triton=None, cupy=None); import bench_gpu, "
    done = subprocess.run(
        [sys.executable, "-c", code + ", ".join(names)],
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(names) > 8


# Shapes and floors.


@pytest.mark.parametrize(("num_seqs", "context"), [(64, 4096), (256, 1024), (8, 4096), (3, 40)])
def test_ragged_lengths_have_the_same_sum(num_seqs: int, context: int):
    lengths = ragged_lengths(num_seqs, context)
    assert len(lengths) == num_seqs
    assert sum(lengths) == num_seqs * context
    assert min(lengths) >= max(1, context // 32)
    assert max(lengths) <= 8192
    assert len(set(lengths)) > 1


def test_useful_bytes_equal_a_count_by_hand():
    """Keys and values of the first row are 1073.7 MB. Queries and outputs add 1 MB."""
    first = UNIFORM[0]
    assert first.useful_bytes == 2**30 + 2 * 64 * 32 * 128 * 2


def test_rounding_by_bits_is_accurate():
    wide = np.random.default_rng(0).standard_normal(1000)
    dtype = DTYPES["bfloat16"]
    got = rounded(wide, dtype).astype(float)
    np.testing.assert_allclose(got, wide, rtol=2**-8)


class FakeCuda:
    """Streams, graphs and events that count. With ``refuses`` nothing can be captured."""

    def __init__(self, refuses: bool) -> None:
        self.refuses, self.num_replays, self.now = refuses, 0, 0.0
        cuda = SimpleNamespace(
            MemoryPool=lambda: SimpleNamespace(malloc=None),
            using_allocator=lambda malloc: self,
            Event=lambda: SimpleNamespace(record=self._record, synchronize=lambda: None),
            get_elapsed_time=lambda start, end: 2.0,
        )
        self.xp = SimpleNamespace(cuda=cuda)

    def _record(self, stream: Any) -> None:
        self.now += 1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass

    # The stream.

    def synchronize(self) -> None:
        pass

    def begin_capture(self) -> None:
        if self.refuses:
            raise RuntimeError("not permitted\nreally")

    def end_capture(self) -> Any:
        return SimpleNamespace(launch=self._replay)

    def _replay(self, stream: Any) -> None:
        self.num_replays += 1


@pytest.mark.parametrize("refuses", [False, True])
def test_samples_use_a_graph_or_say_why_not(refuses: bool):
    fake, called = FakeCuda(refuses), []
    device = object.__new__(CupyDevice)
    device.xp = fake.xp
    device._stream = fake
    samples = device.samples([lambda: called.append(1)] * 4, 5)
    assert samples.values == [500.0] * 5  # 2 ms for 4 calls
    if refuses:
        assert samples.method == "eager (RuntimeError: not permitted)"
        assert len(called) == 4 + 6 * 4
    else:
        assert samples.method == "graph"
        assert (len(called), fake.num_replays) == (8, 7)


def test_versions_alternate_and_a_failure_is_a_row():
    order: list[str] = []

    def version(name: str, us: float) -> Any:
        def measure() -> Samples:
            order.append(name)
            return Samples(method="graph", values=[us + len(order), us])

        return measure

    def broken() -> Samples:
        raise RuntimeError("no kernel")

    timings = timed_in_turns({"a": version("a", 1), "bad": broken, "b": version("b", 5)})
    assert order == ["a", "b", "b", "a"]
    assert timings["bad"] == {"reason": "RuntimeError: no kernel"}
    assert timings["a"]["num_samples"] == 4
    assert timings["a"]["noise"] > 0


def test_a_quantised_cache_has_half_the_bytes_plus_scales():
    first = replace(UNIFORM[0], kv_cache_dtype="int8")
    kv = 2 * 64 * 4096 * 8
    assert first.useful_bytes == kv * (128 + 4) + 2 * 64 * 32 * 128 * 2
    assert "int8 cache" in str(first)


def test_the_pairs_of_a_prompt_are_counted_one_by_one():
    shape = replace(PREFILL[0], num_seqs=2, num_queries=5, prefix=3)
    pairs = sum(shape.prefix + query + 1 for query in range(5))
    assert shape.flops == 2 * pairs * 4 * 32 * 128
    assert shape.context == 8


def test_a_batch_names_every_block_once():
    batch, num_blocks = batch_of([33, 16, 1], num_queries=1)
    named = batch.block_tables[batch.block_tables >= 0]
    assert sorted(named.tolist()) == list(range(num_blocks)) == list(range(5))
    assert batch.block_tables[:, -1].tolist() == [-1] * 3


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


def test_a_result_with_a_nan_is_infinitely_wrong():
    assert relative_error(np.array([1.0, math.nan]), np.ones(2)) == math.inf


# Peers.


@needs_compiler
def test_peers_that_cannot_run_are_skipped_by_name(monkeypatch: pytest.MonkeyPatch):
    found = report(is_dry_run=False)
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    for shape in (TINY, replace(TINY, is_ragged=True), replace(TINY, kv_cache_dtype="int8")):
        assert peers.decode_peers(decode_inputs(DryDevice(), shape), found) == {}
    skipped = {each["name"]: each["reason"] for each in found.skipped}
    assert skipped["FlexAttention"] == skipped["Triton paged"] == "torch is not installed"
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


def test_goals_are_met_or_missed():
    def engine(name: str, rate: float, **more: float) -> dict[str, Any]:
        sizes = {"num_requests": 64, "num_tokens": 150, "peak_bytes": None}
        return {"model": "m", "engine": name, "tokens_per_s": rate, **sizes, **more}

    ours = {
        **vars(UNIFORM[0]),
        "shape": str(UNIFORM[0]),
        "version": "mie",
        "median_us": 290.0,
        "error": 2e-3,
        "share_of_copy": 0.9,
        "share_of_read": 0.86,
    }
    found = report(is_dry_run=False)
    found.decode = [ours, {**ours, "version": "FlexAttention", "median_us": 580.0}]
    found.end_to_end = [engine("mie", 2000, over_floor=1.7), engine("transformers", 50)]
    lines = "\n".join(goals(vars(found)))
    assert "share of the ceiling: 0.86 of 0.85: met" in lines
    assert "times FlexAttention: 2.00 of 1: met" in lines
    assert "float16 error against float64: 2.0e-03 of 0.001: missed" in lines
    assert "decode at 64: 1.70 × the floor of 1.5: missed" in lines
    assert "64 requests over generate: 40.00 of 30: met" in lines
    assert goals({**vars(found), "is_dry_run": True}) == []


def test_parts_without_time_are_named_as_skipped(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench_gpu, "measure_ceilings", lambda device, report: None)
    device: Any = SimpleNamespace(xp=np)
    found = report(is_dry_run=False)
    bench_gpu.bench(device, found, 0)
    names = [each["name"] for each in found.skipped]
    assert names[0] == f"decode, {UNIFORM[0]}"
    assert "end to end" in names
    assert f"prefill, {PREFILL[0]}" in names
    assert len(names) == len(set(names)) > 40


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
