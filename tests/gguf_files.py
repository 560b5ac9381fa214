"""Write GGUF files, byte by byte, and convert model directories as llama.cpp's converter does.

Nothing of mie is used, so that a mistake there is not repeated here.
"""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file

NUMBERS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "BF16": 30, "MXFP4": 39}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

Tensor = tuple[int, tuple[int, ...], bytes]
"""The number of a type, the dimensions in the order of the file, and the data."""


class Signed(int):
    """A number that is written as int32."""


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
    codes = {bool: (7, "?"), float: (6, "f"), int: (4, "I"), Signed: (5, "i")}
    kind, code = codes[type(item)]
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


ARCHITECTURES, TOP, OF_LAYER, OF_EXPERTS = json.loads(
    (Path(__file__).parent / "data/gguf_names.json").read_text(encoding="utf-8")
).values()
"""llama.cpp's architectures by ``model_type``, and its names of tensors by those of the modules."""
PERMUTED = ("llama", "mistral3", "smollm3", "granite", "granitemoe")
AFTER_ATTENTION = ("olmo2", "gemma2", "gemma3", "exaone4", "seed_oss", "gpt-oss")
"""Architectures whose ``post_attention_layernorm`` keeps its name."""


def name_of(module: str, architecture: str) -> str:
    """Return the name of a module in a GGUF file."""
    if module in TOP:
        return TOP[module]
    _, _, layer, own = module.split(".", 3)
    if own == "post_attention_layernorm" and architecture in AFTER_ATTENTION:
        return f"blk.{layer}.post_attention_norm"
    return f"blk.{layer}.{OF_LAYER[own]}"


