"""Check the predicted times: the page, the formula, and which launches a step has."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import tiny_models
from emulated import needs_compiler

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from gpu.predict import CHIPS, decode_step
from gpu.predictions import PAGE, TABLES, rewritten

from mie.checkpoint.config import ModelConfig
from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.load.engine import load_engine


def test_the_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert rewritten(text) == text, "run scripts/gpu_predictions.py"
    assert all(text.count(f"<!-- predicted: {name} -->") == 1 for name in TABLES)


# Measured beside predicted.


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
    for work in decode_step(CHIPS[0], ModelConfig.from_hf(SMALL, source="small"), 1, 4):
        predicted[work.name.split(", auto")[0].split(": ")[-1]] += work.count
    assert launches == predicted
