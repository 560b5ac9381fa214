"""Test ``load_format="dummy"``, which needs only a config.json and a seed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from safetensors.numpy import save_file

from mie import LLM, SamplingParams
from mie.checkpoint.config import load_model_config
from mie.checkpoint.tensors import expected_tensors
from mie.checkpoint.weights import RandomWeights

FAMILIES = [
    tiny_models.LLAMA,
    tiny_models.MISTRAL_WINDOW,
    tiny_models.QWEN2,
    tiny_models.QWEN3_TIED,
]
PROMPT = [1, 2, 3, 4, 5]


def config_alone(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def answer(directory: Path, **settings: Any) -> tuple[list[int], list[float]]:
    """Return greedy tokens and their log-probabilities.

    Weights are read alike for each backend, and this one compiles nothing.
    """
    given = {"backend": "numpy", "num_blocks": 8, "num_threads": 1, **settings}
    llm = LLM(directory, skip_tokenizer_init=True, **given)
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    return choice.token_ids, [next(iter(row.values())).logprob for row in choice.logprobs]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config["model_type"])
def test_a_config_alone_runs_with_weights_from_the_seed(config, tmp_path) -> None:
    directory = config_alone(tmp_path, config)
    first = answer(directory, load_format="dummy")
    assert np.isfinite(first[1]).all()
    assert answer(directory, load_format="dummy") == first
    assert answer(directory, load_format="dummy", seed=1)[1] != first[1]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_random_weights_equal_a_checkpoint_with_the_same_numbers(dtype, tmp_path) -> None:
    config = {**tiny_models.QWEN2, "torch_dtype": dtype}
    directory = config_alone(tmp_path / "dummy", config)
    drawn = RandomWeights(load_model_config(directory), seed=7)
    tensors = {name: drawn.read(name) for name in drawn}
    assert {str(tensor.dtype) for tensor in tensors.values()} == {dtype}
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected_tensors(
        load_model_config(directory)
    )
    written = config_alone(tmp_path / "written", config)
    save_file(tensors, written / "model.safetensors")
    assert answer(directory, load_format="dummy", seed=7) == answer(written)
    assert answer(written, load_format="safetensors") == answer(written, load_format="auto")


# hf_overrides.


def test_an_override_equals_another_config(tmp_path: Path) -> None:
    changed = {"rope_theta": 50.0, "rms_norm_eps": 1e-2, "max_position_embeddings": 64}
    plain = config_alone(tmp_path / "plain", tiny_models.LLAMA)
    other = config_alone(tmp_path / "other", {**tiny_models.LLAMA, **changed})
    expected = answer(other, load_format="dummy")
    assert answer(plain, load_format="dummy", hf_overrides=changed) == expected
    assert answer(plain, load_format="dummy") != expected
    llm = LLM(plain, skip_tokenizer_init=True, load_format="dummy", hf_overrides=changed)
    assert llm.engine.max_model_len == 64
    assert vars(llm.model_config) == vars(load_model_config(other)) | {"max_model_len": 64}
