"""The header of a safetensors file: which tensor lies where, checked before any data is read.

    8 bytes, little endian   n, the length of the header
    n bytes                  a JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end]}
    the rest                 the data; offsets count from here

The data must be covered exactly: no overlap, no hole, nothing after the last tensor. What the
reference implementation refuses is refused here too, in words that name the file and the tensor.

Source: the format's description in https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mie.errors import WeightsError

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's limit
_LENGTH = struct.Struct("<Q")
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies: bytes ``start`` to ``stop`` of the file ``path``."""

    path: Path
    dtype: str  # as safetensors spells it: "F32", "BF16", ...
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.stop - self.start


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of the file ``path`` by name, in the order of their data.

    Raises:
        WeightsError: the file cannot be read, is truncated, or its header is not sound.
    """
    try:
        with path.open("rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            header_size = _header_size(path, file.read(_LENGTH.size), file_size)
            text = file.read(header_size)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    header = _parse(path, text)
    data_start = _LENGTH.size + header_size
    entries = {name: _entry(path, name, value, data_start) for name, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_coverage(path, entries, data_start, file_size)
    return entries


def _header_size(path: Path, prefix: bytes, file_size: int) -> int:
    if len(prefix) < _LENGTH.size:
        raise WeightsError(
            f"{path} is not a safetensors file: it has {file_size} bytes, the length of its header "
            f"alone takes {_LENGTH.size} (was the download cut short?)"
        )
    header_size = int(_LENGTH.unpack(prefix)[0])
    if header_size > MAX_HEADER_BYTES:
        raise WeightsError(
            f"{path} is not a safetensors file: it claims a header of {header_size} bytes, the "
            f"format allows {MAX_HEADER_BYTES}"
        )
    if header_size > file_size - _LENGTH.size:
        raise WeightsError(
            f"{path} is truncated: it claims a header of {header_size} bytes, but holds "
            f"{file_size} bytes in all; fetch it again"
        )
    return header_size


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """The JSON object of the header, without the free-form ``__metadata__``."""
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict) or not text.startswith(b"{"):
        raise WeightsError(f"{path}: the header must be a JSON object")
    _check_metadata(path, header.pop("__metadata__", {}))
    return header


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice")
    return values


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise WeightsError(f"{path}: __metadata__ in the header must map strings to strings")


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    """The checked entry of one tensor."""
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise WeightsError(
            f"{path}: tensor {name!r} must have dtype, shape and data_offsets in the header, and "
            "nothing else"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if dtype not in _BITS:
        raise WeightsError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r}")
    if not _are_sizes(shape):
        raise WeightsError(f"{path}: tensor {name!r} has the bad shape {shape!r}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightsError(f"{path}: tensor {name!r} has the bad data_offsets {offsets!r}")
    begin, end = offsets
    if 8 * (end - begin) != math.prod(shape) * _BITS[dtype]:
        raise WeightsError(
            f"{path}: tensor {name!r} of shape {shape} in {dtype} takes "
            f"{math.prod(shape) * _BITS[dtype] / 8:.0f} bytes, its data_offsets span {end - begin}"
        )
    return TensorEntry(
        path=path,
        dtype=dtype,
        shape=tuple(shape),
        start=data_start + begin,
        stop=data_start + end,
    )


def _are_sizes(value: object) -> bool:
    """Whether it is a list of integers that fit an unsigned 64-bit word."""
    return isinstance(value, list) and all(
        isinstance(x, int) and not isinstance(x, bool) and 0 <= x < 2**64 for x in value
    )


def _check_coverage(
    path: Path, entries: Mapping[str, TensorEntry], data_start: int, file_size: int
) -> None:
    """Raises unless the entries, sorted by start, cover the data exactly."""
    position, previous = data_start, "the header"
    for name, entry in entries.items():
        if entry.start != position:
            what = "overlaps" if entry.start < position else "leaves unused bytes after"
            raise WeightsError(f"{path}: the data of tensor {name!r} {what} that of {previous!r}")
        if entry.stop > file_size:
            raise WeightsError(
                f"{path} is truncated: tensor {name!r} ends at byte {entry.stop}, the file has "
                f"{file_size}; fetch it again"
            )
        position, previous = entry.stop, name
    if position != file_size:
        raise WeightsError(
            f"{path} holds {file_size - position} bytes after the last tensor of its header"
        )
