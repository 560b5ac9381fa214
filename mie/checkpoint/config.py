"""Read a model's sizes and flags from a Hugging Face ``config.json``.

A family is flags, not a class. Both spellings of the file are read: transformers 4 (``rope_theta``,
``rope_scaling``, ``torch_dtype``) and transformers 5 (``rope_parameters``, ``dtype``,
``layer_types``). Absent keys take the defaults of transformers' own configuration classes. The
sizes that distinguish one model from another are required.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.layer_windows import read_layer_windows
from mie.checkpoint.refusals import refuse_unsupported
from mie.checkpoint.rope_config import RopeConfig, read_rope
from mie.checkpoint.size_limits import (
    MAX_CONTEXT,
    MAX_EPS,
    MAX_JSON_BYTES,
    MAX_LAYERS,
    MAX_TOKEN_IDS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    MIN_EPS,
)
from mie.errors import ModelError
from mie.system.files import read_json_object

# The defaults of transformers' configuration class for absent keys, by family. A key that is
# present and null means "none", so these are merged under the file's own keys.
_QWEN2_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_FAMILY_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {
        "max_position_embeddings": 2048,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "MistralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Qwen2ForCausalLM": _QWEN2_DEFAULTS,
    "Qwen3ForCausalLM": {**_QWEN2_DEFAULTS, "head_dim": 128},
}
_MODEL_TYPES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILY_DEFAULTS)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and flags of one decoder-only model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layer_windows: tuple[int | None, ...]  # keys that a query sees, itself included; None is all
    rope: RopeConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # as in the file; the checkpoint's own dtype may differ

    @classmethod
    def load(cls, directory: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Return the configuration of the model in ``directory``.

        Reads ``config.json``. End-of-sequence ids in ``generation_config.json`` take precedence, as
        in transformers. ``overrides`` replace keys of both.

        Raises:
            UnsupportedModelError: the model needs a feature that is not implemented.
            ModelError: the directory or the file is missing, or a value is bad.
        """
        path = Path(directory) / "config.json"
        if not path.parent.is_dir():
            raise ModelError(f"model directory {directory} does not exist, or is not a directory")
        if not os.path.lexists(path):
            raise ModelError(f"{directory} is not a model directory: it has no config.json")
        config = read_json_object(path, MAX_JSON_BYTES, ModelError)
        generation = path.with_name("generation_config.json")
        if os.path.lexists(generation):
            eos = read_json_object(generation, MAX_JSON_BYTES, ModelError).get("eos_token_id")
            config = config if eos is None else {**config, "eos_token_id": eos}
        if overrides:
            return cls.from_hf({**config, **overrides}, source=f"{path} with hf_overrides")
        return cls.from_hf(config, source=str(path))

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
        """Return the configuration for a parsed ``config.json``.

        Keys that do not change the computation are ignored, whether known or not.

        Args:
            config: the parsed file.
            source: the file's name in error messages.

        Raises:
            UnsupportedModelError: the model needs a feature that is not implemented.
            ModelError: a required key is missing, or a value is bad.
        """
        architecture = _architecture(JsonReader(values=config, source=source))
        refuse_unsupported(
            config, architecture=architecture, supported=SUPPORTED_ARCHITECTURES, source=source
        )
        reader = JsonReader(values={**_FAMILY_DEFAULTS[architecture], **config}, source=source)
        return _read_config(reader, architecture)

    @property
    def context_length(self) -> int:
        """The number of tokens that the model can attend over, RoPE scaling included.

        ``max_position_embeddings`` counts the stretched context for Llama-3 scaling. For linear
        scaling it counts the original one, as in vLLM. For YaRN both conventions are in use (Qwen
        states the original), so the larger reading holds.
        """
        if self.rope.rope_type == "linear":
            return int(self.max_position_embeddings * self.rope.factor)
        if self.rope.rope_type == "yarn":
            original = self.rope.original_max_position_embeddings or self.max_position_embeddings
            return max(self.max_position_embeddings, int(original * self.rope.factor))
        return self.max_position_embeddings

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of keys and values of one token in all layers.

        Args:
            itemsize: bytes of one cache element: 4 for float32, 2 for float16 and bfloat16.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def _architecture(reader: JsonReader) -> str:
    """Return the class name of the model, from ``architectures`` or from ``model_type``."""
    names = reader.texts("architectures")
    known = [name for name in names if name in SUPPORTED_ARCHITECTURES]
    if names:
        return (known or names)[0]
    model_type = reader.text("model_type", default="")
    if not model_type:
        raise ModelError(f"{reader.source}: neither 'architectures' nor 'model_type' is given")
    return _MODEL_TYPES.get(model_type, model_type)


def _read_config(reader: JsonReader, architecture: str) -> ModelConfig:
    hidden_size = reader.integer("hidden_size", maximum=MAX_WIDTH)
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = reader.integer("num_attention_heads", maximum=MAX_WIDTH)
    vocab_size = reader.integer("vocab_size", maximum=MAX_VOCABULARY)
    attention_bias = reader.flag("attention_bias", default=False)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size", maximum=MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(reader, num_heads),
        head_dim=_head_dim(reader, hidden_size, num_heads),
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6, low=MIN_EPS, high=MAX_EPS),
        max_position_embeddings=reader.integer("max_position_embeddings", maximum=MAX_CONTEXT),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=False),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=reader.flag("mlp_bias", default=False),
        qk_norm=architecture == "Qwen3ForCausalLM",
        layer_windows=read_layer_windows(reader, architecture, num_layers),
        rope=read_rope(reader),
        bos_token_id=next(iter(_token_ids(reader, "bos_token_id", vocab_size)), None),
        eos_token_ids=_token_ids(reader, "eos_token_id", vocab_size),
        dtype=_dtype(reader),
    )


def _num_kv_heads(reader: JsonReader, num_heads: int) -> int:
    num_kv_heads = reader.integer("num_key_value_heads", default=num_heads, maximum=MAX_WIDTH)
    if num_heads % num_kv_heads:
        raise reader.error(
            "num_key_value_heads", f"must divide num_attention_heads ({num_heads})", num_kv_heads
        )
    return num_kv_heads


def _head_dim(reader: JsonReader, hidden_size: int, num_heads: int) -> int:
    head_dim = reader.optional_integer("head_dim", maximum=MAX_WIDTH)
    if head_dim is None:
        if hidden_size % num_heads:
            raise reader.error(
                "hidden_size",
                f"must be a multiple of num_attention_heads ({num_heads}) where head_dim is absent",
                hidden_size,
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise reader.error("head_dim", "must be even (RoPE turns pairs of channels)", head_dim)
    return head_dim


def _token_ids(reader: JsonReader, key: str, vocab_size: int) -> tuple[int, ...]:
    """Return the ids under ``key`` (an integer, a list of integers, or null), each once."""
    value = reader.values.get(key)
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if len(ids) > MAX_TOKEN_IDS:
        raise reader.error(key, f"must have at most {MAX_TOKEN_IDS} ids", value)
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise reader.error(key, "must be an integer or a list of integers", value)
        if not 0 <= token_id < vocab_size:
            raise reader.error(key, f"must lie in 0 … {vocab_size - 1} (vocab_size - 1)", value)
    return tuple(dict.fromkeys(ids))


def _dtype(reader: JsonReader) -> str:
    name = reader.text("dtype", default=reader.text("torch_dtype", default="float32"))
    return name.removeprefix("torch.")
