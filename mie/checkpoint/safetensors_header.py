"""Locate the tensors of a safetensors file, whose header the safetensors library checks.

    8 bytes, little endian   n, the length of the header
    n bytes                  a JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end]}
    the rest                 the data of the tensors, one after another without a gap

The library accepts a file only if its tensors cover the data exactly. mie adds three rules: the
file is a regular one, its header is much shorter than the format's 100 MB
(`mie.checkpoint.size_limits`), and errors name the file.

Source: the format's description in https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from mie.checkpoint.size_limits import MAX_HEADER_BYTES
from mie.errors import WeightsError, shown
from mie.system.files import open_file

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
_MAX_REASON = 160


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
    entries = {}
    try:
        start = _LENGTH.size + _header_size(path, max_bytes)
        with safe_open(path, framework="numpy") as tensors:
            for name in tensors.offset_keys():
                tensor = tensors.get_slice(name)
                dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
                if dtype not in _BITS:
                    raise WeightsError(
                        f"{path}: tensor {shown(name)} has the unknown dtype {dtype}"
                    )
                stop = start + math.prod(shape) * _BITS[dtype] // 8
                entries[name] = TensorEntry(
                    path=path, dtype=dtype, shape=shape, start=start, stop=stop
                )
                start = stop
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise WeightsError(
            f"{path} is truncated, or is not a safetensors file: {_reason(error)}; fetch it again"
        ) from error
    return entries


def _header_size(path: Path, max_bytes: int) -> int:
    """Return the number of bytes in the header, which is at most ``max_bytes``."""
    with open_file(path) as file:
        prefix = file.read(_LENGTH.size) or b""  # None: a file of /proc has no data yet
        file_size = os.fstat(file.fileno()).st_size
    size = int.from_bytes(prefix, "little")
    # A header that is longer than its file is left to the library, which calls the file truncated.
    if max_bytes < size <= file_size:
        raise WeightsError(
            f"{path} has a header of {size} bytes; the headers of a model may have "
            f"{MAX_HEADER_BYTES} bytes together, {max_bytes} of them are left for this file"
        )
    return size


def _reason(error: SafetensorError) -> str:
    """Return the library's reason in printable characters and at most one line."""
    text = str(error).removeprefix("Error while deserializing header: ")[: _MAX_REASON + 1]
    text = text.encode("unicode_escape").decode()
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 3]}..."
