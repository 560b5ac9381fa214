"""Read a model's sizes and flags from a Hugging Face ``config.json``.

A family is a row of `families.FAMILIES`, not a class. Both spellings of the file are read:
transformers 4 (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and transformers 5
(``rope_parameters``, ``dtype``, ``layer_types``). Absent keys take the defaults of transformers'
own configuration classes. The sizes that distinguish one model from another are required.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mie.base.arithmetic import ceil_div
from mie.base.files import read_json_object
from mie.checkpoint.experts import read_experts
from mie.checkpoint.families import FAMILIES
from mie.checkpoint.family import Family
from mie.checkpoint.gguf.architectures import split_names
from mie.checkpoint.gguf.config import hf_config
from mie.checkpoint.gguf.files import no_config
from mie.checkpoint.gguf.header import GgufHeader, opened
from mie.checkpoint.json_reader import JsonReader
from mie.checkpoint.layer_kinds import SLIDING, layer_kinds
from mie.checkpoint.quantisation import read_quantisation
from mie.checkpoint.recurrent import RECURRENT, read_recurrent
from mie.checkpoint.refusals import ACTIVATIONS, activation_name, refuse_unsupported
from mie.checkpoint.rope import read_ropes
from mie.checkpoint.size_limits import (
    MAX_CONTEXT,
    MAX_EPS,
    MAX_FACTOR,
    MAX_JSON_BYTES,
    MAX_LAYERS,
    MAX_TOKEN_IDS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    MIN_EPS,
    MIN_FACTOR,
)
from mie.checkpoint.wrapped import text_part
from mie.errors import ModelError
from mie.model.config import ModelConfig


def load_model_config(
    directory: Path | GgufHeader, overrides: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Return the configuration of the model in ``directory``. It may be a GGUF file or its header.

    End-of-sequence ids in ``generation_config.json`` take precedence over ids in ``config.json``,
    as in transformers. ``overrides`` replace keys of both.

    Raises:
        UnsupportedModelError: the model needs a feature that is not implemented.
        ModelError: the directory or the file is missing, or a value is bad.
    """
    model, overrides = opened(directory), overrides or {}
    if isinstance(model, GgufHeader):
        found = model_config_from_hf({**hf_config(model), **overrides}, source=str(model.path))
        return replace(found, names=split_names(found.names))
    path = model / "config.json"
    if not path.parent.is_dir():
        raise ModelError(f"model directory {directory} does not exist, or is not a directory")
    if not os.path.lexists(path):
        raise no_config(path.parent)
    config = read_json_object(path, MAX_JSON_BYTES, ModelError)
    generation = path.with_name("generation_config.json")
    if os.path.lexists(generation):
        eos = read_json_object(generation, MAX_JSON_BYTES, ModelError).get("eos_token_id")
        config = config if eos is None else {**config, "eos_token_id": eos}
    source = f"{path}{' with hf_overrides' if overrides else ''}"
    return model_config_from_hf({**config, **overrides}, source=source)


