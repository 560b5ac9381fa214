"""A model of a published shape with random weights: as fast, and as large, as the real one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from mie.model.config import ModelConfig
from mie.model.tensors import expected_tensors
from mie.sim.shapes import SHAPES


def write_random_model(shape: str, directory: Path) -> None:
    """``config.json`` and float16 weights that keep activations finite; a Llama of `SHAPES`."""
    config = {
        **SHAPES[shape],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": "float16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = np.random.default_rng(0)
    tensors = {}
    for name, sizes in expected_tensors(ModelConfig.from_hf(config)).items():
        values = np.ones(sizes, np.float32)
        if not name.endswith("norm.weight"):
            values = generator.standard_normal(sizes, dtype=np.float32) / np.sqrt(sizes[-1])
        tensors[name] = values.astype(np.float16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
