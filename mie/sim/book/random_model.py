"""Write a model of a published shape with random weights, as fast and as large as the real one."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import save_file

from mie.checkpoint.config import ModelConfig
from mie.checkpoint.weights import RandomWeights
from mie.sim.shapes import SHAPES


def write_random_model(shape: str, directory: Path) -> None:
    """Write ``config.json`` and float16 weights of a Llama in `SHAPES`. Activations stay finite."""
    config = {
        **SHAPES[shape],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = RandomWeights(ModelConfig.from_hf(config))
    tensors = {name: weights.read(name) for name in weights}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
