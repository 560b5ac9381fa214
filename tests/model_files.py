"""Write tiny model directories for the tests of configurations and weights."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray
from safetensors.numpy import save_file

from mie import LLM, SamplingParams
from mie.checkpoint.config import model_config_from_hf
from mie.checkpoint.tensors import expected_tensors
from mie.model.config import ModelConfig

GOLDEN = Path(__file__).parent / "golden" / "models"

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def hf_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """Return a small ``config.json`` of a family. A change to Ellipsis removes the key."""
    config = {**LLAMA, "architectures": [architecture], **changes}
    return {key: value for key, value in config.items() if value is not ...}


def golden_values(name: str) -> dict[str, Any]:
    """Return the ``config.json`` of a golden model."""
    values: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
    return values


def golden_config(name: str, **changes: Any) -> ModelConfig:
    """Return the configuration of a golden model with changed values."""
    return model_config_from_hf({**golden_values(name), **changes})


def greedy(directory: Path, max_tokens: int = 8, prompt: Any = (1, 2, 3), **more: Any) -> list[int]:
    """Return the tokens with which a model without a tokenizer continues a prompt."""
    settings = {"backend": "numpy", "num_blocks": 16, **more}
    llm = LLM(str(directory), skip_tokenizer_init=True, **settings)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    [output] = llm.generate([[*prompt]], params, use_tqdm=False)
    tokens: list[int] = output.outputs[0].token_ids
    return tokens


def scores(directory: Path, **settings: Any) -> list[list[float]]:
    """Return the log-probabilities of all 40 tokens after each token of a prompt."""
    llm = LLM(str(directory), skip_tokenizer_init=True, max_model_len=32, **settings)
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1, temperature=0)
    [out] = llm.generate([[*range(4, 28)]], params, use_tqdm=False)
    rows = out.prompt_logprobs or []
    return [[row[token].logprob for token in range(40)] for row in rows[1:] if row]


def random_tensors(config: ModelConfig, dtype: DTypeLike = np.float32) -> dict[str, NDArray[Any]]:
    """Return all tensors of the model with random values."""
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape).astype(dtype)
        for name, shape in expected_tensors(config).items()
    }


def write_model(
    directory: Path,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, NDArray[Any]] | None = None,
) -> Path:
    """Write a model directory with one weights file, by default with random tensors."""
    directory.mkdir(exist_ok=True)
    config = hf_config() if config is None else config
    (directory / "config.json").write_text(json.dumps(config))
    if tensors is None:
        tensors = random_tensors(model_config_from_hf(config), ml_dtypes.bfloat16)
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


def write_shards(
    directory: Path, tensors: Mapping[str, NDArray[Any]], num_shards: int = 2
) -> dict[str, str]:
    """Write weights in shards with their index, and return the weight map."""
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file_name = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::num_shards])
        save_file(part, directory / file_name)
        weight_map |= dict.fromkeys(part, file_name)
    write_index(directory, weight_map)
    return weight_map


def write_index(directory: Path, weight_map: object) -> None:
    """Write the index of a sharded checkpoint with any ``weight_map``."""
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    """Return a safetensors file with a header, which is bytes or is converted to JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
