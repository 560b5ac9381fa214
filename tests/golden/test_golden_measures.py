"""Measure every golden model with `mie eval` and compare it with `mie diff`.

These commands choose the size of the cache themselves. The size depends on the model's windows.
"""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from compiled import needs_numba
from tokenizers import Tokenizer, models, pre_tokenizers

from mie.checkpoint.config import load_model_config
from mie.cli import main
from mie.config.engine_args import EngineArgs
from mie.lab.diff.compare import DiffWorkload, compare
from mie.lab.diff.recording import OPERATORS
from mie.lab.diff.report import Side
from mie.lab.quality import Predictor

MODELS = Path(__file__).parent / "models"
QUICK = {"gemma3_two_ropes", "phi3_long", "olmo_hybrid", "qwen3_next_experts"}
"""Windows, a context that must be asked for, and recurrent layers with and without experts."""
NAMES = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in sorted(path.name for path in MODELS.iterdir())
]
F64, F32 = (Side(backend="numpy", dtype=dtype) for dtype in ("float64", "float32"))


def workload(name: str) -> DiffWorkload:
    """Return two prompts with a common beginning."""
    ids = np.load(MODELS / name / "golden.npz")["long.ids"].tolist()
    return DiffWorkload(
        directory=MODELS / name,
        model=name,
        prompts=[ids, [*ids[: len(ids) // 2], *reversed(ids[len(ids) // 2 :])]],
        max_tokens=3,
        max_num_batched_tokens=32,
    )


@pytest.mark.parametrize(
    "backend", ["numpy", pytest.param("jit", marks=[needs_numba, pytest.mark.slow])]
)
@pytest.mark.parametrize("name", NAMES)
def test_the_logits_that_eval_reads_equal_those_of_transformers(name: str, backend: str):
    golden = np.load(MODELS / name / "golden.npz")
    token_ids = [*golden["long.ids"].tolist(), *golden["long.greedy"].tolist()]
    args = EngineArgs(model=str(MODELS / name), backend=backend)
    found = Predictor(args, len(token_ids)).logits(token_ids)
    rows = golden["long.rows"]
    known = rows < len(found)  # nothing is predicted after the last token
    assert known.sum() >= len(rows) - 1 > 0
    wanted = golden["long.logits"][known]
    assert np.abs(found[rows[known]] - wanted).max() < 3e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("name", NAMES)
def test_diff_compares_every_model_and_sees_each_of_its_layers(name: str):
    report = compare(workload(name), F64, F32)
    assert report.is_within, report.first
    assert report.num_tokens == 6
    assert {row.operator for row in report.rows} <= {*OPERATORS}
    layers = {row.layer for row in report.rows} - {None}
    assert layers == set(range(load_model_config(MODELS / name).num_layers))
    for operator in ("attention_norm", "qkv", "o", "down", "experts"):
        found = [row.layer for row in report.rows if row.operator == operator]
        assert len(found) == len({*found}), "a layer has a row of each operator"


@pytest.mark.parametrize("window", [17, 100])
def test_eval_reads_a_text_with_a_model_of_windows(tmp_path, capsys, window):
    directory = shutil.copytree(MODELS / "gemma3_two_ropes", tmp_path / "model")
    vocab = {f"w{number}": number for number in range(71)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{3 + 7 * number * number % 60}" for number in range(300)))
    words = ["--model", str(directory), "--backend", "numpy", "--window", str(window), "--json"]
    assert main(["eval", str(text), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["num_tokens"] == 300 - math.ceil(300 / window)
    assert found["perplexity"] > 1
