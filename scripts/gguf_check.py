"""Compare mie with llama.cpp on the same GGUF files.

    PYTHONPATH=tests python scripts/gguf_check.py [TYPE ...]    # needs '.[bench]'
    PYTHONPATH=tests python scripts/gguf_check.py families

"families" compares the logits of each golden model that a GGUF file can hold, in F32.

The bundled Llama and a random Qwen3 are converted to F32, and quantised by llama.cpp (MXFP4 by the
gguf package). For each type, the last logits of 200 prompts are compared twice:

* with llama.cpp on the same file, although it rounds activations to 8 bits. The best tokens must
  agree unless two logits of mie are closer than twice the largest difference;
* with llama.cpp on the dequantised weights in F32, to isolate the files' contents: there the
  difference must be at most a hundred-thousandth of the largest logit.

The texts and the tokens of the prompts must agree as well. It exits with 1 if something differs.
"""

import ctypes
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import gguf
import gguf_files
import llama_cpp
import numpy as np
import tiny_models
from gguf.quants import dequantize, quantize

from mie.checkpoint.config import load_model_config
from mie.checkpoint.locate import BUNDLED_DIRECTORY
from mie.checkpoint.weights import Checkpoint, expected_tensors
from mie.load.backends import load_backend
from mie.load.sizing import cache_shape
from mie.model.config import ModelConfig
from mie.model.decoder import Decoder
from mie.ops import activation
from mie.ops.backend import StepBatch
from mie.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]

FILE_TYPES = {
    "F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9,
    "Q2_K": 10, "Q3_K_M": 12, "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30,
    "MXFP4": -1,
}  # fmt: skip
"""The types that are checked, and llama.cpp's numbers for whole files."""

EXACT = 1e-5
"""Limit of the relative difference from llama.cpp in F32. Its sums have another order."""


