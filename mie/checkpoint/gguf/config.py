"""Translate the metadata of a GGUF file to a Hugging Face ``config.json``."""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mie.base.files import open_file
from mie.checkpoint.families import FAMILIES
from mie.checkpoint.gguf.architectures import ARCHITECTURES, GgufArchitecture, family_of
from mie.checkpoint.gguf.arrays import STRING, GgufArray
from mie.checkpoint.gguf.header import NO_TOKEN, GgufHeader, decimal
from mie.checkpoint.gguf.tokenizer import END_TOKENS
from mie.errors import ModelError, UnsupportedModelError, WeightsError, shown

_KEYS, _SAMPLING = json.loads(
    Path(__file__).with_name("keys.json").read_text(encoding="utf-8")
).values()
"""Keys of ``config.json`` and `SamplingParams`, and of the metadata after a prefix."""
_OTHER_ENDS = ("eot_token_id", "eom_token_id")
_MAY_HAVE_BIAS = ("attn_q", "attn_qkv", "attn_output", "ffn_down")
_LAYERS_OF_27B = (46, 62)  # Gemma 2 and 3: scores are scaled by the average head
_ROUNDING = 1e-6  # relative error of a rounding to float32
_LOW, _HIGH = 1.0, 4.0  # the factors of Llama 3's scaling in all its models


def hf_config(header: GgufHeader) -> dict[str, Any]:
    """Return the model's ``config.json``. Values are not checked here."""
    values = header.values
    name = values.get("general.architecture")
    if not isinstance(name, str):
        raise ModelError(f"{header.path} does not name its architecture: got {shown(name)}")
    row = ARCHITECTURES.get(name)
    config = {key: values.get(f"{name}.{own}") for key, own in _KEYS.items()}
    if row is not None:
        config |= _of_family(header, name, row, config)
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    if config["head_dim"] is None:
        config["head_dim"] = _quotient(config, "hidden_size", "num_attention_heads")
    embedding = header.tensors.get("token_embd.weight")
    tokens = values.get("tokenizer.ggml.tokens")
    has_bias = {key: f"blk.0.{key}.bias" in header.tensors for key in _MAY_HAVE_BIAS}
    return {
        "architectures": [name],
        **config,
        "vocab_size": embedding.shape[0] if embedding else getattr(tokens, "count", None),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": has_bias["attn_q"] or has_bias["attn_qkv"],
        "attention_out_bias": has_bias["attn_output"],
        "mlp_bias": has_bias["ffn_down"],
        "partial_rotary_factor": _rotary_part(values, name, config["head_dim"]),
        "rope_scaling": _rope_scaling(header, name, config),
        "bos_token_id": _special_id(header, "bos_token_id"),
        "eos_token_id": _end_ids(header),
        "dtype": "float16" if embedding is None else _dtype(embedding.dtype),
    }


