"""Read the tiles of a split from the KV cache."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import as_strided

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import Scratch
from mie.ops_cpu.attention.plan import Split
from mie.ops_cpu.attention.tiles import Segment

KEYS, VALUES = 0, 1
"""Indices into the second axis of the cache."""


def readers_of(
    split: Split, memory: Floats, scratch: Scratch, *, transposes: bool
) -> list[SegmentReader]:
    """Return readers of a split's segments for memory [L, 2, Hkv, N, B, Dh].

    The segments of a held split have places of their own in the buffers.
    """
    per_position = memory.shape[2] * memory.shape[5]
    sizes = [
        len(each.at) * each.width * per_position if transposes or each.step is None else 0
        for each in split.segments
    ]
    total = sum(sizes) if split.is_held else max(sizes)
    names = ["keys", "values" if split.is_held else "keys", *["transposed"] * transposes]
    buffers = [scratch.take(name, total) for name in names]
    readers: list[SegmentReader] = []
    begin = 0
    for each, size in zip(split.segments, sizes, strict=True):
        own = [buffer[begin : begin + size] for buffer in buffers]
        readers.append(SegmentReader(each, memory, *own, is_held=split.is_held))
        begin += size if split.is_held else 0
    return readers


class SegmentReader:
    """Reads the keys and values of a segment, in place or gathered into buffers."""

    def __init__(self, segment: Segment, memory: Floats, *buffers: Floats, is_held: bool) -> None:
        """Prepare to read memory [L, 2, Hkv, N, B, Dh].

        Buffers are for keys, for values, and for transposed keys if these are wanted.
        """
        num_layers, _, num_heads, num_blocks, block_size, head_dim = memory.shape
        self.at = segment.at
        self._segment = segment
        self._memory, self._block_ids = memory, np.array(segment.block_ids)
        self._is_in_place = segment.step is not None
        width = segment.width
        if segment.width_of is not None:
            width = segment.width_of((num_blocks - segment.block_ids[0]) * block_size)
        shape = num_heads, len(segment.at), 1, width, head_dim
        if segment.step is not None:
            *outer, by_block, by_position, by_element = memory.strides
            strides = *outer, segment.step * by_block, 0, by_position, by_element
            first = memory[:, :, :, segment.block_ids[0] :]
            both = as_strided(first, (num_layers, 2, *shape), strides, writeable=False)
            planes = [both[:, 0], both[:, 1]]
        else:
            gathered = num_heads, len(segment.block_ids), block_size, head_dim
            self._gathered = [buffer.reshape(gathered) for buffer in buffers[:2]]
            planes = [buffer.reshape(1, *shape) for buffer in buffers[:2]]
            # NumPy writes a position's values in one go if they are one item.
            item = np.dtype((np.void, head_dim * memory.itemsize))
            self._gathered_values, self._zero = planes[1].reshape(-1).view(item), np.zeros((), item)
        self.keys: Floats = planes[0].swapaxes(-1, -2)
        """[L or 1, Hkv, tiles, 1, Dh, width]"""
        self.values: Floats = planes[1]
        """[L or 1, Hkv, tiles, 1, width, Dh]"""
        self._stored_keys, self._transposes = self.keys, len(buffers) > 2
        if self._transposes:
            self.keys = buffers[2].reshape(1, *self.keys.shape[1:])
        self._is_kept = is_held and not self._is_in_place
        self.is_held = self._is_kept or self._transposes
        """Whether `hold` has something to read."""

    @property
    def width(self) -> int:
        """The number of positions that are read of each tile, at most those of `keys`."""
        return self._segment.width

    @property
    def filled(self) -> int | None:
        """The number of positions whose values may be read, or None for all."""
        return self._segment.filled

    def hold(self, layer: int) -> None:
        """Read the keys and values of a held split, which `read` does not read again."""
        if self._is_kept:
            self._gather(layer, KEYS)
            self._gather(layer, VALUES)
        if self._transposes:
            self.keys[0] = self._stored_keys[layer if self._is_in_place else 0]

    def read(self, layer: int, which: int) -> int:
        """Read the layer's `KEYS` or `VALUES`, and return their index in `keys` or `values`.

        Slots without a token hold anything in keys, and zeros in values unless `filled` says how
        many hold a token.
        """
        if self._is_in_place:
            return 0 if self._transposes and which == KEYS else layer
        if not self._is_kept:
            self._gather(layer, which)
        return 0

    def _gather(self, layer: int, which: int) -> None:
        # With "clip" NumPy writes directly to the array, without a copy.
        self._memory[layer, which].take(self._block_ids, 1, self._gathered[which], "clip")
        if which == VALUES and self._segment.empty is not None:
            own = self._segment.empty[: self._memory.shape[2]]
            self._gathered_values.put(own, self._zero)  # the weight is 0, but 0 * NaN is NaN
