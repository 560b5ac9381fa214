"""Write a model directory as a GGUF file for llama.cpp.

Matrices are F32 or F16 and vectors are F32, as llama.cpp's own converter writes them. The "llama"
architecture rotates neighbouring channels where Hugging Face rotates halves, so the rows of its
query and key matrices are reordered.
"""

import json
import logging
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Matrix = np.ndarray[Any, Any]

TYPES = {"F32": gguf.GGMLQuantizationType.F32, "F16": gguf.GGMLQuantizationType.F16}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}


def write_gguf(directory: Path, path: Path, kind: str) -> None:
    """Write the model in ``directory`` to ``path``, with matrices of ``kind`` (see `TYPES`).

    The directory's tokenizer.json must be a byte-level BPE.

    Raises:
        ValueError: the model's family, or a dtype in its file, is not supported.
    """
    logging.getLogger("gguf").setLevel(logging.WARNING)
    config = json.loads((directory / "config.json").read_text())
    family = config["model_type"]
    if family not in ARCHITECTURES:
        raise ValueError(
            f"model_type is {family!r}; GGUF is written for {', '.join(ARCHITECTURES)}"
        )
    writer = gguf.GGUFWriter(path, family)
    _add_settings(writer, config)
    _add_vocabulary(writer, json.loads((directory / "tokenizer.json").read_text())["model"])
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], config["num_hidden_layers"])
    tensors = list(_tensors(directory / "model.safetensors"))
    for tensor in tensors:
        stored_as = _stored_as(kind, tensor.shape)
        num_bytes = int(np.prod(gguf.quant_shape_to_byte_shape(tensor.shape, stored_as)))
        name = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"{tensor.name} has no name in GGUF"
        writer.add_tensor_info(
            name, tensor.shape, np.dtype(np.float32), num_bytes, raw_dtype=stored_as
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:  # one in memory at a time
        values = tensor.read()
        heads = _rotated_heads(tensor.name, config)
        if family == "llama" and heads is not None:
            values = _neighbours_rotated(values, heads)
        writer.write_tensor_data(gguf.quants.quantize(values, _stored_as(kind, tensor.shape)))
    writer.close()


def _add_settings(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.get("rope_theta", 10000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_vocabulary(writer: gguf.GGUFWriter, model: dict[str, Any]) -> None:
    merges: list[Any] = model["merges"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_add_bos_token(False)


def _stored_as(kind: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType:
    return TYPES["F32" if len(shape) == 1 else kind]


def _rotated_heads(name: str, config: dict[str, Any]) -> int | None:
    """Return the number of heads if RoPE rotates the matrix's result, else None."""
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else None


def _neighbours_rotated(values: Matrix, num_heads: int) -> Matrix:
    """Reorder the rows of each head from (half, channel) to (channel, half)."""
    halves: Matrix = values.reshape(num_heads, 2, -1, *values.shape[1:]).swapaxes(1, 2)
    return np.reshape(halves, values.shape)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Tensor:
    """A tensor of a safetensors file.

    It is read by hand, so the environment of llama.cpp needs neither safetensors nor a bfloat16
    dtype.
    """

    name: str
    shape: tuple[int, ...]
    data: mmap.mmap
    start: int

    def read(self) -> Any:
        """Return the numbers as float32."""
        halves = np.frombuffer(self.data, np.uint16, int(np.prod(self.shape)), self.start)
        values: Matrix = (halves.astype(np.uint32) << 16).view(np.float32)
        return np.reshape(values, self.shape)


def _tensors(path: Path) -> Iterator[_Tensor]:
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}; GGUF is written from BF16")
        start = 8 + header_bytes + entry["data_offsets"][0]
        yield _Tensor(name=name, shape=tuple(entry["shape"]), data=data, start=start)
