"""Check the predicted times: the page, the formula, and which launches a step has."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from emulated import needs_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from bench.gpu.shapes import DecodeShape
from gpu import predict
from gpu.predict import CHIPS, Attention, Chip, Work, decode_step, decode_work
from gpu.predictions import PAGE, TABLES, beside, rewritten

from mie.checkpoint.config import ModelConfig
from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.load.engine import load_engine
from mie.sim.shapes import find_shape

H200, A100, ORIN, RTX = CHIPS
HEADS_64 = Attention(num_heads=32, num_kv_heads=8, head_dim=64)


def test_the_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert rewritten(text) == text, "run scripts/doc_tables.py"
    assert all(text.count(f"<!-- predicted: {name} -->") == 1 for name in TABLES)


@pytest.mark.parametrize(
    ("work", "microseconds", "limited_by"),
    [
        (Work("w", 4.32e6), 2.5 + 1.0, "launch"),  # 4.8 TB/s · 0.9
        (Work("w", 4.32e7), 2.5 + 10.0, "bytes"),
        (Work("w", 4.32e7, slots=20 * 926640), 2.5 + 20.0, "issue"),  # 132 · 4 · 1.755 GHz
        (Work("w", 4.32e7, flops=30 * 989e6), 2.5 + 30.0, "tensor cores"),
        (Work("w", 4.32e7, flops=30 * 989e6, is_gemm=True), 2.5 + 60.0, "tensor cores"),
        (Work("w", 4.32e6, latency_us=7.0), 2.5 + 1.0 + 7.0, "launch"),
        (Work("w", 4.32e7, slots=20 * 926640, busy=0.25), 2.5 + 80.0, "issue"),
    ],
)
def test_the_largest_limit_counts(work: Work, microseconds: float, limited_by: str):
    assert H200.microseconds(work) == pytest.approx(microseconds)
    assert H200.limited_by(work) == limited_by


def test_issue_slots_are_those_of_the_ledger():
    """At 64 × 4,096 tokens most instructions are in the loop over tiles.

    The rest counts the merge of parts for every run, although only the last block does it.
    """
    kernel = "paged_decode_stream.cu paged_decode_stream<f16, 64, 1, 4, 4>"
    profile = predict.sass_ledger.read()["13.4 sm_90"][kernel]
    loop = next(loop for loop in profile.loops if loop.mma)
    work = decode_work(H200, HEADS_64, [4096] * 64)
    assert (
        work.bytes
        == DecodeShape(head_dim=64, num_kv_heads=8, num_seqs=64, context=4096).useful_bytes
    )
    in_loop = 64 * 4096 // 16 * 8 * loop.instructions
    assert in_loop < work.slots < 1.3 * in_loop


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
def test_every_kernel_of_a_step_is_in_the_ledger(chip: Chip, kind: str):
    step = decode_step(chip, find_shape("Llama-3.2-1B"), 64, 4096, kind)
    assert predict.step_us(chip, step) > predict.floor_us(chip, step) > 0


# Measured beside predicted.

ROW = {"version": "mie", "error": 1e-4, "shape": "a name"}


def bench_of(decode_us: float, prefill_us: float, step_ms: float) -> dict[str, Any]:
    sizes = {"head_dim": 64, "num_kv_heads": 8, "num_heads": 32, "dtype": "float16"}
    decode = {**ROW, **sizes, "num_seqs": 64, "context": 4096, "median_us": decode_us}
    prefill = {**ROW, **sizes, "num_seqs": 1, "num_queries": 4096, "prefix": 0}
    step = {"model": "TinyLlama-1.1B", "engine": "mie", "num_requests": 64, "num_tokens": 64 * 150}
    return {
        "decode": [decode, {**decode, "version": "triton"}, {**ROW, "reason": "not timed"}],
        "prefill": [{**prefill, "median_us": prefill_us}, {**prefill, "reason": "not timed"}],
        "end_to_end": [{**step, "step_ms": step_ms}, {**step, "engine": "transformers"}],
    }


def test_measured_times_are_shown_beside_predicted_ones():
    works = [decode_work(A100, HEADS_64, [4096] * 64)]
    decode_us = sum(map(A100.microseconds, works))
    prefill_us = A100.microseconds(predict.prefill_work(A100, HEADS_64, 4096))
    step = decode_step(A100, find_shape("TinyLlama-1.1B"), 64, 16 + 75)
    step_ms = predict.step_us(A100, step) / 1000
    lines = beside(bench_of(2 * decode_us, 0.5 * prefill_us, step_ms), "NVIDIA A100-SXM4-80GB")
    cells = [line.split(" | ") for line in lines[4:]]
    assert [row[0].split(",")[0] for row in cells] == ["| decode", "| prefill", "| step"]
    assert [row[-1] for row in cells] == ["2.00 |", "0.50 |", "1.00 |"]
    assert [row[2] for row in cells] == [
        f"{each:,.1f}" for each in (decode_us, prefill_us, 1000 * step_ms)
    ]


# Launches.

SMALL = tiny_models.LLAMA | {"head_dim": 64, "hidden_size": 64, "num_hidden_layers": 2}


@needs_compiler
def test_a_step_launches_what_is_predicted(tmp_path: Path):
    model = tiny_models.write_model(tmp_path, SMALL, tiny_models.random_weights(SMALL))
    config = EngineConfig(num_blocks=8, block_size=16, enforce_eager=True, async_scheduling=False)
    launches: Counter[str] = Counter()
    is_step = False

    def counting(backend: Any) -> Any:
        launcher, gemm = backend._launcher, backend._gemm
        kernel_of, matmul = launcher.kernel, gemm.matmul

        def kernel(file: str, name: str, options: tuple[str, ...] = ()) -> Any:
            launches[name.partition("<")[0]] += is_step
            return kernel_of(file, name, options)

        def counted_matmul(*args: Any) -> None:
            launches["cuBLAS"] += is_step
            matmul(*args)

        launcher.kernel, gemm.matmul = kernel, counted_matmul
        return backend

    engine = load_engine(model, config, backend="cupy-emulated", dtype="float16", wrap=counting)
    engine.add_request([5, 6, 7], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    engine.step()
    is_step = True
    engine.step()
    predicted: Counter[str] = Counter()
    for work in decode_step(H200, ModelConfig.from_hf(SMALL, source="small"), 1, 4):
        predicted[work.name.split(", auto")[0].split(": ")[-1]] += work.count
    assert launches == predicted