def _of_family(
    header: GgufHeader, name: str, row: GgufArchitecture, config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the values that depend on the family. The family follows from the keys of the file."""
    values = header.values
    architecture = family_of(values) or row.family
    family = FAMILIES[architecture]
    found: dict[str, Any] = {"architectures": [architecture]}
    found |= {key: value for key, value in row.defaults.items() if config.get(key) is None}
    if family.expert_size == "intermediate_size":  # which gpt-oss states under both keys
        found["moe_intermediate_size"] = None
    if family.rope_by_type and values.get(f"{name}.rope.freq_base_swa") is not None:
        found["rope_local_base_freq"] = values[f"{name}.rope.freq_base_swa"]
    window = found["sliding_window"] = config["sliding_window"] or found.get("sliding_window")
    pattern = values.get(f"{name}.attention.sliding_window_pattern")
    if window and family.windows == "pattern" and pattern is not None:
        kinds = ("full_attention", "sliding_attention")
        is_list = isinstance(pattern, GgufArray) and pattern.kind != STRING
        found |= (
            {"layer_types": [kinds[bool(each)] for each in pattern]}
            if is_list
            else {"sliding_window_pattern": pattern}
        )
    if "query_pre_attn_scalar" in family.defaults:
        # llama.cpp finds the two models of 27B by their numbers of layers.
        is_27b = config["num_hidden_layers"] in _LAYERS_OF_27B
        divided = _quotient(config, "hidden_size", "num_attention_heads")
        found["query_pre_attn_scalar"] = divided if is_27b else config["head_dim"]
    if not values.get(f"{name}.rope.scaling.finetuned", True):
        raise UnsupportedModelError(
            f"{header.path}: layers without RoPE ({name}.rope.scaling.finetuned) are not supported "
            f"in {architecture}"
        )
    return found


def _quotient(config: Mapping[str, Any], key: str, divisor: str) -> Any:
    """Return the quotient of two numbers, or None unless both are given and it is whole."""
    above, below = config[key], config[divisor]
    is_given = isinstance(above, int) and isinstance(below, int) and below > 0
    return above // below if is_given and not above % below else None


def generation_config(header: GgufHeader) -> dict[str, Any]:
    """Return the model's ``generation_config.json``."""
    found = {key: header.values.get(f"general.sampling.{own}") for key, own in _SAMPLING.items()}
    return {key: value for key, value in found.items() if value is not None}


def _dtype(kind: str) -> str:
    """Return the dtype for a GPU to compute in, as a ``config.json`` names it."""
    return {"F32": "float32", "BF16": "bfloat16"}.get(kind, "float16")


def _end_ids(header: GgufHeader) -> list[Any]:
    tokens = header.values.get("tokenizer.ggml.tokens")
    values = [_special_id(header, key) for key in ("eos_token_id", *_OTHER_ENDS)]
    found = [value for value in values if value is not None]
    if isinstance(tokens, GgufArray) and tokens.kind == STRING:
        places = {text: tokens.find(text) for text in END_TOKENS}
        ends = {text: index for text, index in places.items() if index is not None}
        found += sorted(ends.values())
        if {"<|return|>", "<|call|>"} <= ends.keys():  # harmony, where it ends only a message
            found = [index for index in found if index != ends.get("<|end|>")]
    return list(dict.fromkeys(found))


def _special_id(header: GgufHeader, key: str) -> Any:
    """Return the id of a special token, or None if the model lacks the token.

    BOS and EOS must be in the vocabulary. Other tokens that end a text may be left out.
    """
    value = header.values.get(f"tokenizer.ggml.{key}")
    tokens = header.values.get("tokenizer.ggml.tokens")
    is_absent = isinstance(tokens, GgufArray) and isinstance(value, int) and value >= tokens.count
    return None if value in NO_TOKEN or (is_absent and key in _OTHER_ENDS) else value


def _rotary_part(values: Mapping[str, Any], name: str, head_dim: Any) -> float | None:
    """Return the rotated share of a head, or None for all of it."""
    rotated = values.get(f"{name}.rope.dimension_count")
    if not isinstance(rotated, int) or not isinstance(head_dim, int) or rotated == head_dim:
        return None
    return rotated / max(1, head_dim)


def _rope_scaling(
    header: GgufHeader, name: str, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the model's ``rope_scaling``. The type is not checked here."""
    values, prefix = header.values, f"{name}.rope.scaling."
    kind = values.get(prefix + "type", "none")
    factor = values.get(prefix + "factor")
    if factor is None and values.get(f"{name}.rope.scale_linear") is not None:
        kind, factor = "linear", values[f"{name}.rope.scale_linear"]
    if "rope_freqs.weight" in header.tensors:
        return _llama3_scaling(header, config)
    if "rope_factors_long.weight" in header.tensors:
        return {
            "rope_type": "longrope",
            "attention_factor": _attention_factor(header, name, config),
            "short_factor": [*map(decimal, _read_floats(header, "rope_factors_short.weight"))],
            "long_factor": [*map(decimal, _read_floats(header, "rope_factors_long.weight"))],
        }
    if kind == "none" or (kind == "linear" and factor == 1):
        return None
    for key in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if values.get(prefix + key, 1) != 1:
            raise UnsupportedModelError(
                f"{header.path}: {prefix}{key} {shown(values[prefix + key])} is not supported"
            )
    scaling = {
        "rope_type": kind,
        "factor": factor,
        "beta_fast": values.get(prefix + "yarn_beta_fast"),
        "beta_slow": values.get(prefix + "yarn_beta_slow"),
        "truncate": name != "gpt-oss",
        "llama_4_scaling_beta": values.get(f"{name}.attention.temperature_scale"),
    }
    if values.get(prefix + "yarn_log_multiplier"):
        scaling |= {"mscale": 1.0, "mscale_all_dim": values[prefix + "yarn_log_multiplier"]}
    return scaling


def _attention_factor(header: GgufHeader, name: str, config: Mapping[str, Any]) -> Any:
    """Return LongRoPE's factor of cos and sin, or None if it follows from the two contexts."""
    factor: Any = header.values.get(f"{name}.rope.scaling.attn_factor")
    context, original = (config[f"{key}max_position_embeddings"] for key in ("", "original_"))
    if not all(isinstance(each, int | float) and each > 1 for each in (factor, context, original)):
        return factor
    usual = math.sqrt(1 + math.log(max(1, context / original)) / math.log(original))
    return None if math.isclose(factor, usual, rel_tol=_ROUNDING) else factor


def _llama3_scaling(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """Find the parameters of Llama 3's scaling. The file has only the results.

    The tensor holds the divisor of each frequency. A divisor between 1 and the factor determines
    the original context. The lowest frequencies have such divisors.
    """
    divisors = _read_floats(header, "rope_freqs.weight")
    theta, factor = config["rope_theta"], max(divisors)
    if not isinstance(theta, int | float) or not 1 < theta < 1e30 or not 1 < factor < 1e30:
        raise ModelError(f"{header.path}: rope_freqs.weight does not fit rope.freq_base")
    waves = [2 * math.pi * theta ** (pair / len(divisors)) for pair in range(len(divisors))]
    between = [each for each in zip(waves, divisors, strict=True) if 1 < each[1] < factor]
    original = round(_original(*between[0], factor)) if between else 0
    wanted = [_divisor(wave, factor, original) for wave in waves]
    if not all(abs(a - b) <= _ROUNDING * b for a, b in zip(divisors, wanted, strict=True)):
        raise UnsupportedModelError(
            f"{header.path}: rope_freqs.weight is not Llama 3's scaling with low_freq_factor "
            f"{_LOW:g} and high_freq_factor {_HIGH:g}; other frequencies are not supported"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": original,
    }


def _original(wave: float, divisor: float, factor: float) -> float:
    """Return the original context from one divisor. This is the inverse of `_divisor`."""
    smooth = (1 / divisor - 1 / factor) / (1 - 1 / factor)
    return wave * (smooth * (_HIGH - _LOW) + _LOW)


def _divisor(wavelength: float, factor: float, original: int) -> float:
    """Return the divisor of a frequency, as llama.cpp's converter computes it."""
    turns = original / wavelength
    if turns > _HIGH:
        return 1.0
    if turns < _LOW:
        return factor
    smooth = (turns - _LOW) / (_HIGH - _LOW)
    return 1 / ((1 - smooth) / factor + smooth)


def _read_floats(header: GgufHeader, name: str) -> Sequence[float]:
    tensor = header.tensors.get(name)
    if tensor is None or tensor.dtype != "F32" or len(tensor.shape) != 1 or tensor.nbytes > 1 << 20:
        raise WeightsError(f"{header.path}: {name} must be a vector of F32")
    with open_file(Path(tensor.path)) as file:
        file.seek(tensor.start)
        data = file.read(tensor.nbytes)
    return struct.unpack(f"<{len(data) // 4}f", data)
