"""Lay out matrices and caches as kernels read them.

A matrix is panels of 16 outputs. The products read them in order. Quantised weights of a panel are
groups of inputs: 16 scales, perhaps 16 offsets, and 16 codes for each input. Where scales have
units, all groups of a unit are together: 16 units, perhaps the units of offsets, the bytes of the
scales and of the offsets, and then the codes. Two groups with scales of 16 bits and no offsets are
together, too.

The cache is regions of 16 blocks, in huge pages. A region has all layers, so that a short chat
touches one region. The blocks of a head in a region are adjacent: the keys of four blocks, the
values of these, and so on. Attention reads them in this order, as one stream. docs/jit.md measures
other layouts.

The keys and the values of a block's head are B x Dh elements each, with Dh padded to a multiple of
16. Keys are [B / 16, Dh, 16], so that 16 positions are the lanes of a vector. If B is not a
multiple of 16 they are [B, Dh], and attention gathers them into panels. Values are [B, Dh].
`kernels.int4_cache` describes a cache of 4-bit codes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.base.arithmetic import ceil_div
from mie.errors import UnsupportedModelError
from mie.ops.arrays import Floats
from mie.ops.arrays import zeros as zeros
from mie.ops.backend import KVCacheShape
from mie.ops.kv_cache import GROUP, INT4, QUANTIZED
from mie.ops.weights.integer import ACTIVATION_GROUP
from mie.ops.weights.packed import pack_nibbles
from mie.ops.weights.quantised import Form, Part, QuantisedRows, Rows
from mie.ops_jit.layout import (
    BYTES_OF_WORD,
    INPUTS_OF_SEXTETS,
    INPUTS_OF_WORD,
    K_BLOCK,
    LANES,
    PANELS,
    REGION,
    RUN,
    SEXTET_BIAS,
    SEXTET_WORDS,
    format_name,
    inputs_together,
    rounding_of,
    words_of_block,
)

if TYPE_CHECKING:
    from mie.ops_jit.adapters import Slots
    from mie.ops_jit.kept_panels import KeptPanels

CHUNK = 32 << 20
"""Bytes that are mapped at a time. They take memory where they are written."""


def address(array: NDArray[Any]) -> int:
    """Return the address of an array's first element, in a third of the time of ``ctypes.data``."""
    first: int = array.__array_interface__["data"][0]
    return first


def padded_rows(num_rows: int) -> int:
    """Return how many rows the panels of a matrix hold. Panels come in whole groups."""
    return ceil_div(num_rows, LANES * PANELS) * LANES * PANELS


class HugePages:
    """The memory of matrices. Neighbours share huge pages, so that no matrix wastes half a page.

    A chunk is freed with the last of its matrices.
    """

    def __init__(self) -> None:
        self._chunk: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return zeros that begin at a cache line.

        Raises:
            MemoryError: the system refuses.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if self._used + size > len(self._chunk):
            self._chunk, self._used = zeros((max(size, CHUNK),), np.uint8, huge=True), 0
        memory = self._chunk[self._used : self._used + size]
        self._used += ceil_div(size, 64) * 64
        return memory.view(dtype).reshape(shape)


