"""Write GGUF files, byte by byte, and convert model directories as llama.cpp's converter does.

Nothing of mie is used, so that a mistake there is not repeated here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "BF16": 30}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

Tensor = tuple[int, tuple[int, ...], bytes]
"""The number of a type, the dimensions in the order of the file, and the data."""


def text(value: str | bytes) -> bytes:
    """Return a string of the format."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """Return the type and the bytes of a value. Integers are uint32, lists of them int32."""
    if isinstance(item, list):
        kind, code = {str: (8, ""), float: (6, "f"), bool: (7, "?"), int: (5, "i")}[type(item[0])]
        data = b"".join(map(text, item)) if kind == 8 else struct.pack(f"<{len(item)}{code}", *item)
        return struct.pack("<IIQ", 9, kind, len(item)) + data
    if isinstance(item, str):
        return struct.pack("<I", 8) + text(item)
    kind, code = {bool: (7, "?"), float: (6, "f"), int: (4, "I")}[type(item)]
    return struct.pack(f"<I{code}", kind, item)


def gguf_bytes(
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """Return a GGUF file."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
    header += b"".join(text(key) + value(item) for key, item in values.items())
    data = b""
    for name, (number, dimensions, numbers) in tensors.items():
        header += text(name) + struct.pack("<I", len(dimensions))
        header += struct.pack(f"<{len(dimensions)}QIQ", *dimensions, number, len(data))
        data += numbers + bytes(-len(numbers) % alignment)
    return header + bytes(-len(header) % alignment) + data


def encoded(array: np.ndarray, kind: str) -> Tensor:
    """Return a tensor in F32, F16, BF16, Q8_0 or Q4_0.

    Vectors stay in F32. Rows that are not a multiple of a block stay in F16, as in llama.cpp.
    """
    if array.ndim == 1 or (kind.startswith("Q") and array.shape[-1] % 32):
        kind = "F32" if array.ndim == 1 else "F16"
    array = np.ascontiguousarray(array, np.float32)
    dimensions = tuple(reversed(array.shape))
    if kind.startswith("Q"):
        blocks = array.reshape(-1, 32)
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        scale = (largest / (127 if kind == "Q8_0" else 7)).astype(np.float16)
        safe = np.where(scale == 0, 1, scale).astype(np.float32)
        codes = np.rint(blocks / safe).clip(-127, 127)
        if kind == "Q8_0":
            packed = codes.astype(np.int8).view(np.uint8)
        else:
            nibbles = (codes.clip(-8, 7) + 8).astype(np.uint8)
            packed = nibbles[:, :16] | nibbles[:, 16:] << 4
        data = np.hstack((scale.view(np.uint8).reshape(-1, 2), packed)).tobytes()
    else:
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
        data = array.astype(dtype).tobytes()
    return NUMBERS[kind], dimensions, data


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows as llama.cpp's converter orders those of a Llama's queries and keys."""
    halves = weight.reshape(num_heads, 2, len(weight) // num_heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def names_of_layers(num_layers: int) -> dict[str, str]:
    """Return the name in a GGUF file of each module."""
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
    }
    of_layer = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(num_layers):
        names |= {
            f"model.layers.{layer}.{hf}": f"blk.{layer}.{own}" for hf, own in of_layer.items()
        }
    return names


def tensors_of(directory: Path, kind: str) -> dict[str, Tensor]:
    """Return the tensors of a model directory, converted to a type."""
    config = json.loads((directory / "config.json").read_text())
    names = names_of_layers(config["num_hidden_layers"])
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, array in load_file(file).items():
            module, _, suffix = name.rpartition(".")
            numbers = array.astype(np.float32)
            if config["model_type"] in ("llama", "mistral"):
                if module.endswith("q_proj"):
                    numbers = interleaved(numbers, config["num_attention_heads"])
                if module.endswith("k_proj"):
                    numbers = interleaved(numbers, config["num_key_value_heads"])
            tensors[f"{names[module]}.{suffix}"] = encoded(numbers, kind)
    if rope_of(config)["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = encoded(divisors_of_llama3(config), "F32")
    return tensors


def sizes_of(directory: Path) -> dict[str, Any]:
    """Return the metadata of a model directory's ``config.json``."""
    config = json.loads((directory / "config.json").read_text())
    name = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    rope = rope_of(config)
    own = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        "vocab_size": config["vocab_size"],
    }
    if rope["rope_type"] in ("linear", "yarn"):
        own |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": rope["factor"]}
        if "original_max_position_embeddings" in rope:
            key = "rope.scaling.original_context_length"
            own[key] = rope["original_max_position_embeddings"]
    if config["model_type"] == "mistral" and config["sliding_window"]:
        own["attention.sliding_window"] = config["sliding_window"]
    if "head_dim" in config:
        own |= {f"attention.{each}_length": config["head_dim"] for each in ("key", "value")}
        own["rope.dimension_count"] = config["head_dim"]
    return {
        "general.architecture": name,
        "general.name": directory.name,
        **{f"{name}.{key}": item for key, item in own.items()},
        **ids_of(config),
    }


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotations of a ``config.json``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10000.0), **rope, "rope_type": kind}