def main(names: Sequence[str]) -> int:
    """Check the named types, or all, and return the exit code."""
    quiet()
    if names == ["families"]:
        with tempfile.TemporaryDirectory() as folder:
            return 0 if check_families(Path(folder)) else 1
    lines = (ROOT / "tests/data/tiny_heldout.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    is_right = True
    with tempfile.TemporaryDirectory() as folder:
        for source in (BUNDLED_DIRECTORY, random_qwen(Path(folder) / "qwen3")):
            for name in names or FILE_TYPES:
                is_right &= check(source, name, prompts, Path(folder))
    return 0 if is_right else 1


def random_qwen(directory: Path) -> Path:
    """Write a random Qwen3 with the bundled tokenizer."""
    config = tiny_models.QWEN3_TIED | {
        "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64,
        "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    tiny_models.write_model(directory, config, tiny_models.random_weights(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((BUNDLED_DIRECTORY / name).read_bytes())
    return directory


LENGTH, CONTEXT = 60, 256
NOT_IN_LLAMA_CPP = {
    **dict.fromkeys(("qwen2_windows", "qwen3_layer_types", "ministral_windows"), "windows"),
    **dict.fromkeys(("qwen2_yarn_mscale", "qwen3_yarn_attention_factor"), "factors of YaRN"),
    **dict.fromkeys(("qwen2_moe_shared", "qwen3_moe_dense_layer"), "a layer without experts"),
    "gpt_oss_sinks": "the ends of YaRN's ramp, which llama.cpp rounds",
    "olmoe_experts": "grouped queries",
    "ernie45_interleaved": "biases",
    **dict.fromkeys(("granite4_mamba", "lfm2_short_convs", "olmo_hybrid"), "state"),
    **dict.fromkeys(("qwen35_delta", "qwen35_experts", "qwen3_next_experts"), "state"),
    "glm_interleaved": "heads that are wider than the hidden size divided by their number",
}
"""The golden models that llama.cpp runs otherwise or not at all, and the reason."""

NUM_LAYERS = {"exaone4_hybrid": 64}
"""Layers that a model needs for llama.cpp to give it windows. Tokens that it has are repeated."""


def check_families(folder: Path) -> bool:
    """Compare the golden models that llama.cpp runs, and four more, in F32."""
    sources = [
        path
        for path in sorted((ROOT / "tests/golden/models").iterdir())
        if path.name not in NOT_IN_LLAMA_CPP
    ]
    more = {
        "ernie45": tiny_models.ERNIE,
        "glm": tiny_models.GLM,
        "qwen3_moe": tiny_models.QWEN3_MOE | {"norm_topk_prob": True},
        "olmoe": tiny_models.OLMOE | {"num_key_value_heads": 4, "tie_word_embeddings": False},
    }
    for name, config in more.items():
        values = config | {"hidden_size": 32}
        weights = tiny_models.random_weights(values)
        sources.append(tiny_models.write_model(folder / name, values, weights))
    return min([check_family(source, folder / "model.gguf") for source in sources])


def check_family(source: Path, path: Path) -> bool:
    """Compare the logits of a model, print a line, and return whether they are right."""
    values, arrays = gguf_files.sizes_of(source), gguf_files.arrays_of(source)
    architecture = values["general.architecture"]
    if architecture.startswith("gemma"):
        del arrays["output.weight"]  # which llama.cpp's converter drops
    values.pop("llama.attention.sliding_window", None)  # which llama.cpp ignores
    if source.name in NUM_LAYERS:
        values, arrays = repeated(values, arrays, NUM_LAYERS[source.name])
    if architecture == "chatglm":
        arrays = fused(arrays)
    vocab_size = len(arrays["token_embd.weight"])
    values |= {
        "general.name": "model",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [f"t{index}" for index in range(vocab_size)],
        "tokenizer.ggml.token_type": [gguf_files.NORMAL] * vocab_size,
        "tokenizer.ggml.merges": ["t 1"],
    }
    tensors = {name: gguf_files.encoded(array, "F32") for name, array in arrays.items()}
    path.write_bytes(gguf_files.gguf_bytes(values, tensors))
    ids = [index * 7 % vocab_size for index in range(LENGTH)]
    with patch.object(activation, "gelu_mul", gelu_of_llama_cpp):
        own = logits_of_mie(path, load_model_config(path), [ids], CONTEXT)[0]
    model = llama_of(path, CONTEXT)
    model.eval(ids)
    theirs = np.array(model.scores[LENGTH - 1], np.float64)
    model.close()
    error = float(np.abs(own - theirs).max() / np.abs(theirs).max())
    print(
        f"{source.name:22} {architecture:14} {'right' if error <= EXACT else 'WRONG'}  {error:.1e}"
    )
    return error <= EXACT


def repeated(values: dict, arrays: dict, num_layers: int) -> tuple[dict, dict]:
    """Return a model of more layers, each a copy, with full attention in every fourth one."""
    prefix = f"{values['general.architecture']}."
    layers = values[f"{prefix}block_count"]
    more = {
        name.replace(f"blk.{layer % layers}.", f"blk.{layer}."): array
        for layer in range(num_layers)
        for name, array in arrays.items()
        if name.startswith(f"blk.{layer % layers}.")
    }
    pattern = [(layer + 1) % 4 != 0 for layer in range(num_layers)]
    sizes = {"block_count": num_layers, "attention.sliding_window_pattern": pattern}
    return values | {prefix + key: value for key, value in sizes.items()}, arrays | more


def fused(arrays: dict) -> dict:
    """Return the tensors with queries, keys and values in one, as older files have them."""
    joined: dict = {}
    for name, array in arrays.items():
        joined.setdefault(re.sub(r"attn_[qkv]\.", "attn_qkv.", name), []).append(array)
    return {name: np.concatenate(parts) for name, parts in joined.items()}


def gelu_of_llama_cpp(gate_up: np.ndarray) -> np.ndarray:
    """Return gelu(gate) * up with gate and GELU rounded to float16, as in its table."""
    gate, up = np.split(gate_up, 2, axis=-1)
    z = gate.astype(np.float16).astype(np.float32)
    values = z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * z * (1 + 0.044715 * z * z)))
    return values.astype(np.float16).astype(np.float32) * up


