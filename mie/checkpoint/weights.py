"""Check the weights of a model directory from their headers, and read them as memory maps.

Opening a checkpoint reads headers only and checks everything that can be checked without data. So a
broken download costs milliseconds and leaves nothing half-loaded. Reading a tensor copies nothing:
it is a view of the file, in the file's dtype. The pages it touches count as memory of this process
until `Checkpoint.release` drops them. A loader that releases each tensor after converting it never
holds the file and its copy at once.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.checkpoint.safetensors_header import TensorEntry, read_header
from mie.checkpoint.size_limits import MAX_HEADER_BYTES, MAX_NAME_BYTES, MAX_SHARDS
from mie.checkpoint.tensors import Shape, expected_tensors
from mie.errors import ModelError, WeightsError, shown
from mie.system.files import open_file, read_json_object

__all__ = ["Checkpoint", "check_tied_head", "expected_tensors", "non_finite_tensors"]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES: Mapping[str, DTypeLike] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_INFINITY: Mapping[str, int] = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}  # its bit pattern
# These tensors are ignored in a checkpoint. They are buffers that older versions of transformers
# saved, and the copy of the embedding that some tools save with tied embeddings.
_IGNORED = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|lm_head\.weight")
_BLOCK_BYTES = 16 << 20


class Checkpoint:
    """The tensors of a model directory, read on demand.

    ``nbytes`` counts the bytes of the expected tensors in their files. ``dtypes`` has the dtype of
    each as safetensors spells it ("F32", "F16", "BF16"). ``ignored`` names the harmless extras.
    """

    def __init__(self, entries: Mapping[str, TensorEntry], ignored: Iterable[str] = ()) -> None:
        """Use `Checkpoint.open` instead, which checks what is passed here."""
        self._entries = dict(entries)
        self._maps: dict[Path, mmap.mmap] = {}
        self.ignored = tuple(ignored)
        self.dtypes = {name: self._entries[name].dtype for name in self}
        self.nbytes = sum(self._entries[name].nbytes for name in self)

    @classmethod
    def open(cls, directory: Path, expected: Mapping[str, Shape]) -> Checkpoint:
        """Open the checkpoint in ``directory`` and check its headers. No data is read.

        The files are ``model.safetensors``, or else those that ``model.safetensors.index.json``
        names. Tensors beyond ``expected`` are an error, except for rotary buffers of older files
        and for ``lm_head.weight`` with tied embeddings (`check_tied_head`).

        Args:
            directory: the model directory.
            expected: name -> shape, from `expected_tensors`.

        Raises:
            WeightsError: a file is missing, truncated or corrupt. Or the index disagrees with the
                files or points outside the directory. Or a tensor is missing, unexpected, wrongly
                shaped, or not F32, F16 or BF16. The message names file and tensor.
        """
        found = read_entries(Path(directory))
        ignored = [name for name in found if name not in expected and _IGNORED.fullmatch(name)]
        _check_names(Path(directory), found.keys() - set(ignored), expected)
        for name, shape in expected.items():
            _check_tensor(name, found[name], shape)
        return cls({name: found[name] for name in (*expected, *ignored)}, ignored)

    @property
    def matrix_dtypes(self) -> set[str]:
        """The dtypes of its matrices: "float32", "float16", "bfloat16"."""
        found = {self.dtypes[name] for name in self if len(self._entries[name].shape) > 1}
        return {np.dtype(_DTYPES[each]).name for each in found}

    def read(self, name: str) -> NDArray[Any]:
        """Return the tensor ``name`` as a read-only view of its file, in the file's dtype.

        bfloat16 comes as ``ml_dtypes.bfloat16``, whose widening to float32 is exact. The view stays
        valid after `release` (its pages are read again) and after `close`.
        """
        entry = self._entries[name]
        flat: NDArray[Any] = np.frombuffer(
            self._map(entry.path),
            dtype=_DTYPES[entry.dtype],
            count=entry.nbytes // np.dtype(_DTYPES[entry.dtype]).itemsize,
            offset=entry.start,
        )
        return flat.reshape(entry.shape)

    def blocks(self, name: str, max_bytes: int = _BLOCK_BYTES) -> Iterator[NDArray[Any]]:
        """Yield the tensor ``name`` in blocks along its first axis, and release each afterwards.

        At most ``max_bytes`` of the file (one row if that is longer) count as memory at a time.
        """
        tensor = self.read(name)
        rows = max(1, max_bytes * len(tensor) // max(1, tensor.nbytes))
        for start in range(0, len(tensor), rows):
            yield tensor[start : start + rows]
            self.release(name)

    def check_finite(self, name: str, block: NDArray[Any]) -> None:
        """Raise unless ``block``, a part of the tensor ``name``, is finite.

        Raises:
            WeightsError: it holds NaN or infinity.
        """
        entry = self._entries[name]
        infinity = _INFINITY[entry.dtype]
        # The bits of positive floats sort as signed integers, and those of negative floats as
        # unsigned integers. Two plain reductions are the fastest check and need no memory.
        signed = block.view(f"i{block.dtype.itemsize}")
        unsigned = block.view(f"u{block.dtype.itemsize}")
        sign = 1 << (8 * block.dtype.itemsize - 1)
        if block.size and (signed.max() >= infinity or unsigned.max() >= sign + infinity):
            raise WeightsError(
                f"{entry.path}: tensor {name!r} holds NaN or infinite values; fetch the file again "
                "('mie inspect --check' counts them in every tensor)"
            )

    def are_copies(self, name: str, other: str) -> bool:
        """Return whether two tensors are equal bit for bit. Reads both block by block."""
        first, second = self._entries[name], self._entries[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        return all(
            np.array_equal(one.view(np.uint8), two.view(np.uint8))
            for one, two in zip(self.blocks(name), self.blocks(other), strict=True)
        )

    def release(self, name: str) -> None:
        """Drop the pages of the tensor ``name`` from this process's memory.

        They stay in the system's page cache, from which a later use brings them back.
        """
        entry = self._entries[name]
        mapped = self._maps.get(entry.path)
        if mapped is None or not hasattr(mapped, "madvise"):  # Some systems have no madvise.
            return
        start = entry.start - entry.start % mmap.PAGESIZE
        if entry.stop > start:
            mapped.madvise(mmap.MADV_DONTNEED, start, entry.stop - start)

    def close(self) -> None:
        """Close the files. Views that are still in use keep their files open."""
        for mapped in self._maps.values():
            try:
                mapped.close()
            except BufferError:  # a view is in use, and the map is closed with the last of them
                continue
        self._maps.clear()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the expected tensors, in the order of the forward pass."""
        return (name for name in self._entries if name not in self.ignored)

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with open_file(path) as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
        return self._maps[path]


