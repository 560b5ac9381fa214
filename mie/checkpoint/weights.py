"""Check the weights of a model directory from their headers, and read them as memory maps.

Opening a checkpoint reads headers only and checks everything that can be checked without data. So a
broken download costs milliseconds and leaves nothing half-loaded. Reading a tensor copies nothing:
it is a view of the file, in the file's dtype. The pages it touches count as memory of this process
until `Checkpoint.release` drops them. A loader that releases each tensor after converting it never
holds the file and its copy at once.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.base.files import open_file
from mie.checkpoint.entries import TensorEntry, some
from mie.checkpoint.gguf.header import GgufHeader, opened
from mie.checkpoint.safetensors_header import digest_of, read_entries
from mie.checkpoint.spellings import divided_as, renamed
from mie.checkpoint.stacked import unstacked
from mie.checkpoint.tensors import Shape, expected_tensors
from mie.errors import WeightsError, shown
from mie.model.config import ModelConfig
from mie.model.layers.config import Quantisation
from mie.ops.weights.quantised import Form, QuantisedRows, Rows, dequantise

__all__ = ["Checkpoint", "check_tied_head", "expected_tensors", "non_finite_tensors"]

_DTYPES: Mapping[str, DTypeLike] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I8": np.int8,
    "U8": np.uint8,
    "I32": np.int32,
    "I64": np.int64,
}
_FLOATS = ("F32", "F16", "BF16")
# The bit pattern of infinity. float8_e4m3fn has NaN in its place.
_INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80, "float8_e4m3fn": 0x7F}
_LARGEST_CODE = 448.0  # the largest number of float8_e4m3fn
# These tensors are ignored in a checkpoint. They are buffers that older versions of transformers
# saved, the copy of the embedding that some tools save with tied embeddings, and the layers that
# Qwen predicts several tokens with.
_IGNORED = re.compile(
    r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)|lm_head\.weight|mtp\..*"
)
# A larger model's tensors of text, in the names of transformers 4 and 5, and those left out.
_TEXT = re.compile(r"(?:model\.)?language_model\.(?=model\.|lm_head\.)|model\.language_model\.")
_LEFT_OUT = re.compile(r"(model\.)?(vision_tower|multi_modal_projector|visual)\..*")
_BLOCK_BYTES = 16 << 20
_RANDOM_DTYPES = {"float16": "F16", "bfloat16": "BF16"}  # every other dtype of config.json is F32
_RANDOM_ROWS = 1024


class Checkpoint:
    """The tensors of a model directory, read on demand.

    ``nbytes`` counts the bytes of the expected tensors in their files. ``shapes`` has the shape of
    each tensor, and ``dtypes`` the dtype as safetensors spells it ("F32", "F16", "BF16").
    ``ignored`` names the harmless extras. ``forms`` has the form of each quantised matrix. All
    other tensors are floats. With ``norms_hold_one``, the weights of norms already have the offset
    of their family.
    """

    forms: Mapping[str, Form] = MappingProxyType({})
    norms_hold_one: bool = False

    def __init__(self, entries: Mapping[str, TensorEntry], ignored: Iterable[str] = ()) -> None:
        """Use `Checkpoint.open` instead, because it checks the entries."""
        self._entries = dict(entries)
        self._maps: dict[Path, mmap.mmap] = {}
        self.ignored = tuple(ignored)
        self.dtypes = {name: self._entries[name].dtype for name in self}
        self.shapes = {name: self._entries[name].shape for name in self}
        self.nbytes = sum(self._entries[name].nbytes for name in self)

    @classmethod
    def open(
        cls,
        directory: Path | GgufHeader,
        expected: Mapping[str, Shape],
        quantisation: Quantisation | None = None,
    ) -> Checkpoint:
        """Open the checkpoint in ``directory`` and check its headers. No data is read.

        The files are ``model.safetensors``, or else the files in ``model.safetensors.index.json``.
        Tensors beyond ``expected`` are an error, except for rotary buffers of older files and for
        ``lm_head.weight`` with tied embeddings (`check_tied_head`). Tensors of the vision part of a
        larger model are left out. The ``directory`` may be a GGUF file or its header instead.

        Raises:
            WeightsError: a file is missing, truncated or corrupt. Or the index disagrees with the
                files or points outside the directory. Or a tensor is missing, unexpected, wrongly
                shaped, or not F32, F16 or BF16. The message names file and tensor.
        """
        model = opened(directory)
        if isinstance(model, GgufHeader):
            from mie.checkpoint.gguf.weights import open_gguf  # which imports this module

            if quantisation is not None:
                raise WeightsError(f"{model.path} is a GGUF file and has no quantization_config")
            return open_gguf(model, expected)
        found = unstacked(_text_entries(read_entries(model)), expected)
        found = renamed(found, expected)
        expected = divided_as(found, expected)
        ignored = [name for name in found if name not in expected and _IGNORED.fullmatch(name)]
        if quantisation is not None:
            from mie.checkpoint.quantised import open_quantised  # which imports this module

            return open_quantised(model, found, ignored, expected, quantisation)
        check_names(model, found.keys() - set(ignored), expected)
        for name, shape in expected.items():
            check_tensor(name, found[name], shape)
        return cls({name: found[name] for name in (*expected, *ignored)}, ignored)

    @property
    def matrix_dtypes(self) -> set[str]:
        """The dtypes of its matrices of floats: "float32", "float16", "bfloat16"."""
        matrices = (name for name in self if len(self._entries[name].shape) == 2)
        found = {self.dtypes[name] for name in matrices if name not in self.forms}
        return {np.dtype(_DTYPES[each]).name for each in found}

    def read(self, name: str) -> NDArray[Any]:
        """Return the tensor ``name`` as a read-only view of its file, in the file's dtype.

        bfloat16 comes as ``ml_dtypes.bfloat16``. Widening it to float32 is exact. The view stays
        valid after `release` (its pages are read again) and after `close`.
        """
        return self._view(self._entries[name])

    def _view(self, entry: TensorEntry) -> NDArray[Any]:
        flat: NDArray[Any] = np.frombuffer(
            self._map(entry.path),
            dtype=_DTYPES[entry.dtype],
            count=entry.nbytes // np.dtype(_DTYPES[entry.dtype]).itemsize,
            offset=entry.start,
        )
        return flat.reshape(entry.shape[::-1]).T if entry.is_turned else flat.reshape(entry.shape)

    def blocks(self, name: str, max_bytes: int = _BLOCK_BYTES) -> Iterator[Rows]:
        """Yield the tensor ``name`` in blocks along its first axis, and release each afterwards.

        The blocks of a tensor in ``forms`` are quantised rows.

        At most ``max_bytes`` of the file (one row if that is longer) count as memory at a time.
        """
        tensor = self.read(name)
        rows = max(1, max_bytes * len(tensor) // max(1, tensor.nbytes))
        for start in range(0, len(tensor), rows):
            try:
                yield tensor[start : start + rows]
            finally:  # also if the caller takes no further block
                self.release(name)

    def check_values(self, name: str, block: Rows) -> None:
        """Check the numbers of ``block``, a part of the tensor ``name``.

        Raises:
            WeightsError: one is not finite, or a scale is too small for its form.
        """
        path = self._entries[name].path
        if not _is_finite(block):
            raise WeightsError(
                f"{path}: tensor {name!r} holds NaN or infinite values; fetch the file again "
                "('mie inspect --check' counts them in every tensor)"
            )
        if isinstance(block, QuantisedRows) and block.has_tiny_scale:
            raise WeightsError(
                f"{path}: tensor {name!r} has a scale between 0 and 2**-98, which is too small for "
                "codes of 4 bits; quantise the model again"
            )

    def are_copies(self, name: str, other: str) -> bool:
        """Return whether two tensors are equal bit for bit. Reads both block by block."""
        first, second = self._entries[name], self._entries[other]
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        if self.forms.get(name) != self.forms.get(other):
            return False
        return all(
            np.array_equal(one.view(np.uint8), two.view(np.uint8))
            for pair in zip(self.blocks(name), self.blocks(other), strict=True)
            for one, two in zip(*map(_arrays, pair), strict=True)
        )

    @property
    def paths(self) -> list[Path]:
        """The files with the tensors."""
        return sorted({entry.path for entry in self._entries.values()})

    def identity(self) -> str:
        """Return a digest of the files: of some bytes of each tensor, of sizes and of times.

        Raises:
            WeightsError: a file cannot be read.
        """
        places = [(name, entry.start, entry.is_turned) for name, entry in self._entries.items()]
        try:
            facts = [os.stat(path) for path in self.paths]
        except OSError as error:
            raise WeightsError(f"cannot read the weights: {error.strerror or error}") from error
        files = [(about.st_size, about.st_mtime_ns, about.st_ctime_ns) for about in facts]
        text = f"{digest_of(self._entries)} {places} {files}"
        return hashlib.sha256(text.encode()).hexdigest()

    def release(self, name: str) -> None:
        """Drop the pages of the tensor ``name`` from this process's memory.

        They stay in the system's page cache, from which a later use brings them back.
        """
        self._drop(self._entries[name])

    def _drop(self, entry: TensorEntry) -> None:
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


def _text_entries(found: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """Return the tensors of the text part of a larger model, by their names in a model of text.

    Raises:
        WeightsError: two tensors have one name in a model of text.
    """
    if not any(_TEXT.match(name) for name in found):
        return found
    names: dict[str, str] = {}
    for name in found:
        if _LEFT_OUT.fullmatch(name):
            continue
        other = names.setdefault(text_name(name), name)
        if other != name:
            raise WeightsError(
                f"{found[name].path}: tensors {other!r} and {name!r} are both "
                f"{text_name(name)!r}; leave one out"
            )
    return {text: found[name] for text, name in names.items()}


def text_name(name: str) -> str:
    """Return a tensor's name in a model of text, from its name in a larger model."""
    match = _TEXT.match(name)
    if match is None:
        return name
    is_bare = match[0] == "model.language_model." and name[match.end() :][:6] != "model."
    return ("model." if is_bare else "") + name[match.end() :]