class Panels:
    """A matrix [N, K] as panels of 16 rows in one format.

    Floats are [N / 16, K, 16]. Quantised weights are [N / 16, G] groups of `_group_dtype`. N is
    padded with zeros to whole groups of four panels. An embedding table is kept like this too, so
    that the output head can share its memory.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        memory: NDArray[Any],
        form: Form | None = None,
        in_words: bool = False,
    ) -> None:
        """Set the panels. ``in_words`` is for codes in words, for products with rounded rows."""
        self.shape = shape
        self.memory = memory
        self.format = memory.dtype.name if form is None else format_name(form, in_words)
        """The name of the format in which kernels read it."""
        self.rounding = rounding_of(form) if form is not None and in_words else None
        """The kernel that rounds rows for products with it, if there is one."""
        self.kind = f"[{self.format}]" if self.rounding is None else f"_int8[{self.format}]"
        """The end of the names of the kernels that multiply by it."""
        self.segment = 0 if form is None else min(form.group, ACTIVATION_GROUP)
        """Inputs that share a scale with rounded rows."""

    @property
    def widened_bytes(self) -> int:
        """The memory in which a thread widens weights for many rows."""
        is_quantised = self.memory.dtype.names is not None
        return is_quantised * min(self.shape[1], K_BLOCK) * PANELS * LANES * 4

    @property
    def num_groups(self) -> int:
        """The number of groups of four panels."""
        return len(self.memory) // PANELS


@dataclass(frozen=True, eq=False)
class JitMatrix:
    """A matrix [N, K] as segments of rows, each in its own format, and its bias [N] in float32."""

    shape: tuple[int, int]
    segments: Sequence[Panels]
    bias: Floats | None
    slots: Slots | None = None
    """Slots of adapters, if the engine has some."""

    @property
    def arrays(self) -> Sequence[NDArray[Any]]:
        """The memory of each segment."""
        return [panels.memory for panels in self.segments]


class ExpertMatrices:
    """The matrices [N, K] of a layer's experts: the addresses of their segments and biases."""

    slots = None  # adapters of experts are refused

    def __init__(self, matrices: Sequence[JitMatrix]) -> None:
        self.matrices = matrices
        self.shape, self.segments = matrices[0].shape, matrices[0].segments
        formats = {tuple(panels.format for panels in each.segments) for each in matrices}
        if len(formats) > 1:
            raise UnsupportedModelError(
                f"experts of a layer in several formats ({sorted(formats)}) are not supported "
                "by the jit backend (use weight_dtype='float32', or backend='numpy')"
            )
        segments = zip(*(each.segments for each in matrices), strict=True)
        self.arrays = [_addresses([panels.memory for panels in own]) for own in segments]
        biases = [each.bias for each in matrices if each.bias is not None]
        self.bias = _addresses(biases) if biases else None


def _addresses(arrays: Sequence[Any]) -> Any:
    return np.array([address(array) for array in arrays], np.int64)


def segments_of(
    parts: Sequence[Part],
    blocks: Iterator[Rows],
    num_columns: int,
    pages: HugePages,
    dtype: np.dtype[Any] | None,
    in_words: bool = False,
    kept: KeptPanels | None = None,
) -> Sequence[Panels]:
    """Convert the blocks of a matrix, part by part. Neighbours of one form become one segment.

    Floats become ``dtype``. None keeps 16 bits as they are, and all others become float32.
    ``in_words`` keeps codes in words, for products with rounded rows. No block is read if ``kept``
    has the panels.
    """
    segments = [
        ((sum(num_rows for num_rows, _ in same), num_columns), form)
        for form, same in itertools.groupby(parts, lambda part: part[1])
    ]
    layouts = [_layout(shape, form, dtype, in_words) for shape, form in segments]
    found = None if kept is None else kept.take(layouts)
    if found is None:
        found = [_packed(shape, blocks, pages, dtype, form, in_words) for shape, form in segments]
        if kept is not None:
            kept.add(found)
    return [
        Panels(shape, memory, form, in_words)
        for (shape, form), memory in zip(segments, found, strict=True)
    ]


def _layout(
    shape: tuple[int, int], form: Form | None, dtype: np.dtype[Any] | None, in_words: bool
) -> tuple[np.dtype[Any] | None, tuple[int, ...]]:
    """Return the dtype and the shape of panels. Without a dtype, floats keep their own."""
    num_panels = padded_rows(shape[0]) // LANES
    if form is None:
        return dtype, (num_panels, shape[1], LANES)
    groups = ceil_div(shape[1], inputs_together(form))
    return _group_dtype(form, in_words), (num_panels, groups)


