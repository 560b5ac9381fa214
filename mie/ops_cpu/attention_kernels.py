"""What decodes and prefills share: tiles of keys, the softmax over them, sums over tiles.

All products have one shape, whatever the batch, and sums go over tiles in their order, so that a
query's result is the same bit for bit however it is computed: a tile it does not see contributes
exact zeros.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import huge_empty
from mie.ops_cpu.attention_plan import Geometry, Stretch


class Scratch:
    """Memory of one thread, by name, which grows to what was asked of it."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = dtype
        self._arrays: dict[str, Floats] = {}

    def take(self, name: str, *shape: int) -> Floats:
        """An array of that shape, holding anything; the one before of that name is overwritten."""
        size = math.prod(shape)
        array = self._arrays.get(name)
        if array is None or array.size < size:
            room = huge_empty(size * np.dtype(self._dtype).itemsize)
            array = self._arrays[name] = room.view(self._dtype)
        return array[:size].reshape(shape)


class Reader:
    """The keys and values of a stretch, layer by layer."""

    def __init__(self, memory: Floats, stretch: Stretch, geometry: Geometry, room: Floats) -> None:
        """From memory [L, 2, Hkv, N, B, Dh], in place or gathered at the beginning of ``room``."""
        num_layers, _, num_heads, _, block_size, head_dim = memory.shape
        self._is_in_place = stretch.step is not None
        if stretch.step is not None:
            num_tiles = len(range(stretch.at.start, stretch.at.stop, stretch.at.step or 1))
            *outer, by_block, by_position, by_element = memory.strides
            self._source = as_strided(
                memory[:, :, :, stretch.block_ids[0] :],
                (num_layers, 2, num_heads, num_tiles, geometry.tile, head_dim),
                (*outer, stretch.step * by_block, by_position, by_element),
                writeable=False,
            )
            return
        self._source = memory
        self._block_ids = np.array(stretch.block_ids)
        shape = (num_heads, len(stretch.block_ids), block_size, head_dim)
        self._gathered = room[: math.prod(shape)].reshape(shape)
        self._tiles = self._gathered.reshape(num_heads, -1, stretch.width, head_dim)
        self._beyond = _beyond(stretch)

    def read(self, layer: int, which: int, *, cleans: bool = True) -> Floats:
        """The layer's keys (0) or values (1): [Hkv, tiles, width, Dh]; if it ``cleans``, with zeros
        where there is no token."""
        source: Floats = self._source[layer, which]
        if self._is_in_place:
            return source
        # With "clip" NumPy writes to the array itself, not to a copy of it first.
        source.take(self._block_ids, 1, self._gathered, "clip")
        if cleans and self._beyond is not None:
            self._tiles[self._beyond] = 0  # it may be no number there, and 0 * NaN is NaN
        return self._tiles


def _beyond(stretch: Stretch) -> tuple[Any, ...] | None:
    """The index, in [Hkv, tiles, width, Dh], of what holds no token; one for all tiles, for many
    small fills take longer than the gathering."""
    if not stretch.ends:
        return None
    if len(stretch.ends) == 1:
        tile, filled = stretch.ends[0]
        return slice(None), tile, slice(filled, None)
    tiles, filled = np.array(stretch.ends).T
    which, positions = np.nonzero(np.arange(stretch.width) >= filled[:, None])
    return slice(None), tiles[which], positions


def softmax_weights(scores: Floats, scratch: Scratch) -> tuple[Floats, Floats]:
    """(largest score, sum of weights), both [X, ..., R], of scores [X, tiles, ..., R, tile], which
    become weights: exp(score - largest), 0 for those at -inf."""
    lanes = over_tiles(np.maximum, scores, "lanes", scratch)
    # Twice as fast as `np.maximum.reduce` over short rows.
    starts = np.arange(0, lanes.size, lanes.shape[-1])
    largest: Floats = np.maximum.reduceat(lanes.reshape(-1), starts).reshape(lanes.shape[:-1])
    # A query that sees no key here: its weights are 0, and so is what they add to others' sums.
    np.maximum(largest, np.finfo(scores.dtype).min / 2, out=largest)
    scores -= largest[:, None, ..., None]
    np.exp(scores, out=scores)
    total: Floats = np.add.reduce(over_tiles(np.add, scores, "lanes", scratch), axis=-1)
    return largest, total


def over_tiles(operation: np.ufunc, x: Floats, name: str, scratch: Scratch) -> Floats:
    """x [X, tiles, ..., R, E] reduced over its tiles, in their order: [X, ..., R, E]."""
    if x.shape[1] == 1:
        return x[:, 0]
    out = scratch.take(name, len(x), *x.shape[2:])
    operation.reduce(x, axis=1, out=out)
    return out


def combine(largest: Floats, total: Floats, attended: Floats) -> Floats:
    """The attention [..., Dh] of queries from that of their groups: the largest scores and sums of
    weights [groups, ...], and the sums of weighted values [groups, ..., Dh]."""
    if len(total) == 1:
        result: Floats = attended[0] / total[0, ..., None]
        return result
    weights = np.exp(largest - largest.max(axis=0))
    result = np.add.reduce(attended * weights[..., None], axis=0)
    result /= np.add.reduce(total * weights, axis=0)[..., None]
    return result


def equals_in_part(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Whether the products and sums of a decode with the first positions of a tile only equal those
    with all of them, the weights of the others 0."""
    g, generator = geometry, np.random.default_rng(0)
    queries = generator.normal(size=(g.num_rows, g.head_dim)).astype(dtype)
    keys = generator.normal(size=(g.tile, g.head_dim)).astype(dtype)
    scores = queries @ keys.T
    for width in range(g.width_step, g.tile, g.width_step):
        weights = np.exp(scores)
        weights[:, width:] = 0
        if (queries @ keys[:width].T != scores[:, :width]).any():
            return False
        if (weights[:, :width] @ keys[:width] != weights @ keys).any():
            return False
        if (weights[:, :width].sum(-1) != weights.sum(-1)).any():
            return False
    return True


def rows_are_alike(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Whether a row of a decode's products comes out the same in each of the product's rows."""
    g, generator = geometry, np.random.default_rng(0)
    queries = generator.normal(size=(g.num_rows, g.head_dim)).astype(dtype)
    keys = generator.normal(size=(g.tile, g.head_dim)).astype(dtype)
    scores = queries @ keys.T
    weights = np.exp(scores)
    weighted = weights @ keys
    for by in range(1, g.num_rows):
        if (np.roll(queries, by, 0) @ keys.T != np.roll(scores, by, 0)).any():
            return False
        if (np.roll(weights, by, 0) @ keys != np.roll(weighted, by, 0)).any():
            return False
    return True
