"""Read the tiles of a split from the KV cache."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import huge_empty
from mie.ops_cpu.attention.plan import Split
from mie.ops_cpu.attention.tiles import Segment


class Scratch:
    """Named working memory of one thread, which grows on demand."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = np.dtype(dtype)
        self._arrays: dict[str, Floats] = {}

    def take(self, name: str, *shape: int) -> Floats:
        """Return an uninitialised array of that shape. It overwrites the last one of that name."""
        size = math.prod(shape)
        array = self._arrays.get(name)
        if array is None or array.size < size:
            array = huge_empty(size * self._dtype.itemsize).view(self._dtype)
            self._arrays[name] = array
        return array[:size].reshape(shape)


class SplitReader:
    """Reads the keys and values of a split for some KV heads."""

    def __init__(self, split: Split, memory: Floats, scratch: Scratch, *, transposes: bool) -> None:
        """Prepare to read from memory [L, 2, Hkv, N, B, Dh]."""
        self._is_held = split.is_held
        per_position = memory.shape[2] * memory.shape[5]
        sizes = [len(each.at) * each.width * per_position for each in split.segments]
        total = sum(sizes) if split.is_held else max(sizes)
        names = "keys", "values" if split.is_held else "keys", "turned"
        buffers = [scratch.take(name, total) for name in names[: 3 if transposes else 2]]
        self.segments: list[SegmentReader] = []
        begin = 0
        for each, size in zip(split.segments, sizes, strict=True):
            own = [buffer[begin : begin + size] for buffer in buffers]
            self.segments.append(SegmentReader(each, memory, *own))
            begin += size if split.is_held else 0

    def load(self, layer: int) -> None:
        """Read everything of the layer, if the split is to be held."""
        if self._is_held:
            for segment in self.segments:
                segment.hold(layer)


class SegmentReader:
    """Reads the keys and values of a segment."""

    def __init__(
        self,
        segment: Segment,
        memory: Floats,
        keys: Floats,
        values: Floats,
        turned: Floats | None = None,
    ) -> None:
        """Prepare to read memory [L, 2, Hkv, N, B, Dh], in place or gathered into the buffers.

        With a buffer ``turned`` keys are transposed in memory.
        """
        num_layers, _, num_heads, _, block_size, head_dim = memory.shape
        self.at, self.width = segment.at, segment.width
        self._held: tuple[Floats, Floats] | None = None
        shape = num_heads, len(segment.at), segment.width, head_dim
        turned_shape = *shape[:2], head_dim, segment.width
        self._turned = None if turned is None else turned.reshape(turned_shape)
        self._is_in_place = segment.step is not None
        if segment.step is not None:
            *outer, by_block, by_position, by_element = memory.strides
            self._source = as_strided(
                memory[:, :, :, segment.block_ids[0] :],
                (num_layers, 2, *shape),
                (*outer, segment.step * by_block, by_position, by_element),
                writeable=False,
            )
            return
        self._source = memory
        self._block_ids = np.array(segment.block_ids)
        by_block = num_heads, len(segment.block_ids), block_size, head_dim
        self._gathered = [buffer.reshape(by_block) for buffer in (keys, values)]
        self._tiles = [buffer.reshape(shape) for buffer in (keys, values)]
        self._beyond = _beyond(segment)

    def hold(self, layer: int) -> None:
        """Read the layer's keys and values, which `keys` and `values` return from now on."""
        self._held = None
        self._held = self.keys(layer), self.values(layer)

    def keys(self, layer: int) -> Floats:
        """Return the layer's keys [Hkv, tiles, 1, Dh, width]. Slots without a token are arbitrary."""
        if self._held is not None:
            return self._held[0]
        keys = self._read(layer, 0).swapaxes(-1, -2)
        if self._turned is not None:
            self._turned[...] = keys
            keys = self._turned
        return keys[:, :, None]

    def values(self, layer: int) -> Floats:
        """Return the layer's values [Hkv, tiles, 1, width, Dh]. Slots without a token are zeros.

        They have weights of 0, but may hold NaN, and 0 * NaN is NaN.
        """
        if self._held is not None:
            return self._held[1]
        values = self._read(layer, 1)
        if not self._is_in_place and self._beyond is not None:
            values[self._beyond] = 0
        return values[:, :, None]

    def _read(self, layer: int, which: int) -> Floats:
        source: Floats = self._source[layer, which]
        if self._is_in_place:
            return source
        # With "clip" NumPy writes directly to the array, without a copy.
        source.take(self._block_ids, 1, self._gathered[which], "clip")
        return self._tiles[which]


def _beyond(segment: Segment) -> tuple[Any, ...] | None:
    """Return the index, in [Hkv, tiles, width, Dh], of the slots without a token.

    It is one index for all tiles, because many small fills take longer than the gathering.
    """
    if not segment.ends:
        return None
    if len(segment.ends) == 1:
        tile, filled = segment.ends[0]
        return slice(None), tile, slice(filled, None)
    tiles, filled_positions = np.array(segment.ends).T
    which, positions = np.nonzero(np.arange(segment.width) >= filled_positions[:, None])
    return slice(None), tiles[which], positions
