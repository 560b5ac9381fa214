"""Read the metadata and the list of tensors of a GGUF file. The file is untrusted input.

    4 bytes    "GGUF"
    uint32     version: 2 or 3
    uint64 × 2 number of tensors, number of pairs
    pairs      key, type, value; a string is its length in 8 bytes and its UTF-8 text
    tensors    name, number of dimensions, dimensions (the innermost first), type, offset
    data       from the next multiple of ``general.alignment``; offsets are relative to it

Integers are little endian. A model may be split into files named ``…-00001-of-00003.gguf``.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mie.base.files import open_file
from mie.checkpoint.entries import TensorEntry, some
from mie.checkpoint.gguf.arrays import ARRAY, SCALARS, STRING, GgufArray, places_of_texts
from mie.checkpoint.size_limits import (
    MAX_GGUF_ALIGNMENT,
    MAX_GGUF_HEADER_BYTES,
    MAX_GGUF_KEYS,
    MAX_GGUF_TENSORS,
    MAX_GGUF_TEXTS,
    MAX_SHARDS,
)
from mie.errors import WeightsError, shown

BLOCKS: Mapping[str, tuple[int, int]] = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2),
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210), "IQ4_NL": (32, 18), "IQ4_XS": (256, 136), "MXFP4": (32, 17),
}  # fmt: skip
"""The numbers and the bytes of a block of each supported type."""

_TYPES = (
    *("F32", "F16", "Q4_0", "Q4_1", "Q4_2", "Q4_3", "Q5_0", "Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K"),
    *("Q4_K", "Q5_K", "Q6_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S"),
    *("IQ2_S", "IQ4_XS", "I8", "I16", "I32", "I64", "F64", "IQ1_M", "BF16", "Q4_0_4_4", "Q4_0_4_8"),
    *("Q4_0_8_8", "TQ1_0", "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4", "NVFP4"),
    "Q1_0",
)
"""All types of tensors by their numbers."""
NO_TOKEN = (-1, (1 << 32) - 1)
"""The ids of special tokens that a model lacks; the second is -1 in 32 bits without a sign."""
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_DIMENSIONS = 4
_MAX_SIZE = 1 << 40
_MAX_KEY_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class GgufHeader:
    """The metadata of a model, and its tensors by their names in the file."""

    path: Path
    """The file, or the first of several."""
    values: Mapping[str, Any]  # numbers, booleans, texts, and GgufArray
    tensors: Mapping[str, TensorEntry]


def opened(model: Path | GgufHeader) -> Path | GgufHeader:
    """Return the header of a GGUF file, or the model directory unchanged.

    A header that is passed on is not read again.

    Raises:
        WeightsError: the file is not a whole GGUF file.
    """
    return read_gguf(model) if isinstance(model, Path) and model.is_file() else model


def read_gguf(path: Path) -> GgufHeader:
    """Return the header of the model ``path``, with the tensors of all its files.

    A shape is given as in Hugging Face: [output features, input features].

    Raises:
        WeightsError: a file cannot be read, is truncated, or exceeds a limit. Or two tensors
            overlap or share a name. Or a shard is missing, or belongs to another model.
    """
    first = _read_file(path)
    count = first.values.get("split.count", 1)
    if isinstance(count, GgufArray | str) or not 0 <= count <= MAX_SHARDS:
        raise WeightsError(f"{path}: split.count is {shown(count)}; the limit is {MAX_SHARDS}")
    tensors = dict(first.tensors)
    for number, shard in enumerate(_shards(path, int(count)), start=2):
        header = _read_file(shard)
        found = header.values.get("split.no"), header.values.get("split.count")
        if found != (number - 1, count):
            raise WeightsError(
                f"{shard} is not file {number} of {count} of its model: split.no and split.count "
                f"are {shown(found)}"
            )
        repeated = sorted(tensors.keys() & header.tensors.keys())
        if repeated:
            raise WeightsError(f"{shard} repeats tensors of other files: {some(repeated)}")
        tensors |= header.tensors
        if len(tensors) > MAX_GGUF_TENSORS:
            raise WeightsError(
                f"{path} and its other files have more than {MAX_GGUF_TENSORS} tensors"
            )
    return GgufHeader(path=path, values=first.values, tensors=tensors)


def _shards(path: Path, count: int) -> list[Path]:
    """Return the files after ``path``. It must be the first one."""
    if count <= 1:
        return []
    found = _SHARD.fullmatch(path.name)
    if found is None or int(found[3]) != count:
        raise WeightsError(
            f"{path} is one of {count} files, so its name must end in -00001-of-{count:05}.gguf"
        )
    names = [f"{found[1]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if path.name != names[0]:
        raise WeightsError(f"{path} is not the first file of its model; pass {names[0]}")
    shards = [path.with_name(name) for name in names[1:]]
    missing = [shard.name for shard in shards if not os.path.lexists(shard)]
    if missing:
        raise WeightsError(f"{path}: {len(missing)} of {count} files are missing: {some(missing)}")
    return shards


def _read_file(path: Path) -> GgufHeader:
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            if not size:
                raise WeightsError(f"{path} is empty; fetch it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path, data, size).header()
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error


class _Reader:
    """Reads one file from its beginning."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path = path
        self._data = data
        self._size = size
        self._end = min(size, MAX_GGUF_HEADER_BYTES)
        self._at = 0
        self._num_texts = 0

    def header(self) -> GgufHeader:
        if bytes(self._take(4)) != b"GGUF":
            raise self._error("is not a GGUF file: it does not begin with 'GGUF'")
        version = self._scalar("I")
        if version not in (2, 3):
            reason = "big endian" if version in (2 << 24, 3 << 24) else f"of version {version}"
            raise self._error(f"is {reason}; mie reads versions 2 and 3 in little endian")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        for number, limit, what in (
            (num_tensors, MAX_GGUF_TENSORS, "tensors"),
            (num_keys, MAX_GGUF_KEYS, "keys"),
        ):
            if number > limit:
                raise self._error(f"has {number} {what}; the limit is {limit}")
        values: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._text(_MAX_KEY_BYTES)
            if key in values:
                raise self._error(f"gives the key {shown(key)} twice")
            values[key] = self._value(key, self._scalar("I"))
        found = [self._tensor() for _ in range(num_tensors)]
        return GgufHeader(path=self._path, values=values, tensors=self._placed(values, found))

    def _value(self, key: str, kind: int) -> Any:
        if kind in SCALARS:
            number = self._scalar(SCALARS[kind])
            return decimal(number) if SCALARS[kind] == "f" else number
        if kind == STRING:
            return self._text(MAX_GGUF_HEADER_BYTES)
        if kind != ARRAY:
            raise self._error(f"has a value of the unknown type {kind} under {shown(key)}")
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind in SCALARS:
            return GgufArray(kind, count, self._take(count * struct.calcsize(SCALARS[kind])))
        if kind != STRING:
            raise self._error(f"has an array of type {kind} under {shown(key)}, which is not read")
        self._num_texts += count
        if self._num_texts > MAX_GGUF_TEXTS:
            raise self._error(f"has more than {MAX_GGUF_TEXTS} texts in arrays, which is the limit")
        found = places_of_texts(self._data, self._at, count, self._end)
        if found is None:
            raise self._truncated()
        places, end = found
        return GgufArray(kind, count, self._take(end - self._at), places)

    def _tensor(self) -> tuple[str, TensorEntry]:
        """Return a tensor with a position relative to the data."""
        name = self._text(_MAX_KEY_BYTES)
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            limit = f"the limit is {_MAX_DIMENSIONS}"
            raise self._error(f"gives {shown(name)} {num_dimensions} dimensions; {limit}")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        number, start = self._scalar("I"), self._scalar("Q")
        kind = _TYPES[number] if number < len(_TYPES) else f"number {number}"
        if kind not in BLOCKS:
            raise self._error(
                f"holds {shown(name)} in type {kind}; mie reads {', '.join(BLOCKS)} (take a file "
                "with another quantisation of the model, such as Q4_K_M or Q8_0)"
            )
        length, num_bytes = BLOCKS[kind]
        if not 0 < math.prod(shape) < _MAX_SIZE or shape[-1] % length:
            raise self._error(
                f"gives {shown(name)} the shape {shown(list(shape))}; rows of {kind} have a "
                f"multiple of {length} numbers, and a tensor has 1 … 2**40"
            )
        stop = start + math.prod(shape) // length * num_bytes
        return name, TensorEntry(path=self._path, dtype=kind, shape=shape, start=start, stop=stop)

    def _placed(
        self, values: Mapping[str, Any], found: list[tuple[str, TensorEntry]]
    ) -> dict[str, TensorEntry]:
        """Return the tensors at their positions in the file."""
        alignment = values.get("general.alignment", 32)
        is_power = isinstance(alignment, int) and alignment > 0 and not alignment & (alignment - 1)
        if not is_power or not 8 <= alignment <= MAX_GGUF_ALIGNMENT:
            limit = f"a power of two in 8 … {MAX_GGUF_ALIGNMENT}"
            raise self._error(
                f"has a general.alignment of {shown(alignment)}, which is not {limit}"
            )
        data = -(-self._at // alignment) * alignment
        end = data
        placed: dict[str, TensorEntry] = {}
        for name, tensor in sorted(found, key=lambda each: each[1].start):
            start, stop = data + tensor.start, data + tensor.stop
            problem = (
                "appears twice" if name in placed
                else f"begins at {tensor.start}, not a multiple of {alignment}"
                if tensor.start % alignment
                else "overlaps another tensor" if start < end
                else f"ends at byte {stop} of a file of {self._size}" if stop > self._size
                else None
            )  # fmt: skip
            if problem is not None:
                what = f"tensor {shown(name)} {problem}"
                raise self._error(f"is truncated or corrupt: {what}; fetch it again")
            placed[name] = TensorEntry(
                path=tensor.path, dtype=tensor.dtype, shape=tensor.shape, start=start, stop=stop
            )
            end = stop
        return placed

    def _text(self, max_bytes: int) -> str:
        length = self._scalar("Q")
        if length > max_bytes:
            raise self._truncated()
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as error:
            raise self._error("has a text that is not UTF-8") from error

    def _scalar(self, code: str) -> Any:
        form = struct.Struct(f"<{code}")
        return form.unpack(self._take(form.size))[0]

    def _take(self, num_bytes: int) -> bytes:
        if num_bytes > self._end - self._at:
            raise self._truncated()
        start, self._at = self._at, self._at + num_bytes
        return self._data[start : self._at]

    def _truncated(self) -> WeightsError:
        if self._size > MAX_GGUF_HEADER_BYTES:
            return self._error(f"has a header beyond the limit of {MAX_GGUF_HEADER_BYTES} bytes")
        return self._error("is truncated or corrupt: its header does not end; fetch it again")

    def _error(self, problem: str) -> WeightsError:
        return WeightsError(f"{self._path} {problem}")


def decimal(number: float) -> float:
    """Return the decimal number of at most 7 digits that was rounded to this float32, if any."""
    short = float(f"{number:.7g}")
    return short if struct.pack("<f", short) == struct.pack("<f", number) else number
