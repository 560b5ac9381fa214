"""Read a model's sizes and flags from a Hugging Face ``config.json``.

A family is a row of `FAMILIES`, not a class. Both spellings of the file are read: transformers 4
(``rope_theta``, ``rope_scaling``, ``torch_dtype``) and transformers 5 (``rope_parameters``,
``dtype``, ``layer_types``). Absent keys take the defaults of transformers' own configuration
classes. The sizes that distinguish one model from another are required.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mie.checkpoint.gguf.config import hf_config
from mie.checkpoint.gguf.header import read_gguf
from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.quantisation import Quantisation, read_quantisation
from mie.checkpoint.refusals import refuse_unsupported
from mie.checkpoint.size_limits import (
    MAX_CONTEXT,
    MAX_EPS,
    MAX_FACTOR,
    MAX_JSON_BYTES,
    MAX_LAYERS,
    MAX_THETA,
    MAX_TOKEN_IDS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    MIN_EPS,
    MIN_FACTOR,
    MIN_THETA,
)
from mie.errors import ModelError, UnsupportedModelError
from mie.system.files import read_json_object


@dataclass(frozen=True, kw_only=True)
class Family:
    """The flags of a family that its ``config.json`` does not state."""

    model_type: str
    defaults: Mapping[str, Any]
    """The defaults of transformers' configuration class for absent keys.

    A key that is present and null means "none", so they are merged under the file's own keys.
    """
    windows: Literal["none", "all", "by layer"]
    """Whether ``sliding_window`` holds for no layer, for all, or for those of ``layer_types``."""
    implements: tuple[str, ...] = ()
    """The keys of `mie.checkpoint.refusals` that are not refused in this family."""
    always_qkv_bias: bool = False
    """Whether only queries, keys and values have biases, whether the file says so or not."""
    qk_norm: bool = False


_QWEN2_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_BOS_AND_EOS: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        model_type="llama",
        defaults={"max_position_embeddings": 2048, **_BOS_AND_EOS},
        windows="none",
        implements=("attention_bias", "mlp_bias"),
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "sliding_window": 4096,
            **_BOS_AND_EOS,
        },
        windows="all",
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        defaults=_QWEN2_DEFAULTS,
        windows="by layer",
        implements=("attention_bias",),
        always_qkv_bias=True,
    ),
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        defaults={**_QWEN2_DEFAULTS, "head_dim": 128},
        windows="by layer",
        implements=("attention_bias",),
        qk_norm=True,
    ),
}
"""The supported families by the name in ``architectures``."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """How positions turn into rotations. ``mie.model.rope`` has the formulas.

    A field that the ``rope_type`` does not use keeps its default.
    """

    rope_type: str = "default"  # "default", "linear", "llama3" or "yarn"
    theta: float = 10000.0
    factor: float = 1.0  # how much the context is stretched
    original_max_position_embeddings: int | None = None  # context of pretraining: llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the ends of the ramp to whole channel pairs


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
    quantisation: Quantisation | None = None

    @classmethod
    def load(cls, directory: Path, overrides: Mapping[str, Any] | None = None) -> ModelConfig:
        """Return the configuration of the model in ``directory``, which may be a GGUF file.

        End-of-sequence ids in ``generation_config.json`` take precedence over those in
        ``config.json``, as in transformers. ``overrides`` replace keys of both.

        Raises:
            UnsupportedModelError: the model needs a feature that is not implemented.
            ModelError: the directory or the file is missing, or a value is bad.
        """
        path, overrides = Path(directory), overrides or {}
        if path.is_file():
            return cls.from_hf({**hf_config(read_gguf(path)), **overrides}, source=str(path))
        path = path / "config.json"
        if not path.parent.is_dir():
            raise ModelError(f"model directory {directory} does not exist, or is not a directory")
        if not os.path.lexists(path):
            raise ModelError(f"{directory} is not a model directory: it has no config.json")
        config = read_json_object(path, MAX_JSON_BYTES, ModelError)
        generation = path.with_name("generation_config.json")
        if os.path.lexists(generation):
            eos = read_json_object(generation, MAX_JSON_BYTES, ModelError).get("eos_token_id")
            config = config if eos is None else {**config, "eos_token_id": eos}
        source = f"{path}{' with hf_overrides' if overrides else ''}"
        return cls.from_hf({**config, **overrides}, source=source)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
        """Return the configuration for a parsed ``config.json``, which messages call ``source``.

        Keys that do not change the computation are ignored, whether known or not.

        Raises:
            UnsupportedModelError: the model needs a feature that is not implemented.
            ModelError: a required key is missing, or a value is bad.
        """
        architecture = _architecture(JsonReader(values=config, source=source))
        implemented = {name: family.implements for name, family in FAMILIES.items()}
        refuse_unsupported(config, architecture, implemented, source)
        defaults = FAMILIES[architecture].defaults
        return _read_config(JsonReader(values={**defaults, **config}, source=source), architecture)

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

        ``itemsize`` is the size of one cache element: 4 bytes for float32, 2 for float16.
        """
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


def _architecture(reader: JsonReader) -> str:
    """Return the class name of the model, from ``architectures`` or from ``model_type``."""
    names = reader.texts("architectures")
    if names:
        return next((name for name in names if name in FAMILIES), names[0])
    model_type = reader.text("model_type", default="")
    if not model_type:
        raise ModelError(f"{reader.source}: neither 'architectures' nor 'model_type' is given")
    known = {family.model_type: name for name, family in FAMILIES.items()}
    return known.get(model_type, model_type)