def check(source: Path, name: str, prompts: Sequence[str], folder: Path) -> bool:
    """Compare one type of a model, print a line, and return whether all is right."""
    plain = gguf_files.convert(source, folder / "plain.gguf", "F32", "gpt-2")
    path = quantised(plain, name, folder / f"{name}.gguf")
    config = load_model_config(path)
    tokenizer = Tokenizer.load(path, config.vocab_size)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    own = logits_of_mie(path, config, ids)
    same, their_ids = logits_of_llama(path, prompts)
    exact, _ = logits_of_llama(dequantised(path, folder / "dequantised.gguf"), prompts)
    scale = np.abs(own).max()
    difference = np.abs(own - same).max()
    best = own.argmax(axis=1)
    parted = np.flatnonzero(best != same.argmax(axis=1))
    gaps = [float(own[i, best[i]] - own[i, same[i].argmax()]) for i in parted]
    error = float(np.abs(own - exact).max() / scale)
    is_right = ids == their_ids and error <= EXACT and all(gap <= 2 * difference for gap in gaps)
    kinds = sorted({entry.tensor_type.name for entry in gguf.GGUFReader(path).tensors})
    print(
        f"{source.name:6} {name:7} {'right' if is_right else 'WRONG'}  tokens "
        f"{'equal' if ids == their_ids else 'DIFFER'}, best token equal in "
        f"{len(ids) - len(parted)} of {len(ids)}, near-ties {[round(gap, 3) for gap in gaps]}; "
        f"largest logit {scale:.1f}, difference {difference:.4f}, from F32 {error:.1e}; "
        f"{' '.join(kinds)}",
        flush=True,
    )
    return is_right


def quantised(plain: Path, name: str, path: Path) -> Path:
    """Quantise a file in F32 to a type."""
    if name == "MXFP4":
        return rewritten(plain, path, to_mxfp4)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = FILE_TYPES[name]
    failed = llama_cpp.llama_model_quantize(
        str(plain).encode(), str(path).encode(), ctypes.byref(options)
    )
    assert not failed, name
    return path


def dequantised(source: Path, path: Path) -> Path:
    """Write the model with its weights in F32, as the gguf package widens them."""
    return rewritten(source, path, lambda numbers: (numbers, gguf.GGMLQuantizationType.F32))


def to_mxfp4(numbers: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Return a matrix in MXFP4, and other tensors unchanged."""
    kind = gguf.GGMLQuantizationType.MXFP4
    if numbers.ndim == 2 and numbers.shape[1] % 32 == 0:
        return quantize(numbers, kind), kind
    return numbers, gguf.GGMLQuantizationType.F32


def rewritten(source: Path, path: Path, change) -> Path:
    """Copy a GGUF file with every tensor widened, and then changed."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        of_elements = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], of_elements)
    for tensor in reader.tensors:
        wide = dequantize(tensor.data, tensor.tensor_type)
        numbers, kind = change(wide.reshape(tuple(map(int, tensor.shape[::-1]))))
        writer.add_tensor(tensor.name, numbers, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of_mie(
    path: Path, config: ModelConfig, prompts: Sequence[list[int]], context: int = 512
) -> np.ndarray:
    """Return the logits after each prompt."""
    with Checkpoint.open(path, expected_tensors(config)) as checkpoint:
        decoder = Decoder(config, load_backend("numpy"), checkpoint, num_positions=context)
    cache = decoder.backend.new_kv_cache(cache_shape(config, 32, 16))
    rows = []
    for ids in prompts:
        positions = np.arange(len(ids))
        batch = StepBatch(
            token_ids=np.array(ids), positions=positions, slot_mapping=positions,
            cu_seqlens_q=np.array([0, len(ids)]), seq_lens=np.array([len(ids)]),
            block_tables=np.arange(32)[None], logits_rows=np.array([len(ids) - 1]),
        )  # fmt: skip
        rows.append(np.array(decoder.forward(batch, cache))[0])
    return np.stack(rows)


def llama_of(path: Path, context: int) -> llama_cpp.Llama:
    """Return llama.cpp's model with a cache in F32."""
    return llama_cpp.Llama(
        str(path), n_ctx=context, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False,
        flash_attn=False, type_k=0, type_v=0,
    )  # fmt: skip


def logits_of_llama(path: Path, prompts: Sequence[str]) -> tuple[np.ndarray, list[list[int]]]:
    """Return llama.cpp's logits after each prompt, and its tokens."""
    model = llama_of(path, 512)
    rows, tokens = [], []
    for prompt in prompts:
        ids = model.tokenize(prompt.encode(), add_bos=True, special=True)
        model.reset()
        model.eval(ids)
        rows.append(np.array(model.scores[len(ids) - 1], np.float64))
        tokens.append(ids)
    model.close()
    return np.stack(rows), tokens


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    """Print nothing."""


def quiet() -> None:
    """Silence llama.cpp's log."""
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
