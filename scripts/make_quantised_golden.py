"""Make golden models in the formats of compressed-tensors, with digests of their exact weights.

    pip install torch transformers safetensors compressed-tensors
    python scripts/make_quantised_golden.py [--output tests/data/quantised]

Each directory is a random Llama of one layer as llm-compressor saves it: ``config.json`` with the
``quantization_config`` that compressed-tensors serialises, and ``model.safetensors`` with the
tensors that its compressor writes. ``provenance.json`` has versions, the seed and, for each matrix,
the SHA-256 of its weights in float32, little endian, row by row, as the same compressor
decompresses them with float32 scales.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import compressed_tensors
import safetensors
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from compressed_tensors.utils.match import match_name
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, VOCABULARY = 64, 96, 4, 40
SHAPES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
SEED = 5

W4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
W8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype, list[str]]] = {
    "w4_group": ("pack-quantized", W4 | {"symmetric": True}, torch.bfloat16, ["lm_head"]),
    "w4_group_zeros": ("pack-quantized", W4 | {"symmetric": False}, torch.float16, ["re:.*head"]),
    "w4_float32_zeros": (
        "pack-quantized",
        W4 | {"symmetric": False, "group_size": 16},
        torch.float32,
        ["lm_head", "re:.*[kv]_proj$"],
    ),
    "w4_channel": (
        "pack-quantized",
        W4 | {"symmetric": True, "strategy": "channel", "group_size": None},
        torch.bfloat16,
        ["lm_head"],
    ),
    "w8_group": (
        "pack-quantized",
        W8 | {"symmetric": True, "strategy": "group", "group_size": 32},
        torch.float16,
        [],
    ),
    "w8_channel_zeros": ("pack-quantized", W8 | {"symmetric": False}, torch.bfloat16, ["lm_head"]),
    "int8_channel": ("int-quantized", W8 | {"symmetric": True}, torch.bfloat16, ["lm_head"]),
    "int8_channel_zeros": ("int-quantized", W8 | {"symmetric": False}, torch.float16, ["lm_head"]),
    "fp8_channel": ("float-quantized", FP8 | {"strategy": "channel"}, torch.bfloat16, ["lm_head"]),
    "fp8_tensor": ("float-quantized", FP8 | {"strategy": "tensor"}, torch.float32, ["lm_head"]),
}
"""The format, the arguments of the weights, the type of the scales, and the ignored modules."""


def scales_of(
    weight: torch.Tensor, args: QuantizationArgs, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and zero points of a matrix [N, K] from the range of each group."""
    rows, columns = weight.shape
    strategy = args.strategy
    groups = weight.reshape(1, 1, -1) if strategy == "tensor" else weight.reshape(rows, 1, -1)
    if strategy == "group":
        groups = weight.reshape(rows, columns // args.group_size, args.group_size)
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    if strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    return scale.to(dtype), zero


def make(name: str, directory: Path) -> None:
    """Write the golden directory of one case."""
    format_, values, dtype, ignore = CASES[name]
    torch.manual_seed(SEED)
    args = QuantizationArgs(**values)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format=format_)
    compressor = BaseCompressor.get_value_from_registry(format_)
    weights = {f"model.layers.0.{module}": shape for module, shape in SHAPES.items()}
    weights["lm_head"] = (VOCABULARY, HIDDEN)
    tensors = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN).bfloat16()}
    for norm in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        tensors[f"model.{norm}.weight"] = 1 + 0.2 * torch.randn(HIDDEN)
    digests = {}
    for module, shape in weights.items():
        weight = torch.randn(shape) / shape[1] ** 0.5
        if any(match_name(module, each) for each in ignore):
            tensors[f"{module}.weight"] = weight.bfloat16()
            continue
        scale, zero = scales_of(weight, args, dtype)
        given = {"weight": weight.to(dtype), "weight_scale": scale}
        if not args.symmetric:
            given["weight_zero_point"] = zero.to(torch.int8)
        compressed = compressor.compress(given, scheme)
        tensors |= {f"{module}.{end}": tensor for end, tensor in compressed.items()}
        wide = compressed | {"weight_scale": scale.float()}
        exact = compressor.decompress(wide, scheme)["weight"]
        assert exact.dtype == torch.float32
        digests[f"{module}.weight"] = hashlib.sha256(exact.numpy().tobytes()).hexdigest()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.contiguous() for key, value in tensors.items()}, directory / "model.safetensors"
    )
    (directory / "model.safetensors").chmod(0o644)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=format_,
        ignore=ignore,
        quantization_status="compressed",
    ).to_dict()
    write_json(directory / "config.json", model_config() | {"quantization_config": config})
    write_json(directory / "provenance.json", provenance(name) | {"weights_sha256": digests})


def model_config() -> dict[str, Any]:
    """Return the configuration of the Llama, without its quantisation."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def provenance(name: str) -> dict[str, Any]:
    """Return the versions and the seed of a golden directory."""
    return {
        "name": name,
        "script": "scripts/make_quantised_golden.py",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "seed": SEED,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "compressed-tensors": compressed_tensors.__version__,
            "safetensors": safetensors.__version__,
        },
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write ``value`` in the style of Hugging Face."""
    path.write_text(json.dumps(value, indent=2, default=str) + "\n")


def main() -> None:
    """Make every case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("tests/data/quantised"))
    output = parser.parse_args().output
    for name in CASES:
        print(name, flush=True)
        make(name, output / name)


if __name__ == "__main__":
    main()
