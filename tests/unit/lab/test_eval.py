"""Test ``mie eval``: perplexity against log-probabilities of an engine, and divergences."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mie import LLM, SamplingParams
from mie.cli import main
from mie.lab.quality import Predictor, quality

TEXT = "<|user|>Tell me about Mia the otter.<|assistant|>Mia was brave. She found a bell."


def evaluated(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> dict[str, Any]:
    path.write_text(TEXT)
    assert main(["eval", str(path), "--backend", "numpy", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_perplexity_is_that_of_an_engines_log_probabilities(tmp_path, capsys):
    """Windows of 9 tokens begin with BOS, and each is predicted alone."""
    llm = LLM(backend="numpy", num_blocks=8)
    bos, *ids = llm.get_tokenizer().encode(TEXT)
    windows = [[bos, *ids[start : start + 8]] for start in range(0, 20, 8)]
    windows[-1] = windows[-1][:5]
    outputs = llm.generate(windows, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    losses = [
        -each[token_id].logprob
        for window, output in zip(windows, outputs, strict=True)
        for token_id, each in zip(window[1:], output.prompt_logprobs[1:], strict=True)
    ]
    assert len(losses) == 20
    found = evaluated(capsys, tmp_path / "text", "--window", "9", "--num-tokens", "20")
    assert found["num_tokens"] == 20
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    assert found["mean_kl"] is None


def test_a_rounded_cache_is_compared_with_that_of_the_dtype(tmp_path, capsys):
    plain = evaluated(capsys, tmp_path / "text")["perplexity"]
    found = [
        evaluated(capsys, tmp_path / "text", "--kv-cache-dtype", stored)
        for stored in ("int8", "fp8", "int4")
    ]
    assert [each["reference_perplexity"] for each in found] == [plain] * 3
    assert 0 < found[0]["mean_kl"] < found[1]["mean_kl"] < found[2]["mean_kl"]


def test_rounded_weights_are_compared_with_the_files(tmp_path, capsys):
    plain = evaluated(capsys, tmp_path / "text")["perplexity"]
    found = [
        evaluated(capsys, tmp_path / "text", "--quantization", quantization)
        for quantization in ("int8", "int4")
    ]
    assert [each["reference_perplexity"] for each in found] == [plain, plain]
    assert 0 < found[0]["mean_kl"] < found[1]["mean_kl"] / 10
    assert found[0]["same_top"] >= found[1]["same_top"]
    same = evaluated(capsys, tmp_path / "text", "--reference", "bundled")
    assert (same["mean_kl"], same["max_kl"], same["same_top"]) == (0, 0, 1)
    assert main(["eval", str(tmp_path / "text"), "--head-dtype", "int4", "--backend", "numpy"]) == 0
    assert "same top" in capsys.readouterr().out


def test_rounded_activations_are_compared_with_float32(tmp_path, capsys):
    words = ("--quantization", "int8")
    exact = evaluated(capsys, tmp_path / "text", *words)
    found = evaluated(capsys, tmp_path / "text", *words, "--activations", "int8")
    assert found["reference_perplexity"] == exact["reference_perplexity"]
    assert exact["mean_kl"] < found["mean_kl"] < 0.005


def fake(rows: Sequence[Sequence[float]], vocab_size: int = 2) -> Predictor:
    model: Any = SimpleNamespace(
        logits=lambda window: np.log(rows) + 7.0, model=SimpleNamespace(vocab_size=vocab_size)
    )
    return model  # type: ignore[no-any-return]


def test_the_divergence_is_that_of_the_reference_from_the_model():
    found = quality([[0, 1, 0]], fake([[0.5, 0.5], [0.25, 0.75]]), fake([[0.5, 0.5], [0.5, 0.5]]))
    second = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert found.mean_kl == pytest.approx(second / 2)
    assert found.max_kl == pytest.approx(second)
    assert found.perplexity == pytest.approx((0.5 * 0.25) ** -0.5)
    assert found.reference_perplexity == pytest.approx(2.0)
    assert found.same_top == 0.5  # a tie goes to the first token


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--window", "1"], "a window and the text need 2 tokens"),
        (["--window", "5000"], "the model's context is 1024 (lower --window)"),
        (["--activations", "int8"], "the model has no matrix of int4 or int8"),
        (["--quantization", "awq"], "the files are not quantised"),
        (["--reference", "/nowhere"], "does not exist"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, capsys, words, message):
    path = tmp_path / "text"
    path.write_text(TEXT)
    assert main(["eval", str(path), "--backend", "numpy", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_text_that_cannot_be_read_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "text"
    assert main(["eval", str(path)]) == 2
    assert "cannot read" in capsys.readouterr().err
    path.write_bytes(b"\xff\xfe")
    assert main(["eval", str(path)]) == 2
    assert "is not a text in UTF-8" in capsys.readouterr().err
    path.write_text("")
    assert main(["eval", str(path)]) == 2
    assert "the text has 0 tokens" in capsys.readouterr().err
