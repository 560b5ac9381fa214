"""Test `mie inspect`: its output and exit code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_files import hf_config, random_tensors, write_model

from mie.checkpoint.config import model_config_from_hf
from mie.checkpoint.tensors import num_parameters
from mie.cli import new_parser

MODELS = Path(__file__).parents[2] / "golden" / "models"

CONFIG = model_config_from_hf(hf_config())


def run(*arguments: str | Path) -> int:
    words = ["inspect", *map(str, arguments)]
    args = new_parser(words).parse_args(words)
    code: int = args.run(args)
    return code


def facts(text: str) -> dict[str, str]:
    """Return the printed lines by their keys."""
    return {line[:15].strip(): line[16:] for line in text.splitlines()}


def test_inspect_prints_architecture_and_memory(tmp_path, capsys) -> None:
    write_model(tmp_path)
    assert run(tmp_path, "--kv-cache-memory-bytes", "1.5KiB") == 0
    printed = facts(capsys.readouterr().out)
    assert printed == {
        "model": str(tmp_path),
        "architecture": "LlamaForCausalLM",
        "supported": "yes",
        "layers": "2: 2 with full attention",
        "heads": "4 query, 2 key/value, 4 wide",
        "hidden size": "16, intermediate 32",
        "vocabulary": "24",
        "context": "64 tokens, RoPE default",
        "parameters": f"{num_parameters(CONFIG):,}",
        "weights": f"{num_parameters(CONFIG) * 2 / 1024:.1f} KiB in the files (BF16)",
        "weights loaded": f"{num_parameters(CONFIG) * 4 / 1024:.1f} KiB as float32",
        "KV per token": "128 bytes in float32, 64 bytes in 16 bits",
        "KV cache": "1.5 KiB hold 12 tokens in float32, 24 in 16 bits",
    }


def test_only_headers_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path)

    def read(*args: Any) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr("mie.checkpoint.weights.Checkpoint.read", read)
    assert run(tmp_path) == 0
    with pytest.raises(AssertionError):
        run(tmp_path, "--check")


def test_json_holds_the_same_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path)
    assert run(tmp_path, "--json", "--kv-cache-memory-bytes", "1280") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["supported"] is True
    assert report["problem"] is None
    assert report["num_parameters"] == num_parameters(CONFIG)
    assert report["weights_bytes"] == 2 * num_parameters(CONFIG)
    assert report["weights_bytes_float32"] == 4 * num_parameters(CONFIG)
    assert report["weights_dtypes"] == {"BF16": 21}
    assert report["kv_bytes_per_token_float32"] == 128
    assert report["kv_cache"] == {"memory_bytes": 1280, "tokens_float32": 10, "tokens_float16": 20}
    assert report["config"]["num_layers"] == 2
    assert report["non_finite"] is None


def test_the_experts_of_a_sparse_model_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(MODELS / "qwen3_moe_dense_layer") == 0
    shown = facts(capsys.readouterr().out)["experts"]
    assert shown == "5, 3 for each token, intermediate 20, 1 layers without"
    assert run(MODELS / "granitemoe_shared") == 0
    assert facts(capsys.readouterr().out)["experts"].endswith("24, beside a shared one")


def test_an_unsupported_model_fails_with_the_reason(tmp_path, capsys) -> None:
    write_model(tmp_path)
    config = hf_config("PhiMoEForCausalLM", num_local_experts=8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run(tmp_path) == 1
    printed = facts(capsys.readouterr().out)
    assert printed["architecture"] == "PhiMoEForCausalLM"
    assert printed["supported"] == "no"
    assert "mixture of experts" in printed["problem"]
    assert run(tmp_path, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["supported"] is False
    assert report["config"] is None


def test_check_names_tensors_that_are_not_finite(tmp_path, capsys) -> None:
    tensors = random_tensors(CONFIG, np.float16)
    tensors["model.norm.weight"][:3] = math.nan
    tensors["lm_head.weight"][0, 0] = math.inf
    write_model(tmp_path, tensors=tensors)
    assert run(tmp_path) == 0
    assert capsys.readouterr().err == ""
    assert run(tmp_path, "--check") == 1
    out, err = capsys.readouterr()
    assert facts(out)["check"] == "NaN or infinite values in 2 tensors"
    assert err.splitlines() == [
        "warning: model.norm.weight has 3 NaN or infinite values",
        "warning: lm_head.weight has 1 NaN or infinite values",
    ]


def test_inspect_prints_the_layers_with_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(__file__).parents[2] / "golden" / "models" / "granite4_mamba"
    assert run(model) == 0
    printed = facts(capsys.readouterr().out)
    assert printed["layers"] == "3: 1 with full attention, 2 with a state"
    assert printed["context"] == "256 tokens, RoPE none, 1 layers without"
    # Two layers, each with 3 columns of 96 + 2 * 2 * 12 channels, and a state of 96 times 12.
    size = f"{2 * (3 * 144 + 96 * 12) * 4 / 1024:.1f} KiB"
    assert printed["state"] == f"{size} in float32 for each sequence and each snapshot"