def _packed(
    shape: tuple[int, int],
    blocks: Iterator[Rows],
    pages: HugePages,
    dtype: np.dtype[Any] | None,
    form: Form | None,
    in_words: bool,
) -> NDArray[Any]:
    """Convert the next blocks of whole rows to panels, one at a time."""
    _, dims = _layout(shape, form, dtype, in_words)
    memory: NDArray[Any] | None = None
    if form is not None:
        memory = pages.zeros(dims, _group_dtype(form, in_words))
    row = 0
    while row < shape[0]:
        block = next(blocks)
        if isinstance(block, QuantisedRows):
            assert memory is not None, "a quantised part has a form"
            assert form is not None
            _put_quantised(memory, row, block, form)
        else:
            kept = dtype or (block.dtype if block.dtype.itemsize == 2 else np.dtype(np.float32))
            if memory is None:
                memory = pages.zeros(dims, kept)
            elif kept != memory.dtype and memory.dtype != np.float32:  # parts of two dtypes
                narrow, memory = memory, pages.zeros(dims, np.float32)
                memory[...] = narrow
            _put(memory, row, block)
        row += len(block)
    assert memory is not None, "a matrix has rows"
    return memory


def _group_dtype(form: Form, in_words: bool) -> np.dtype[Any]:
    """Return the layout of a group of a panel, or of the groups of a unit."""
    kinds = ("scale", "offset") if form.has_offsets else ("scale",)
    inputs = inputs_together(form)
    units = [(f"{kind}_units", np.float32, LANES) for kind in kinds if form.has_units]
    scale = {8: np.int8, 16: np.float16, 32: np.float32}[form.scale_bits]
    scales = [(f"{kind}s", scale, (inputs // form.group, LANES)) for kind in kinds]
    codes = ("codes", np.uint8, (inputs, LANES))
    if form.codes == "int4":
        codes = ("codes", np.uint32, (inputs // INPUTS_OF_WORD, LANES))
    elif in_words and form.has_six_bits:
        words = inputs // INPUTS_OF_SEXTETS * SEXTET_WORDS
        codes = ("codes", np.uint32, (words, LANES))
    elif form.codes == "int8" and in_words:
        codes = ("codes", np.uint32, (inputs // BYTES_OF_WORD, LANES))
    return np.dtype([*units, *scales, codes])


def _put_quantised(groups: NDArray[Any], row: int, block: QuantisedRows, form: Form) -> None:
    """Write rows of a matrix in their form, from number ``row`` on. Codes that pad it are zeros."""
    planes = block.kept()
    codes = block.codes.view(np.uint8)
    if padding := -codes.shape[1] % inputs_together(form):
        codes = np.pad(codes, [(0, 0), (0, padding)])
        groups_left = codes.shape[1] // form.group - block.scales.shape[1]
        for kind in planes.keys() - {"codes"}:
            planes[kind] = np.pad(planes[kind], [(0, 0), (0, groups_left)])
    if form.codes == "int4":
        if form.has_offsets:
            codes = _words(codes, words_of_block(form.group))
        else:  # the first input is the highest nibble
            codes = codes.reshape(-1, INPUTS_OF_WORD)[:, ::-1] & np.uint8(15)
            codes = pack_nibbles(codes).view("<u4")
    elif groups["codes"].dtype == np.uint32 and form.has_six_bits:
        codes = _sextets(codes + np.uint8(0 if form.has_offsets else SEXTET_BIAS))
    elif groups["codes"].dtype == np.uint32:
        codes = codes.reshape(-1, BYTES_OF_WORD)[:, ::-1].copy().view("<u4")
    for name, plane in (planes | {"codes": codes}).items():
        _put(groups[name], row, plane.reshape(len(block), *groups[name].shape[1:-1]))


def _words(codes: NDArray[np.uint8], width: int) -> NDArray[Any]:
    """Return blocks of codes as ``width`` words each, in the order of `layout.words_of_block`.

    Nibble k of word j is the code k * width + j of a block. The codes of neighbouring nibbles are
    joined for all words of a block at once.
    """
    numbers = np.ascontiguousarray(codes).reshape(-1).view(f"<u{width}")
    joined = numbers[::2] | numbers[1::2] << 4
    of_words = joined.view(np.uint8).reshape(-1, INPUTS_OF_WORD // 2, width)
    words = np.empty((len(of_words), width, INPUTS_OF_WORD // 2), np.uint8)
    for byte in range(INPUTS_OF_WORD // 2):
        for word in range(width):
            words[:, word, byte] = of_words[:, byte, word]
    return words.view("<u4")


def _sextets(codes: NDArray[np.uint8]) -> NDArray[Any]:
    """Return codes 0 … 63 as words, in the order of `layout.INPUTS_OF_SEXTETS`."""
    quads = codes.reshape(-1, INPUTS_OF_SEXTETS // BYTES_OF_WORD, BYTES_OF_WORD)[..., ::-1].copy()
    *words, last = np.moveaxis(quads.view("<u4")[..., 0], 1, 0)
    high = np.uint32(0xC0C0C0C0)
    return np.stack([w | last << 6 - 2 * n & high for n, w in enumerate(words)], axis=1)


def _put(panels: NDArray[Any], row: int, block: NDArray[Any]) -> None:
    """Write rows [n, …] of panels [N / 16, …, 16], from number ``row`` on."""
    end = row + len(block)
    first, last = ceil_div(row, LANES), end // LANES
    if first < last:
        whole = block[first * LANES - row : last * LANES - row]
        whole = whole.reshape(last - first, LANES, *block.shape[1:])
        panels[first:last] = np.moveaxis(whole, 1, -1)
    edges = [*range(row, min(first * LANES, end)), *range(max(last * LANES, row), end)]
    for each in dict.fromkeys(edges):
        panels[each // LANES, ..., each % LANES] = block[each - row]


def padded(head_dim: int) -> int:
    """Return the number of elements that a head takes."""
    return ceil_div(head_dim, LANES) * LANES


@dataclass(frozen=True, eq=False)
class JitCache:
    """Keys and values, and the scales of a quantised cache."""

    shape: KVCacheShape
    format: str
    """The name of the format in which kernels read it."""
    elements: NDArray[Any]  # [ceil(N / 16), L, Hkv, 4, 2, 4, B * padded(Dh)], or bytes of two codes
    scales: NDArray[Any] | None  # [ceil(N / 16), L, Hkv, 4, 2, 4, B], or [..., 2 * G * B] for int4

    @classmethod
    def new(cls, shape: KVCacheShape, dtype: np.dtype[Any]) -> JitCache:
        """Return a cache of zeros."""
        num_regions = ceil_div(shape.num_blocks, REGION)
        dims = (num_regions, shape.num_layers, shape.num_kv_heads, REGION // RUN, 2, RUN)
        size, scales = shape.block_size * padded(shape.head_dim), None
        if dtype == INT4:
            num_factors = 2 * ceil_div(shape.head_dim, GROUP) * shape.block_size
            elements = zeros((*dims, size // 2), np.uint8, huge=True)
            scales = zeros((*dims, num_factors), np.float16)
        else:
            elements = zeros((*dims, size), dtype, huge=True)
            if dtype in QUANTIZED.values():
                scales = zeros((*dims, shape.block_size), np.float32)
        return cls(shape, dtype.name, elements, scales)

    def planes(self, layer: int) -> tuple[NDArray[Any] | None, ...]:
        """Return where a layer's keys and values begin, and the scales of each, if there are any.

        Kernels find a block of a head from there (`kernels.elementwise.place_of`).
        """
        scales = (None, None) if self.scales is None else self.scales[0, layer, 0, 0]
        return (*self.elements[0, layer, 0, 0], *scales)

    @property
    def num_heads(self) -> int:
        """The number of heads of all layers."""
        return self.shape.num_layers * self.shape.num_kv_heads


def _at(block_ids: Any) -> tuple[Any, ...]:
    """Return the index of a block, or of several. The result has [L, Hkv, 2, ...] of each."""
    every = slice(None)
    in_region = block_ids % REGION
    return block_ids // REGION, every, every, in_region // RUN, every, in_region % RUN


def move_blocks(source: JitCache, target: JitCache, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy whole blocks. All are read before any is written."""
    read, written = (_at(np.asarray(block_ids, np.int64)) for block_ids in (src, dst))
    for own, other in ((source.elements, target.elements), (source.scales, target.scales)):
        if own is not None and other is not None:
            other[written] = own[read]


def planes_of(cache: JitCache, block_id: int) -> list[NDArray[Any]]:
    """Return views [L, 2, Hkv, ...] of a block's elements, and of the scales if there are any."""
    arrays = [cache.elements] if cache.scales is None else [cache.elements, cache.scales]
    return [array[_at(block_id)].swapaxes(1, 2) for array in arrays]
