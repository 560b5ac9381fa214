"""Share code between decodes and prefills: tiles of keys, their softmax, and sums over tiles.

All products have one shape in any batch, and tiles are summed in order. So a query's result is the
same bit for bit however it is computed. A tile that it does not see contributes exact zeros.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import DTypeLike

from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import huge_empty
from mie.ops_cpu.attention.plan import Geometry, Stretch


class Scratch:
    """Named scratch memory of one thread, which grows on demand."""

    def __init__(self, dtype: DTypeLike) -> None:
        self._dtype = dtype
        self._arrays: dict[str, Floats] = {}

    def take(self, name: str, *shape: int) -> Floats:
        """Return an uninitialised array of that shape. It overwrites the last one of that name."""
        size = math.prod(shape)
        array = self._arrays.get(name)
        if array is None or array.size < size:
            room = huge_empty(size * np.dtype(self._dtype).itemsize)
            array = self._arrays[name] = room.view(self._dtype)
        return array[:size].reshape(shape)


class Reader:
    """Reads the keys and values of a stretch, layer by layer."""

    def __init__(self, memory: Floats, stretch: Stretch, geometry: Geometry, room: Floats) -> None:
        """Prepare to read memory [L, 2, Hkv, N, B, Dh] in place, or gathered into ``room``."""
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
        """Return the layer's keys (0) or values (1) as [Hkv, tiles, width, Dh].

        If it ``cleans``, slots without a token are set to zero.
        """
        source: Floats = self._source[layer, which]
        if self._is_in_place:
            return source
        # With "clip" NumPy writes directly to the array, without a copy.
        source.take(self._block_ids, 1, self._gathered, "clip")
        if cleans and self._beyond is not None:
            self._tiles[self._beyond] = 0  # these slots may hold NaN, and 0 * NaN is NaN
        return self._tiles


def _beyond(stretch: Stretch) -> tuple[Any, ...] | None:
    """Return the index, in [Hkv, tiles, width, Dh], of the slots without a token.

    It is one index for all tiles, because many small fills take longer than the gathering.
    """
    if not stretch.ends:
        return None
    if len(stretch.ends) == 1:
        tile, filled = stretch.ends[0]
        return slice(None), tile, slice(filled, None)
    tiles, filled = np.array(stretch.ends).T
    which, positions = np.nonzero(np.arange(stretch.width) >= filled[:, None])
    return slice(None), tiles[which], positions


def softmax_weights(scores: Floats, scratch: Scratch) -> tuple[Floats, Floats]:
    """Turn scores [X, tiles, ..., R, tile] into weights in place.

    A weight is exp(score - largest), which is 0 for a score of -inf. Return (largest score, sum of
    weights), both [X, ..., R].
    """
    lanes = over_tiles(np.maximum, scores, "lanes", scratch)
    # This is twice as fast as `np.maximum.reduce` over short rows.
    starts = np.arange(0, lanes.size, lanes.shape[-1])
    largest: Floats = np.maximum.reduceat(lanes.reshape(-1), starts).reshape(lanes.shape[:-1])
    # A query that sees no key here gets weights of 0, so it adds 0 to the sums of other groups.
    np.maximum(largest, np.finfo(scores.dtype).min / 2, out=largest)
    scores -= largest[:, None, ..., None]
    np.exp(scores, out=scores)
    total: Floats = np.add.reduce(over_tiles(np.add, scores, "lanes", scratch), axis=-1)
    return largest, total


def over_tiles(operation: np.ufunc, x: Floats, name: str, scratch: Scratch) -> Floats:
    """Reduce x [X, tiles, ..., R, E] over its tiles, in order, to [X, ..., R, E]."""
    if x.shape[1] == 1:
        return x[:, 0]
    out = scratch.take(name, len(x), *x.shape[2:])
    operation.reduce(x, axis=1, out=out)
    return out


def combine(largest: Floats, total: Floats, attended: Floats) -> Floats:
    """Combine the groups of queries into their attention [..., Dh].

    A group has its largest scores and sums of weights [groups, ...], and its sums of weighted
    values [groups, ..., Dh].
    """
    if len(total) == 1:
        result: Floats = attended[0] / total[0, ..., None]
        return result
    weights = np.exp(largest - largest.max(axis=0))
    result = np.add.reduce(attended * weights[..., None], axis=0)
    result /= np.add.reduce(total * weights, axis=0)[..., None]
    return result


def equals_in_part(geometry: Geometry, dtype: DTypeLike) -> bool:
    """Whether a decode with only the first positions of a tile gives the same bits as a full tile.

    The weights of the other positions are 0.
    """
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
    """Whether a row of a decode's products is the same in each of the product's rows."""
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
