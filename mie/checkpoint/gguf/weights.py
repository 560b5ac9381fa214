"""Offer the tensors of a GGUF file under their Hugging Face names."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.checkpoint.entries import TensorEntry, some
from mie.checkpoint.gguf.architectures import ARCHITECTURES, layer_names
from mie.checkpoint.gguf.blocks import FORMS, decode
from mie.checkpoint.gguf.header import GgufHeader
from mie.checkpoint.tensors import Shape
from mie.checkpoint.weights import Checkpoint
from mie.errors import WeightsError, shown
from mie.ops.weights.quantised import QuantisedRows, Rows, dequantise

_TOP: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(\w+)\.(weight|bias)")
_FLOATS: Mapping[str, DTypeLike] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_OF_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BLOCK_BYTES = 1 << 20


class GgufCheckpoint(Checkpoint):
    """The tensors of a GGUF file, read on demand. Matrices of small numbers keep them."""

    def __init__(
        self, entries: Mapping[str, TensorEntry], num_heads: Mapping[str, int], norms_hold_one: bool
    ) -> None:
        """Use `Checkpoint.open`. ``num_heads`` has the matrices with interleaved rows."""
        super().__init__(entries)
        self._num_heads = num_heads
        self.norms_hold_one = norms_hold_one
        self.forms = {
            name: FORMS[entry.dtype] for name, entry in entries.items() if entry.dtype in FORMS
        }

    def read(self, name: str) -> NDArray[Any]:
        """Return a copy of the tensor ``name`` in its dtype, or in float32 if it is quantised."""
        blocks = self.blocks(name)
        return np.concatenate(
            [dequantise(rows) if isinstance(rows, QuantisedRows) else rows for rows in blocks]
        )

    def blocks(self, name: str, max_bytes: int = _BLOCK_BYTES) -> Iterator[Rows]:
        """Yield the tensor ``name`` in blocks of rows, and release each afterwards.

        At most ``max_bytes`` of the file (one row if that is longer) are decoded at a time.
        """
        entry = self._entries[name]
        num_rows, *columns = entry.shape
        raw = np.frombuffer(self._map(entry.path), np.uint8, entry.nbytes, entry.start)
        raw = raw.reshape(num_rows, -1)
        order = None
        if name in self._num_heads:
            order = head_order(num_rows, self._num_heads[name])
        size = max(1, min(max_bytes, _BLOCK_BYTES) // raw.shape[1])
        for start in range(0, num_rows, size):
            rows = raw[start : start + size] if order is None else raw[order[start : start + size]]
            if entry.dtype in FORMS:
                yield decode(entry.dtype, rows)
            else:
                yield rows.view(_FLOATS[entry.dtype]).reshape(len(rows), *columns)
            self.release(name)


def open_gguf(header: GgufHeader, expected: Mapping[str, Shape]) -> GgufCheckpoint:
    """Open a model by its header. It must hold the ``expected`` tensors. No data is read.

    Raises:
        WeightsError: the file is broken, or a tensor is missing, unexpected or wrongly shaped.
    """
    path, name = header.path, header.values["general.architecture"]
    if name not in ARCHITECTURES:
        raise WeightsError(
            f"{path}: the tensors of architecture {shown(name)} have no known names; known: "
            f"{', '.join(ARCHITECTURES)}"
        )
    architecture = ARCHITECTURES[name]
    parts = layer_names(header.values)
    found: dict[str, TensorEntry] = {}
    unknown = []
    for own, entry in header.tensors.items():
        names = hf_names(own, parts)
        if names and all(name in expected for name in names):
            own_parts = _split(own, entry, [expected[name] for name in names])
            found |= zip(names, own_parts, strict=True)
        elif own not in _OF_CONFIG:
            unknown.append(own)
    missing = [name for name in expected if name not in found]
    for kind, group in (("has", missing), ("lacks", unknown)):
        if group:
            raise WeightsError(
                f"{path} does not fit its metadata, which {kind} {len(group)} tensors: "
                f"{some(group)}"
            )
    entries = {name: found[name] for name in expected}
    heads = _interleaved(header, entries) if architecture.is_permuted else {}
    return GgufCheckpoint(entries, heads, architecture.norms_hold_one)


def _split(name: str, entry: TensorEntry, shapes: Sequence[Shape]) -> list[TensorEntry]:
    """Return the parts of a tensor that holds the rows of these shapes, one after another.

    A tensor with one more dimension is a stack of them. A matrix of one row may be a vector.
    """
    whole: Shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
    num_rows = whole[0]
    if len(entry.shape) > len(whole):
        whole = (len(shapes), *shapes[0])
    if (1, *entry.shape) != whole != entry.shape:
        raise WeightsError(
            f"{entry.path}: tensor {name!r} has shape {shown(list(entry.shape))}, the metadata "
            f"asks for {list(whole)}"
        )
    if entry.dtype in FORMS and len(shapes[0]) == 1:
        raise WeightsError(f"{entry.path}: the vector {name!r} is in {entry.dtype}")
    row_bytes, start, parts = entry.nbytes // num_rows, entry.start, []
    for shape in shapes:
        stop = start + row_bytes * shape[0]
        parts.append(replace(entry, shape=shape, start=start, stop=stop))
        start = stop
    return parts


def _interleaved(header: GgufHeader, entries: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Return the number of heads of each matrix and bias with interleaved rows."""
    prefix = f"{header.values['general.architecture']}.attention."
    num_heads = header.values.get(prefix + "head_count")
    of_kind = {"q": num_heads, "k": header.values.get(prefix + "head_count_kv", num_heads)}
    found = {}
    for name, entry in entries.items():
        kind = re.search(r"\.self_attn\.([qk])_proj\.", name)
        if kind:
            number = of_kind[kind[1]]
            if not isinstance(number, int) or number < 1 or entry.shape[0] % (2 * number):
                raise WeightsError(
                    f"{entry.path}: {entry.shape[0]} rows of {name!r} are no {shown(number)} heads"
                )
            found[name] = number
    return found


def hf_names(name: str, parts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the Hugging Face names of the tensors that a tensor holds, or none."""
    found = _OF_LAYER.fullmatch(name)
    if found:
        prefix, end = f"model.layers.{found[1]}.", f".{found[3]}" * (found[2] != "attn_sinks")
        return [f"{prefix}{own}{end}" for own in parts.get(found[2], ())]
    stem, _, kind = name.rpartition(".")
    return [f"{_TOP[stem]}.{kind}"] if stem in _TOP else []


def head_order(num_rows: int, num_heads: int) -> NDArray[np.intp]:
    """Return the row of the file for each row of a query or key matrix.

    llama.cpp's converter interleaves the halves of each head of a Llama, because it rotates
    neighbouring pairs: row 2 i + half of a head was row half * Dh / 2 + i.
    """
    order: NDArray[np.intp] = np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()
    return order
