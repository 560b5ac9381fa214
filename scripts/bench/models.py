"""Write the models of the benchmarks: published shapes with random weights, and tokenizers.

A step that decodes N sequences must read every weight once, and the keys and values of N contexts:

    bytes = weights · bytes per weight + N · context · 2 · L · Hkv · Dh · bytes per cached number

``weights`` counts the numbers of all matrices that are multiplied, including the head. It does not
count the embedding table, because a step reads few rows of it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mie.checkpoint.config import load_model_config
from mie.checkpoint.locate import locate_model
from mie.checkpoint.tensors import expected_tensors
from mie.lab.sim.devices import SHAPES as PUBLISHED
from mie.model.config import ModelConfig

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
SPECIAL = ("<unk>", "<s>", "</s>")
LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
MARKS = '",:{}[]. -_\n0123456789'
MAX_LENGTH = 12
"""Characters of a token at most."""
MAX_SHORT = 200
"""Number of pieces of each kind that others end with."""


def write_model(name: str, directory: Path, *, has_weights: bool = True) -> ModelConfig:
    """Write a model and its tokenizer to a directory, and return its configuration.

    The bfloat16 weights are random, equal in every run, and keep activations finite.
    """
    directory.mkdir(exist_ok=True)
    if name == BUNDLED:
        shutil.copytree(locate_model(BUNDLED), directory, dirs_exist_ok=True)
        return load_model_config(directory)
    (directory / "config.json").write_text(json.dumps({**LLAMA, **SHAPES[name]}))
    write_tokenizer(directory, SHAPES[name]["vocab_size"])
    config = load_model_config(directory)
    if has_weights:
        generator, tensors = np.random.default_rng(0), {}
        for tensor, shape in expected_tensors(config).items():
            values = np.ones(shape, np.float32)
            if not tensor.endswith("norm.weight"):
                values = generator.standard_normal(shape, dtype=np.float32)
                values /= np.sqrt(shape[-1], dtype=np.float32)
            tensors[tensor] = values.astype(ml_dtypes.bfloat16)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return config


def write_tokenizer(folder: Path, vocab_size: int) -> Path:
    """Write a byte-level BPE tokenizer of ``vocab_size`` tokens, and return its folder.

    Each token above the 256 bytes joins two earlier ones. Most are words with or without a space
    before, some are numbers and punctuation, as in the vocabularies of published models.
    """
    tokens = dict.fromkeys([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    pools = {"word": list(LETTERS), "mark": list(map(_spelled, MARKS)), "spaced": [_spelled(" ")]}
    merges, rng = [], random.Random(0)
    while len(tokens) < vocab_size:
        kind = rng.choices(["word", "spaced", "mark"], [6, 4, 1])[0]
        short = pools["word" if kind == "spaced" else kind][:MAX_SHORT]
        joined = (left := rng.choice(pools[kind])) + (right := rng.choice(short))
        if len(joined) <= MAX_LENGTH and joined not in tokens:
            tokens[joined] = None
            merges.append((left, right))
            pools[kind].append(joined)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _spelled(text: str) -> str:
    """Return a text as byte-level tokenizers spell it."""
    [(piece, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    return piece


def random_prompts(vocab_size: int, num_requests: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts [num_requests, length] without a common prefix or special tokens."""
    generator = np.random.default_rng(seed)
    ids: list[list[int]] = generator.integers(3, vocab_size, (num_requests, length)).tolist()
    return ids


def decode_bytes(
    config: ModelConfig,
    num_seqs: int,
    context: float,
    itemsize: int,
    weight_sizes: tuple[float, float] | None = None,
) -> float:
    """Return the bytes that a decode step reads. Numbers have ``itemsize`` bytes.

    ``weight_sizes`` are the bytes of a weight of the layers and of the head, if they are others.
    """
    sizes = (shape for shape in expected_tensors(config).values() if len(shape) == 2)
    head = config.vocab_size * config.hidden_size
    layers = sum(rows * columns for rows, columns in sizes) - head
    layers -= 0 if config.tie_word_embeddings else head
    cached = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    of_layers, of_head = weight_sizes or (itemsize, itemsize)
    return of_layers * layers + of_head * head + itemsize * num_seqs * context * cached
