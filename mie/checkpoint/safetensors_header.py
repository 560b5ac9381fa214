"""Locate the tensors of a safetensors file. The safetensors library checks the header.

    8 bytes, little endian   n, the length of the header
    n bytes                  a JSON object: name -> {"dtype", "shape", "data_offsets": [begin, end]}
    the rest                 the data of the tensors, one after another without a gap

The library accepts a file only if its tensors cover the data exactly. mie adds three rules: the
file is a regular one, its header is much shorter than the format's 100 MB
(`mie.checkpoint.size_limits`), and errors name the file.

Source: the format's description in https://github.com/huggingface/safetensors
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError, safe_open

from mie.base.files import open_file, read_json_object
from mie.checkpoint.entries import TensorEntry, some
from mie.checkpoint.size_limits import (
    MAX_HEADER_BYTES,
    MAX_HEADERS_BYTES,
    MAX_INDEX_BYTES,
    MAX_NAME_BYTES,
    MAX_SHARDS,
)
from mie.errors import ModelError, WeightsError, shown

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_SAMPLE_BYTES = 256
_LENGTH_BYTES = 8
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


def read_header(path: Path, max_bytes: int = MAX_HEADER_BYTES) -> dict[str, TensorEntry]:
    """Return the tensors of the file ``path`` by name, in the order of their data.

    Raises:
        WeightsError: the file cannot be read, is truncated, has a header of more than
            ``max_bytes``, or its header is not valid.
    """
    entries = {}
    try:
        start = _LENGTH_BYTES + _header_size(path, max_bytes)
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
    """Return the number of bytes in the header, at most ``max_bytes``."""
    with open_file(path) as file:
        prefix = file.read(_LENGTH_BYTES) or b""  # None: a file of /proc has no data yet
        file_size = os.fstat(file.fileno()).st_size
    size = int.from_bytes(prefix, "little")
    # A header that is longer than its file is left to the library. It calls the file truncated.
    if max_bytes < size <= file_size:
        raise WeightsError(
            f"{path} has a header of {size} bytes; a header may have {MAX_HEADER_BYTES} bytes and "
            f"those of a model {MAX_HEADERS_BYTES}, and {max_bytes} are left for this file"
        )
    return size


def _reason(error: SafetensorError) -> str:
    """Return the library's reason in printable characters and at most one line."""
    text = str(error).removeprefix("Error while deserializing header: ")[: _MAX_REASON + 1]
    text = text.encode("unicode_escape").decode()
    return text if len(text) <= _MAX_REASON else f"{text[: _MAX_REASON - 3]}..."


def read_entries(directory: Path) -> dict[str, TensorEntry]:
    """Return every tensor of every weights file of the directory, or of a GGUF file.

    Raises:
        WeightsError: a file is missing or broken, or the index disagrees with the files.
    """
    if directory.is_file():
        from mie.checkpoint.gguf.header import read_gguf  # a circle of imports

        return dict(read_gguf(directory).tensors)
    if os.path.lexists(directory / SINGLE_FILE):
        return read_header(directory / SINGLE_FILE)
    if os.path.lexists(directory / INDEX_FILE):
        return _read_shards(directory / INDEX_FILE)
    raise WeightsError(_no_weights(directory))


def _no_weights(directory: Path) -> str:
    message = f"{directory} has neither {SINGLE_FILE} nor {INDEX_FILE}"
    if not directory.is_dir():
        return f"model directory {directory} does not exist"
    others = sorted(path.name for path in directory.glob("*.safetensors"))
    if others:
        return f"{message}; other files are not read: {some(others)}"
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        return (
            f"{message}, only {some(pickled)}: PyTorch pickles are not read, since they can run "
            "code; convert them with save_pretrained of transformers, which writes safetensors"
        )
    return message


def _read_shards(index: Path) -> dict[str, TensorEntry]:
    """Return the tensors that the index maps. The files must hold exactly these tensors."""
    weight_map = _read_weight_map(index)
    shards = _read_headers(index.parent, sorted(set(weight_map.values())))
    for tensor, shard in weight_map.items():
        if tensor not in shards[shard]:
            raise WeightsError(
                f"{index} places tensor {shown(tensor)} in {shard}, which does not hold it"
            )
    for shard, entries in shards.items():
        for tensor in entries:
            if weight_map.get(tensor) != shard:
                placed = weight_map.get(tensor, "no file")
                raise WeightsError(
                    f"{index.parent / shard} holds tensor {shown(tensor)}, which {index.name} "
                    f"places in {placed}"
                )
    return {tensor: shards[shard][tensor] for tensor, shard in weight_map.items()}


def _read_headers(directory: Path, names: Iterable[str]) -> dict[str, dict[str, TensorEntry]]:
    """Return the tensors of each file. The limit on headers applies to all of them together."""
    shards, num_left = {}, MAX_HEADERS_BYTES
    for name in names:
        shards[name] = read_header(directory / name, min(num_left, MAX_HEADER_BYTES))
        if not shards[name]:
            raise WeightsError(f"{directory / name} holds no tensor")
        num_left -= min(entry.start for entry in shards[name].values())
    return shards


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json_object(index, MAX_INDEX_BYTES, ModelError).get("weight_map")
    except ModelError as error:
        raise WeightsError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: weight_map must be an object: tensor name -> file name")
    shards: dict[str, str] = {}  # The first tensor of each file.
    for tensor, shard in weight_map.items():
        _check_shard_name(index, tensor, shard)
        shards.setdefault(shard, tensor)
    if len(shards) > MAX_SHARDS:
        raise WeightsError(f"{index} names {len(shards)} files; the limit is {MAX_SHARDS}")
    for shard, tensor in shards.items():
        if not os.path.lexists(index.parent / shard):
            raise WeightsError(f"{index}: the file {shard} (tensor {shown(tensor)}) is missing")
    return weight_map


def _check_shard_name(index: Path, tensor: str, shard: object) -> None:
    """Raise unless ``shard`` can be the bare name of a file beside the index."""
    if (
        not isinstance(shard, str)
        or not re.fullmatch(r"[^/\\\0]+\.safetensors", shard)
        or not shard.isprintable()  # nor half of a surrogate pair, which no file name can hold
        or len(shard.encode()) > MAX_NAME_BYTES
    ):
        raise WeightsError(
            f"{index}: tensor {shown(tensor)} is placed in {shown(shard)}, which is not the name "
            "of a .safetensors file in the model directory"
        )


def weights_digest(directory: Path) -> str:
    """Return a digest of the name, the type, the shape and some bytes of each tensor.

    Training changes all tensors, so some bytes of each distinguish the results. The digest does not
    depend on how the tensors are spread over files.

    Raises:
        WeightsError: the weights cannot be read.
    """
    return digest_of(read_entries(directory))


def digest_of(entries: Mapping[str, TensorEntry]) -> str:
    """Return the digest of `weights_digest` of these tensors.

    Raises:
        WeightsError: the weights cannot be read.
    """
    digests: dict[str, bytes] = {}
    for path in {entry.path for entry in entries.values()}:
        try:
            with open_file(path) as file:
                for name, entry in entries.items():
                    if entry.path == path:
                        digests[name] = _digest(name, entry, file)
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def _digest(name: str, entry: TensorEntry, file: BinaryIO) -> bytes:
    found = hashlib.sha256(f"{name}\0{entry.dtype}\0{entry.shape}\0".encode())
    size = min(_SAMPLE_BYTES, entry.nbytes)
    for place in (entry.start, entry.start + (entry.nbytes - size) // 2, entry.stop - size):
        file.seek(place)
        found.update(file.read(size))
    return found.digest()