def ids_of(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the special ids of a ``config.json``."""
    ends = config.get("eos_token_id")
    found = [config.get("bos_token_id"), *(ends if isinstance(ends, list) else [ends])]
    keys = ("bos_token_id", "eos_token_id", "eot_token_id", "eom_token_id")
    pairs = zip(keys, found, strict=False)
    return {f"tokenizer.ggml.{key}": item for key, item in pairs if item is not None}


def divisors_of_llama3(config: Mapping[str, Any]) -> np.ndarray:
    """Return what llama.cpp's converter writes as ``rope_freqs.weight``."""
    rope, dim = rope_of(config), config["head_dim"]
    frequencies = 1.0 / rope["rope_theta"] ** (np.arange(0, dim, 2) / dim)
    old = rope["original_max_position_embeddings"]
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    divisors = []
    for wavelength in 2 * np.pi / frequencies:
        smooth = (old / wavelength - low) / (high - low)
        if wavelength < old / high:
            divisors.append(1.0)
        elif wavelength > old / low:
            divisors.append(factor)
        else:
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def bpe_of(directory: Path, pre: str, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of a byte-level ``tokenizer.json``, padded to ``vocab_size``."""
    file = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = {index: token for token, index in file["model"]["vocab"].items()}
    kinds = dict.fromkeys(vocabulary, NORMAL)
    for token in file["added_tokens"]:
        vocabulary[token["id"]] = token["content"]
        kinds[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    merges = file["model"]["merges"]
    ids = range(max(vocab_size, max(vocabulary) + 1))
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [vocabulary.get(index, f"[PAD{index}]") for index in ids],
        "tokenizer.ggml.token_type": [kinds.get(index, 5) for index in ids],
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
    }


def values_of(directory: Path, pre: str | None) -> dict[str, Any]:
    """Return the metadata of a model directory, with its tokenizer if ``pre`` is given.

    Special tokens and the chat template are those of ``tokenizer_config.json``.
    """
    values = sizes_of(directory)
    if pre is not None:
        config = json.loads((directory / "config.json").read_text())
        values |= bpe_of(directory, pre, config["vocab_size"])
        tokens = values["tokenizer.ggml.tokens"]
        own = json.loads((directory / "tokenizer_config.json").read_text())
        for name in ("bos", "eos"):
            if own.get(f"{name}_token"):
                values[f"tokenizer.ggml.{name}_token_id"] = tokens.index(own[f"{name}_token"])
        values["tokenizer.ggml.add_bos_token"] = own.get("add_bos_token", False)
        template = directory / "chat_template.jinja"
        if template.exists():
            values["tokenizer.chat_template"] = template.read_text()
    return values


def convert(directory: Path, path: Path, kind: str = "F32", pre: str | None = None) -> Path:
    """Convert a model directory to the GGUF file ``path``."""
    path.write_bytes(gguf_bytes(values_of(directory, pre), tensors_of(directory, kind)))
    return path
