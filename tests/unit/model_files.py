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

from mie.checkpoint.config import ModelConfig
from mie.checkpoint.tensors import expected_tensors

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
        tensors = random_tensors(ModelConfig.from_hf(config), ml_dtypes.bfloat16)
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
