"""Define the models of the CPU and GPU benchmarks, and the least that a step of them costs.

The models have published shapes and random weights. A step that decodes N sequences must read every
weight once, and the keys and values of N contexts. It must multiply every weight with N rows:

    bytes = weights · bytes per weight + N · context · 2 · L · Hkv · Dh · bytes per cached number
    flops = N · (2 · weights + 4 · context · L · Hq · Dh)

A prompt of n tokens needs, with half of its n² scores masked and one row of logits,

    flops = n · 2 · (weights − head) + 2 · head + 2 · n² · L · Hq · Dh

``weights`` counts the numbers of all matrices that are multiplied, including the head. It does not
count the embedding table, of which a step reads a few rows. A small model may exceed the bandwidth,
because the CPU's caches keep a part of it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from mie.checkpoint.config import ModelConfig
from mie.checkpoint.locate import locate_model
from mie.checkpoint.tensors import expected_tensors
from mie.sim.shapes import SHAPES as PUBLISHED

LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    # The published context of 2,048 positions is too short for the prompts of 4,096 tokens.
    "TinyLlama-1.1B": {**PUBLISHED["TinyLlama-1.1B"], "max_position_embeddings": 8192},
    "Qwen2.5-0.5B": {
        **PUBLISHED["Qwen2.5-0.5B"],
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
    },
    "SmolLM2-135M": PUBLISHED["SmolLM2-135M"],
    "toy": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
    },
}
BUNDLED = "bundled"
MODELS = ("TinyLlama-1.1B", "Qwen2.5-0.5B", "SmolLM2-135M", BUNDLED)
"""The models that are measured by default."""


def write_model(name: str, directory: Path) -> ModelConfig:
    """Write the model in bfloat16 with a tokenizer to ``directory``.

    Returns its configuration.
    """
    if name == BUNDLED:
        shutil.copytree(locate_model(BUNDLED), directory, dirs_exist_ok=True)
    else:
        directory.mkdir(exist_ok=True)
        config = {**LLAMA, **SHAPES[name]}
        (directory / "config.json").write_text(json.dumps(config))
        _write_weights(ModelConfig.from_hf(config), directory)
        _write_tokenizer(config["vocab_size"], directory)
    return ModelConfig.load(directory)


def _write_weights(config: ModelConfig, directory: Path) -> None:
    """Write random weights, equal in every run, that keep activations finite."""
    generator = np.random.default_rng(0)
    tensors = {}
    for tensor, shape in expected_tensors(config).items():
        if tensor.endswith("norm.weight"):
            tensors[tensor] = np.ones(shape, ml_dtypes.bfloat16)
            continue
        values = generator.standard_normal(shape, dtype=np.float32)
        values /= np.sqrt(shape[-1], dtype=np.float32)
        tensors[tensor] = values.astype(ml_dtypes.bfloat16)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(vocab_size: int, directory: Path) -> None:
    """Write a tokenizer with a word for each id, because CTranslate2's converter needs one.

    No text is encoded with it. The first words are those that transformers would add to Llama's or
    Qwen2's.
    """
    special = ["<unk>", "<s>", "</s>", "<|endoftext|>"]
    words = {word: i for i, word in enumerate(special)}
    words |= {f"t{i}": i for i in range(len(special), vocab_size)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "added_tokens": [], "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def random_prompts(vocab_size: int, num_requests: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts [num_requests, length] without a common prefix or special tokens."""
    generator = np.random.default_rng(seed)
    ids: list[list[int]] = generator.integers(3, vocab_size, (num_requests, length)).tolist()
    return ids


@dataclass(frozen=True, kw_only=True)
class Format:
    """The bytes of a number in an engine's weights and cache."""

    weight: float
    cache: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The least that a step must read and compute. The module's docstring has the formulas."""

    num_weights: int
    num_head_weights: int
    num_parameters: int
    num_kv_numbers: int
    """Keys and values of one token: 2 · L · Hkv · Dh."""
    num_query_numbers: int
    """Query channels of one token in all layers: L · Hq · Dh."""

    @classmethod
    def of(cls, config: ModelConfig) -> Costs:
        """Return the costs of a model."""
        sizes = {name: shape for name, shape in expected_tensors(config).items() if len(shape) == 2}
        embedding = config.vocab_size * config.hidden_size
        stored = sum(rows * columns for rows, columns in sizes.values())
        layers = config.num_layers * config.head_dim
        return cls(
            num_weights=stored if config.tie_word_embeddings else stored - embedding,
            num_head_weights=embedding,
            num_parameters=stored,
            num_kv_numbers=2 * layers * config.num_kv_heads,
            num_query_numbers=layers * config.num_heads,
        )

    def decode_bytes(self, num_seqs: int, context: float, stored: Format) -> float:
        """Return the bytes that a decode step reads."""
        cached = num_seqs * context * self.num_kv_numbers
        return self.num_weights * stored.weight + cached * stored.cache

    def decode_flops(self, num_seqs: int, context: float) -> float:
        """Return the additions and multiplications of a decode step."""
        return num_seqs * (2 * self.num_weights + 4 * context * self.num_query_numbers)

    def prefill_flops(self, num_tokens: int) -> float:
        """Return the additions and multiplications of a prompt."""
        head = self.num_head_weights
        linear = num_tokens * 2 * (self.num_weights - head) + 2 * head
        return linear + 2 * num_tokens**2 * self.num_query_numbers