def model_config_from_hf(config: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
    """Return the configuration for a parsed ``config.json``. Messages call it ``source``.

    Keys that do not change the computation are ignored, whether known or not.

    Raises:
        UnsupportedModelError: the model needs a feature that is not implemented.
        ModelError: a required key is missing, or a value is bad.
    """
    config, left_out = text_part(config)
    architecture = _architecture(JsonReader(values=config, source=source))
    family = FAMILIES.get(architecture)
    own = config if family is None else _with_llama_keys(config, family)
    merged = {**(family.defaults if family else {}), **own}
    refuse_unsupported(merged, architecture, FAMILIES, source)
    read = _read_config(JsonReader(values=merged, source=source), architecture)
    return replace(read, left_out=left_out)


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


def _with_llama_keys(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return the configuration with a family's own keys also under Llama's names."""
    renamed = {key: config.get(own, family.defaults.get(own)) for own, key in family.keys.items()}
    return {**config, **{key: value for key, value in renamed.items() if value is not None}}


def _read_config(reader: JsonReader, architecture: str) -> ModelConfig:
    family = FAMILIES[architecture]
    hidden_size = reader.integer("hidden_size", maximum=MAX_WIDTH)
    num_layers = reader.integer("num_hidden_layers", maximum=MAX_LAYERS)
    num_heads = reader.integer("num_attention_heads", maximum=MAX_WIDTH)
    vocab_size = reader.integer("vocab_size", maximum=MAX_VOCABULARY)
    head_dim = _head_dim(reader, hidden_size, num_heads)
    if family.norms_hidden_size and num_heads * head_dim != hidden_size:
        raise reader.error(
            "head_dim",
            f"must be {hidden_size // num_heads}, hidden_size / num_attention_heads, because the "
            f"norm of {architecture}'s queries has the size of the hidden states",
            head_dim,
        )
    has_biases = "use_bias" in family.implements and reader.flag("use_bias", default=False)
    o_bias = family.o_bias_key is not None and reader.flag(family.o_bias_key, default=False)
    inner, least = "intermediate_size", 1
    if "shared_intermediate_size" in family.defaults:
        inner, least = "shared_intermediate_size", int(family.expert_size is None)
    kinds = layer_kinds(reader, architecture, num_layers)
    window = None  # transformers writes 0 where it is switched off
    if "switched" not in family.windows or reader.flag("use_sliding_window", default=False):
        window = reader.optional_integer("sliding_window", maximum=MAX_CONTEXT)
    embedding_scale = _multiplier(reader, "embedding_multiplier")
    if family.scales_embeddings:
        embedding_scale = math.sqrt(hidden_size)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_intermediate_size(reader, inner, least),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(reader, num_heads),
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps", default=1e-6, low=MIN_EPS, high=MAX_EPS),
        max_position_embeddings=reader.integer("max_position_embeddings", maximum=MAX_CONTEXT),
        tie_word_embeddings=reader.flag("tie_word_embeddings", default=False),
        qkv_bias=has_biases or _qkv_bias(reader, family),
        o_bias=has_biases or o_bias,
        mlp_bias=has_biases or reader.flag("mlp_bias", default=False),
        qk_norm=family.qk_norm,
        activation=ACTIVATIONS[activation_name(reader.values)],
        layer_windows=tuple(window if kind == SLIDING else None for kind in kinds),
        layer_ropes=tuple(
            None if kind == RECURRENT else rope
            for kind, rope in zip(kinds, read_ropes(reader, family, kinds, head_dim), strict=True)
        ),
        rope_is_interleaved=family.rope_is_interleaved,
        attention_scale=_attention_scale(reader),
        attention_soft_cap=_positive(reader, "attn_logit_softcapping"),
        logits_soft_cap=_positive(reader, "final_logit_softcapping"),
        logits_scale=_multiplier(reader, "logits_scaling"),
        embedding_scale=embedding_scale,
        residual_scale=_multiplier(reader, "residual_multiplier"),
        norm_offset=family.norm_offset,
        gates_attention=family.gates_attention,
        layers_recurrent=tuple(kind == RECURRENT for kind in kinds),
        recurrent=read_recurrent(reader, family, hidden_size) if RECURRENT in kinds else None,
        experts=read_experts(reader, family, num_layers),
        names=family.names,
        bos_token_id=next(iter(_token_ids(reader, "bos_token_id", vocab_size)), None),
        eos_token_ids=_token_ids(reader, "eos_token_id", vocab_size),
        dtype=_dtype(reader),
        quantisation=read_quantisation(reader),
    )


def _positive(reader: JsonReader, key: str) -> float | None:
    return reader.optional_number(key, low=MIN_FACTOR, high=MAX_FACTOR)


def _multiplier(reader: JsonReader, key: str) -> float:
    return reader.number(key, default=1.0, low=MIN_FACTOR, high=MAX_FACTOR)


def _attention_scale(reader: JsonReader) -> float | None:
    """Return the factor of the scores: Granite's multiplier, or Gemma's from a head size."""
    scalar = _positive(reader, "query_pre_attn_scalar")
    return _positive(reader, "attention_multiplier") if scalar is None else 1 / math.sqrt(scalar)


def _intermediate_size(reader: JsonReader, key: str, least: int) -> int:
    """Return the width of the MLP. LFM2 states a width that is adjusted to two thirds or so."""
    size = reader.integer(key, minimum=least, maximum=MAX_WIDTH)
    if not reader.flag("block_auto_adjust_ff_dim", default=False):
        return size
    size = 2 * size // 3
    if reader.values.get("block_ffn_dim_multiplier") is None:
        return size
    size = int(_multiplier(reader, "block_ffn_dim_multiplier") * size)
    multiple = reader.integer("block_multiple_of", maximum=MAX_WIDTH)
    return ceil_div(size, multiple) * multiple


def _num_kv_heads(reader: JsonReader, num_heads: int) -> int:
    num_kv_heads = reader.integer("num_key_value_heads", default=num_heads, maximum=MAX_WIDTH)
    if num_heads % num_kv_heads:
        raise reader.error(
            "num_key_value_heads", f"must divide num_attention_heads ({num_heads})", num_kv_heads
        )
    return num_kv_heads


def _qkv_bias(reader: JsonReader, family: Family) -> bool:
    return family.always_qkv_bias or reader.flag(family.qkv_bias_key, default=False)


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