class RandomWeights(Checkpoint):
    """A checkpoint of tensors that are generated when read, always with the same numbers.

    The numbers of a tensor depend on the seed and on its name. Norms are 1, biases are 0, and
    matrices have a variance of 1 / inputs, so activations stay finite at any depth.
    """

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        """Set the model and the seed. Nothing is generated yet."""
        code = _RANDOM_DTYPES.get(model.dtype, "F32")
        self._dtype = np.dtype(_DTYPES[code])
        size = self._dtype.itemsize
        self._seed = seed % 2**64
        path, expected = Path("random"), expected_tensors(model)
        sizes = {name: math.prod(shape) * size for name, shape in expected.items()}
        super().__init__(
            {
                name: TensorEntry(path=path, dtype=code, shape=shape, start=0, stop=sizes[name])
                for name, shape in expected.items()
            }
        )

    def read(self, name: str) -> NDArray[Any]:
        """Return the whole tensor."""
        return np.concatenate(list(self.blocks(name)))

    def blocks(self, name: str, max_bytes: int = 0) -> Iterator[NDArray[Any]]:
        """Yield the tensor in blocks of rows. ``max_bytes`` has no influence on the numbers."""
        shape = self._entries[name].shape
        generator = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        for start in range(0, shape[0], _RANDOM_ROWS):
            size = (min(_RANDOM_ROWS, shape[0] - start), *shape[1:])
            yield self._draw(name, size, generator).astype(self._dtype)

    def release(self, name: str) -> None:
        """Do nothing, because nothing is kept."""

    @staticmethod
    def _draw(name: str, size: tuple[int, ...], generator: np.random.Generator) -> NDArray[Any]:
        if name.endswith("norm.weight"):
            return np.ones(size, np.float32)
        if name.endswith(".bias"):
            return np.zeros(size, np.float32)
        numbers = generator.standard_normal(size, dtype=np.float32)
        numbers /= np.sqrt(np.float32(size[-1]))
        return numbers


