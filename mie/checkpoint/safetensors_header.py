"""Read the header of a safetensors file and check it before any data is read.

    8 bytes, little endian   n, the length of the header
    n bytes                  a JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end]}
    the rest                 the data; offsets count from here

The data must be covered exactly: no overlap, no hole, nothing after the last tensor. Everything
that the reference implementation refuses is refused here too, with messages that name the file and
the tensor. Headers have tighter limits than the format's own 100 MB (`mie.checkpoint.size_limits`).

Source: the format's description in https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mie.checkpoint.size_limits import MAX_DIMENSIONS, MAX_HEADER_BYTES
from mie.errors import WeightsError, shown
from mie.system.files import open_file
from mie.system.json_files import parse_json

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorEntry:
    """The location of one tensor: bytes ``start`` to ``stop`` of the file ``path``."""

    path: Path
    dtype: str  # as safetensors spells it: "F32", "BF16", ...
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """The number of bytes in the file."""
        return self.stop - self.start


def read_header(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, TensorEntry]:
    """Return the tensors of the file ``path`` by name, in the order of their data.

    Raises:
        WeightsError: the file cannot be read, is truncated, has a header of more than
            ``max_bytes``, or its header is not valid.
    """
    try:
        with open_file(path) as file:
            file_size = os.fstat(file.fileno()).st_size
            header_size = _header_size(path, file.read(_LENGTH.size) or b"", file_size, max_bytes)
            text = file.read(header_size)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    header = _parse(path, text)
    data_start = _LENGTH.size + header_size
    entries = {name: _entry(path, name, value, data_start) for name, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    _check_coverage(path, entries, data_start, file_size)
    return entries


def _header_size(path: Path, prefix: bytes, file_size: int, max_bytes: int) -> int:
    if len(prefix) < _LENGTH.size:
        raise WeightsError(
            f"{path} is not a safetensors file: it has {file_size} bytes, the length of its header "
            f"alone takes {_LENGTH.size} (was the download cut short?)"
        )
    header_size = int(_LENGTH.unpack(prefix)[0])
    if header_size > file_size - _LENGTH.size:
        raise WeightsError(
            f"{path} is truncated, or is not a safetensors file: it claims a header of "
            f"{header_size} bytes, but holds {file_size} bytes in all; fetch it again"
        )
    if header_size > max_bytes:
        raise WeightsError(
            f"{path} has a header of {header_size} bytes; the headers of a model may have "
            f"{MAX_HEADER_BYTES} bytes together, {max_bytes} of them are left for this file"
        )
    return header_size


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    """Return the JSON object of the header, without the free-form ``__metadata__``."""
    try:
        header = parse_json(text, allow_repeats=False)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: the header is not valid JSON: {error}") from error
    if not isinstance(header, dict) or not text.startswith(b"{"):
        raise WeightsError(f"{path}: the header must be a JSON object")
    _check_metadata(path, header.pop("__metadata__", {}))
    return header


def _check_metadata(path: Path, metadata: object) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(x, str) for x in metadata.values()):
        raise WeightsError(f"{path}: __metadata__ in the header must map strings to strings")


def _entry(path: Path, name: str, value: object, data_start: int) -> TensorEntry:
    """Return the checked entry of one tensor."""
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise WeightsError(
            f"{path}: tensor {shown(name)} must have dtype, shape and data_offsets in the header, "
            "and nothing else"
        )
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise WeightsError(f"{path}: tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise WeightsError(f"{path}: tensor {shown(name)} has the bad shape {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightsError(
            f"{path}: tensor {shown(name)} has the bad data_offsets {shown(offsets)}"
        )
    begin, end = offsets
    if 8 * (end - begin) != math.prod(shape) * _BITS[dtype]:
        raise WeightsError(
            f"{path}: tensor {shown(name)} of shape {shown(shape)} in {dtype} takes "
            f"{math.prod(shape) * _BITS[dtype] // 8} bytes, its data_offsets span {end - begin}"
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
    """Raise unless the entries, sorted by start, cover the data exactly."""
    position, previous = data_start, "the header"
    for name, entry in entries.items():
        if entry.start != position:
            what = "overlaps" if entry.start < position else "leaves unused bytes after"
            raise WeightsError(
                f"{path}: the data of tensor {shown(name)} {what} that of {shown(previous)}"
            )
        if entry.stop > file_size:
            raise WeightsError(
                f"{path} is truncated: tensor {shown(name)} ends at byte {entry.stop}, the file "
                f"has {file_size}; fetch it again"
            )
        position, previous = entry.stop, name
    if position != file_size:
        raise WeightsError(
            f"{path} holds {file_size - position} bytes after the last tensor of its header"
        )