def check_tied_head(checkpoint: Checkpoint) -> None:
    """Raise unless a ``lm_head.weight`` beside tied embeddings is a copy of the embedding.

    With tied embeddings the output matrix is the embedding. transformers 4 ignores a second one in
    the file, and transformers 5 unties the two if they differ. Such a file is refused here, because
    it is unclear which was meant. Reads the data of both, block by block.

    Raises:
        WeightsError: the two differ.
    """
    if "lm_head.weight" not in checkpoint.ignored:
        return
    if not checkpoint.are_copies("lm_head.weight", "model.embed_tokens.weight"):
        raise WeightsError(
            "lm_head.weight differs from model.embed_tokens.weight, but config.json has "
            "tie_word_embeddings true; set it to false, or remove lm_head.weight from the weights"
        )


def non_finite_tensors(checkpoint: Checkpoint) -> dict[str, int]:
    """Count the NaN and infinite elements of each tensor that has any. Reads all data."""
    counts = {}
    for name in checkpoint:
        count = sum(
            block.size - int(np.count_nonzero(np.isfinite(block.astype(np.float32, copy=False))))
            for block in checkpoint.blocks(name)
        )
        if count:
            counts[name] = count
    return counts


def read_entries(directory: Path) -> dict[str, TensorEntry]:
    """Return every tensor of every weights file of the directory.

    Raises:
        WeightsError: a file is missing or broken, or the index disagrees with the files.
    """
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
        return f"{message}; other files are not read: {_some(others)}"
    pickled = sorted(path.name for path in directory.glob("*.bin"))
    if pickled:
        return (
            f"{message}, only {_some(pickled)}: PyTorch pickles are not read, since they can run "
            "code; convert them with save_pretrained of transformers, which writes safetensors"
        )
    return message


def _read_shards(index: Path) -> dict[str, TensorEntry]:
    """Return the tensors that the index maps, which must be those that its files hold."""
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
    shards, num_left = {}, MAX_HEADER_BYTES
    for name in names:
        shards[name] = read_header(directory / name, num_left)
        if not shards[name]:
            raise WeightsError(f"{directory / name} holds no tensor")
        num_left -= min(entry.start for entry in shards[name].values())
    return shards


def _read_weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = read_json_object(index, MAX_HEADER_BYTES, ModelError).get("weight_map")
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
        or not shard.isprintable()  # also half of a surrogate pair, which no file name can hold
        or len(shard.encode()) > MAX_NAME_BYTES
    ):
        raise WeightsError(
            f"{index}: tensor {shown(tensor)} is placed in {shown(shard)}, which is not the name "
            "of a .safetensors file in the model directory"
        )


def _check_names(directory: Path, found: Iterable[str], expected: Mapping[str, Shape]) -> None:
    names = set(found)
    missing = [name for name in expected if name not in names]
    extra = sorted(names - expected.keys())
    problems = [
        f"{len(group)} {kind}: {_some(group)}"
        for kind, group in (("missing", missing), ("unexpected", extra))
        if group
    ]
    if problems:
        raise WeightsError(
            f"the weights in {directory} do not fit its config.json; tensors {'; '.join(problems)}"
        )


def _check_tensor(name: str, entry: TensorEntry, shape: Shape) -> None:
    if entry.dtype not in _DTYPES:
        raise WeightsError(
            f"{entry.path}: tensor {name!r} has dtype {entry.dtype}; supported: "
            f"{', '.join(_DTYPES)}"
        )
    if entry.shape != shape:
        raise WeightsError(
            f"{entry.path}: tensor {name!r} has shape {shown(list(entry.shape))}, config.json asks "
            f"for {list(shape)}"
        )


def _some(names: list[str], limit: int = 4) -> str:
    """Return the first names, and how many more there are."""
    quoted = ", ".join(map(shown, names[:limit]))
    return quoted if len(names) <= limit else f"{quoted}, and {len(names) - limit} more"