def _read_config(reader: JsonReader, architecture: str) -> ModelConfig:
    family = FAMILIES[architecture]
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
        qkv_bias=attention_bias or family.always_qkv_bias,
        o_bias=attention_bias and not family.always_qkv_bias,
        mlp_bias=reader.flag("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        layer_windows=_layer_windows(reader, architecture, num_layers),
        rope=_rope(reader),
        bos_token_id=next(iter(_token_ids(reader, "bos_token_id", vocab_size)), None),
        eos_token_ids=_token_ids(reader, "eos_token_id", vocab_size),
        dtype=_dtype(reader),
        quantisation=read_quantisation(reader),
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
    ids = reader.token_ids(key)
    if len(ids) > MAX_TOKEN_IDS:
        raise reader.error(key, f"must have at most {MAX_TOKEN_IDS} ids", ids)
    if not all(0 <= token_id < vocab_size for token_id in ids):
        expected = f"must lie in 0 … {vocab_size - 1} (vocab_size - 1)"
        raise reader.error(key, expected, reader.values[key])
    return tuple(dict.fromkeys(ids))


def _dtype(reader: JsonReader) -> str:
    name = reader.text("dtype", default=reader.text("torch_dtype", default="float32"))
    return name.removeprefix("torch.")


# Sliding windows


def _layer_windows(
    reader: JsonReader, architecture: str, num_layers: int
) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, by the rules of its family."""
    windows = FAMILIES[architecture].windows
    window, first_sliding = None, num_layers
    if windows != "none":
        window = reader.optional_integer("sliding_window", maximum=MAX_CONTEXT)
    if windows == "by layer" and not reader.flag("use_sliding_window", default=False):
        window = None
    if window is not None:
        first_sliding = 0
        if windows == "by layer":
            first_sliding = reader.integer("max_window_layers", minimum=0, maximum=MAX_WIDTH)
    rule = tuple(
        "full_attention" if layer < first_sliding else "sliding_attention"
        for layer in range(num_layers)
    )
    layer_types = reader.texts("layer_types") or rule
    if len(layer_types) != num_layers:
        raise reader.error(
            "layer_types", f"must name num_hidden_layers ({num_layers}) layers", len(layer_types)
        )
    if layer_types != rule and windows != "by layer":
        # transformers ignores the key in these families, so the author's intention is unclear.
        supported = [name for name, each in FAMILIES.items() if each.windows == "by layer"]
        raise UnsupportedModelError(
            f"{reader.source}: layer_types that differ from layer to layer are not supported in "
            f"{architecture}; supported in {', '.join(supported)}"
        )
    if window is None and "sliding_attention" in layer_types:
        raise ModelError(
            f"{reader.source}: layer_types asks for sliding_attention, but sliding_window is null "
            "or use_sliding_window is false; set both, or name those layers full_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


# Rotations


def _rope(reader: JsonReader) -> RopeConfig:
    """Return the rotations of a model, from the keys of transformers 4 or 5."""
    scaling = reader.nested(
        "rope_scaling" if reader.values.get("rope_scaling") else "rope_parameters"
    )
    rope_type = scaling.text("rope_type", default=scaling.text("type", default="default"))
    outside = reader.number("rope_theta", default=10000.0, low=MIN_THETA, high=MAX_THETA)
    theta = scaling.number("rope_theta", default=outside, low=MIN_THETA, high=MAX_THETA)
    if rope_type == "default":
        return RopeConfig(theta=theta)
    context = reader.integer("max_position_embeddings", maximum=MAX_CONTEXT)
    if rope_type == "linear":
        return RopeConfig(rope_type=rope_type, theta=theta, factor=_stretch(scaling, context))
    name = "original_max_position_embeddings"
    original = reader.optional_integer(name, maximum=MAX_CONTEXT)
    original = original or scaling.optional_integer(name, maximum=MAX_CONTEXT)
    if rope_type == "llama3":
        low, high = _factor(scaling, "low_freq_factor"), _factor(scaling, "high_freq_factor")
        if high <= low:
            raise scaling.error("high_freq_factor", f"must exceed low_freq_factor ({low:g})", high)
        return RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=_factor(scaling, "factor"),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    before = original or context
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=_stretch(scaling, before, context / before),
        original_max_position_embeddings=original,
        beta_fast=_factor(scaling, "beta_fast", 32.0),
        beta_slow=_factor(scaling, "beta_slow", 1.0),
        attention_factor=scaling.optional_number(
            "attention_factor", low=MIN_FACTOR, high=MAX_FACTOR
        ),
        # Zero stands for "not set".
        mscale=scaling.optional_number("mscale", low=0.0, high=MAX_FACTOR),
        mscale_all_dim=scaling.optional_number("mscale_all_dim", low=0.0, high=MAX_FACTOR),
        truncate=scaling.flag("truncate", default=True),
    )


def _factor(scaling: JsonReader, key: str, default: float | None = None) -> float:
    return scaling.number(key, default=default, low=MIN_FACTOR, high=MAX_FACTOR)


def _stretch(scaling: JsonReader, context: int, default: float | None = None) -> float:
    """Return the factor that stretches ``context``. The result must be within the limit."""
    factor = _factor(scaling, "factor", default)
    if not 1 <= context * factor <= MAX_CONTEXT:
        raise scaling.error(
            "factor", f"must turn a context of {context} into one of 1 … {MAX_CONTEXT}", factor
        )
    return factor