def check_tied_head(checkpoint: Checkpoint) -> None:
    """Refuse a ``lm_head.weight`` beside tied embeddings that is no copy of the embedding.

    With tied embeddings the output matrix is the embedding. transformers 4 ignores a second one in
    the file, and transformers 5 unties the two if they differ. Such a file is refused here, because
    it is unclear which was meant. Reads the data of both, block by block.
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
        count = 0
        for block in checkpoint.blocks(name):
            with np.errstate(over="ignore", invalid="ignore"):
                values = dequantise(block) if isinstance(block, QuantisedRows) else block
            values = values.astype(np.float32, copy=False)
            count += values.size - int(np.count_nonzero(np.isfinite(values)))
        if count:
            counts[name] = count
    return counts


def _arrays(block: Rows) -> Sequence[NDArray[Any]]:
    """Return the arrays that a block consists of."""
    if not isinstance(block, QuantisedRows):
        return [block]
    return [each for each in (block.codes, block.scales, block.offsets) if each is not None]


def _is_finite(block: Rows) -> bool:
    """Return whether all values are finite, also codes times scales.

    The bits of positive floats sort as signed integers, and the bits of negative floats as unsigned
    integers. Two plain reductions are the fastest check and need no memory.
    """
    arrays = [*_arrays(block)]
    if isinstance(block, QuantisedRows) and block.scales.size:
        with np.errstate(over="ignore"):
            arrays.append(np.abs(block.scales).max(keepdims=True) * np.float32(_LARGEST_CODE))
    for array in arrays:
        if array.dtype.kind == "i" or not array.size:
            continue
        size, infinity = array.dtype.itemsize, _INFINITY[array.dtype.name]
        sign = 1 << (8 * size - 1)
        is_large = array.view(f"i{size}").max() >= infinity
        if is_large or array.view(f"u{size}").max() >= sign + infinity:
            return False
    return True


def check_names(directory: Path, found: Iterable[str], expected: Mapping[str, Shape]) -> None:
    """Raise `WeightsError` unless the names found are the expected ones."""
    names = set(found)
    missing = [name for name in expected if name not in names]
    extra = sorted(names - expected.keys())
    problems = [
        f"{len(group)} {kind}: {some(group)}"
        for kind, group in (("missing", missing), ("unexpected", extra))
        if group
    ]
    if problems:
        raise WeightsError(
            f"the weights in {directory} do not fit its config.json; tensors {'; '.join(problems)}"
        )


def check_tensor(name: str, entry: TensorEntry, shape: Shape) -> None:
    """Raise `WeightsError` unless a tensor is floats of this shape."""
    if entry.dtype not in _FLOATS:
        raise WeightsError(
            f"{entry.path}: tensor {name!r} has dtype {entry.dtype}; supported: "
            f"{', '.join(_FLOATS)}"
        )
    if entry.shape != shape:
        raise WeightsError(
            f"{entry.path}: tensor {name!r} has shape {shown(list(entry.shape))}, config.json asks "
            f"for {list(shape)}"
        )
