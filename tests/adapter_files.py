"""Write random LoRA adapters as PEFT and as llama.cpp's converter write them.

Nothing of mie is used, so that a mistake there is not repeated here.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf_files import encoded, gguf_bytes, interleaved, name_of
from numpy.typing import NDArray
from safetensors.numpy import save_file

MODULES = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
Arrays = dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]
"""A [r, K] and B [N, r] by module, such as "model.layers.0.self_attn.q_proj"."""


def random_adapter(
    weights: Mapping[str, NDArray[Any]],
    seed: int,
    *,
    rank: int = 4,
    modules: Sequence[str] = MODULES,
    size: float = 1.0,
) -> Arrays:
    """Return a random adapter of the modules that ``weights`` has."""
    rng, arrays = np.random.default_rng(seed), {}
    for name, matrix in weights.items():
        module = name.removesuffix(".weight")
        if module.split(".", 3)[-1] in modules and matrix.ndim == 2:
            num_outputs, num_inputs = matrix.shape
            a = rng.normal(0, num_inputs**-0.5, (rank, num_inputs)).astype(np.float32)
            b = rng.normal(0, size * rank**-0.5, (num_outputs, rank)).astype(np.float32)
            arrays[module] = a, b
    return arrays


def merged(
    weights: Mapping[str, NDArray[Any]], arrays: Arrays, scale: float
) -> dict[str, NDArray[Any]]:
    """Return the weights W + s B A, in float64."""
    found = {name: matrix.astype(np.float64) for name, matrix in weights.items()}
    for module, (a, b) in arrays.items():
        found[f"{module}.weight"] += scale * b.astype(np.float64) @ a.astype(np.float64)
    return found


def write_peft(directory: Path, arrays: Arrays, **settings: Any) -> Path:
    """Write an adapter as PEFT does. A setting that is Ellipsis is left out."""
    rank = len(next(iter(arrays.values()))[0])
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    config |= {"bias": "none", "use_dora": False, "lora_dropout": 0.1, **settings}
    directory.mkdir(parents=True, exist_ok=True)
    kept = {key: value for key, value in config.items() if value is not ...}
    (directory / "adapter_config.json").write_text(json.dumps(kept))
    tensors = {}
    for module, pair in arrays.items():
        for letter, array in zip("AB", pair, strict=True):
            name = f"base_model.model.{module}.lora_{letter}.weight"
            tensors[name] = np.ascontiguousarray(array)
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def write_gguf(path: Path, arrays: Arrays, num_heads: Mapping[str, int], **values: Any) -> Path:
    """Write an adapter of a Llama as convert_lora_to_gguf.py does.

    ``num_heads`` has the heads of "q_proj" and "k_proj", whose rows the converter permutes as it
    permutes a model's. A value that is Ellipsis is left out.
    """
    header = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": 8.0,
        **{key.replace("__", "."): value for key, value in values.items()},
    }
    tensors = {}
    for module, (a, b) in arrays.items():
        heads = num_heads.get(module[-6:])
        rows = interleaved(b, heads) if heads else b
        for letter, array in (("a", a), ("b", rows)):
            name = f"{name_of(module, 'llama')}.weight.lora_{letter}"
            tensors[name] = encoded(array, "F32")
    kept = {key: value for key, value in header.items() if value is not ...}
    path.write_bytes(gguf_bytes(kept, tensors))
    return path