def arrays_of(directory: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a model directory as the converter changes them, by their new names."""
    config = json.loads((directory / "config.json").read_text())
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    arrays: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        for tensor, array in load_file(file).items():
            module, _, suffix = tensor.rpartition(".")
            numbers = array.astype(np.float32)
            if name in PERMUTED and module[-6:] in heads:
                numbers = interleaved(numbers, heads[module[-6:]])
            if name.startswith("gemma") and module.endswith("norm"):
                numbers = numbers + np.float32(1)
            if cut := parts_of(tensor, numbers, name):
                arrays |= cut
                continue
            if ".experts." in module:
                _, _, layer, _, _, expert, own = module.split(".")
                stack = f"blk.{layer}.ffn_{OF_EXPERTS.get(own, 'down')}_exps.weight"
                experts.setdefault(stack, {})[int(expert)] = numbers
                continue
            arrays[f"{name_of(module, name)}.{suffix}"] = numbers
    for stack, of_expert in experts.items():
        arrays[stack] = np.stack([of_expert[expert] for expert in sorted(of_expert)])
    rope = rope_of(config)
    if rope["rope_type"] == "llama3":
        arrays["rope_freqs.weight"] = divisors_of_llama3(config)
    for kind in ("long", "short"):
        if rope["rope_type"] == "longrope":
            arrays[f"rope_factors_{kind}.weight"] = np.array(rope[f"{kind}_factor"], np.float32)
    return arrays


def parts_of(tensor: str, numbers: np.ndarray, architecture: str) -> dict[str, np.ndarray]:
    """Return the parts of a tensor that holds gate and up, or all experts, by their new names."""
    _, _, layer, own = [*tensor.split(".", 3), "", "", ""][:4]
    end, kind = "exps", "bias" if own.endswith("_bias") else "weight"
    gate_up: tuple[np.ndarray, ...] = ()
    if own.startswith("mlp.experts.gate_up_proj"):  # rows of gate and up alternate
        gate_up = (numbers[..., ::2], numbers[..., 1::2])
        gate_up = gate_up if kind == "bias" else tuple(each.swapaxes(1, 2) for each in gate_up)
    elif own.startswith("mlp.experts.down_proj"):
        numbers = numbers if kind == "bias" else numbers.swapaxes(1, 2)
    elif own == "block_sparse_moe.input_linear.weight":
        gate_up = tuple(np.split(numbers, 2, axis=1))
    elif own.startswith("shared_mlp."):
        end = "shexp" if architecture == "granitemoe" else ""
        gate_up = tuple(np.split(numbers, 2)) if "input_linear" in own else ()
    elif own == "self_attn.sinks":
        return {f"blk.{layer}.attn_sinks.weight": numbers}
    elif own != "block_sparse_moe.output_linear.weight":
        return {}
    names = ("gate", "up") if gate_up else ("down",)
    return {
        f"blk.{layer}.ffn_{name}{'_' * bool(end)}{end}.{kind}": each
        for name, each in zip(names, gate_up or (numbers,), strict=True)
    }


def tensors_of(directory: Path, kind: str) -> dict[str, Tensor]:
    """Return the tensors of a model directory, converted to a type."""
    return {name: encoded(array, kind) for name, array in arrays_of(directory).items()}


def sizes_of(directory: Path) -> dict[str, Any]:
    """Return the metadata of a model directory's ``config.json``."""
    config = json.loads((directory / "config.json").read_text())
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    rope = rope_of(config)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
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
        for key in ("beta_fast", "beta_slow"):
            if key in rope:
                own[f"rope.scaling.yarn_{key}"] = float(rope[key])
    if "original_max_position_embeddings" in rope and rope["rope_type"] != "llama3":
        own["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if config.get("sliding_window"):
        own["attention.sliding_window"] = config["sliding_window"]
    if name in ("olmo2", "exaone4") and "layer_types" in config and config["sliding_window"]:
        kinds = [kind == "sliding_attention" for kind in config["layer_types"]]
        own["attention.sliding_window_pattern"] = kinds
    if "head_dim" in config:
        own |= {f"attention.{each}_length": config["head_dim"] for each in ("key", "value")}
    if name in ("phi3", "glm4", "chatglm", *PERMUTED) and not name.startswith("gran"):
        own["rope.dimension_count"] = int(head_dim * rope.get("partial_rotary_factor", 1))
    own |= {
        key: float(config[its])
        for key, its in {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        }.items()
        if config.get(its) is not None
    }
    if "sliding_attention" in (config.get("rope_parameters") or {}):
        local = config["rope_parameters"]["sliding_attention"]["rope_theta"]
        own["rope.freq_base_swa"] = float(local)
    for number in ("num_local_experts", "num_experts"):
        if config.get(number):
            own["expert_count"] = config[number]
            own["expert_used_count"] = config["num_experts_per_tok"]
    if "moe_intermediate_size" in config:
        own["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if name == "gpt-oss":
        own["expert_feed_forward_length"] = config["intermediate_size"]
    for key in ("shared_intermediate_size", "shared_expert_intermediate_size"):
        if name in ("granitemoe", "qwen2moe") and config.get(key):
            own["expert_shared_feed_forward_length"] = config[key]
    if name == "mistral3":
        own["rope.scaling.yarn_log_multiplier"] = float(rope["mscale_all_dim"])
        own["attention.temperature_scale"] = float(rope["llama_4_scaling_beta"])
    if name == "phi3":
        own.setdefault("attention.sliding_window", 0)
        if rope["rope_type"] == "longrope":
            before = rope["original_max_position_embeddings"]
            stretch = config["max_position_embeddings"] / before
            factor = (1 + np.log(stretch) / np.log(before)) ** 0.5 if stretch > 1 else 1.0
            own["rope.scaling.attn_factor"] = float(factor)
    if name == "hunyuan-dense":
        own["rope.freq_base"] *= rope["alpha"] ** (head_dim / (head_dim - 2))
        own |= {"rope.scaling.type": "none", "rope.scaling.factor": 1.0, "context_length": 262144}
        own["rope.scaling.original_context_length"] = 262144
    return {
        "general.architecture": name,
        "general.name": directory.name,
        **{f"{name}.{key}": item for key, item in own.items()},
        **ids_of(config),
    }


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotations of a ``config.json``, those of full attention."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
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
