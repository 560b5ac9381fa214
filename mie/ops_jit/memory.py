"""Lay out matrices and caches as kernels read them.

A matrix is panels of 16 outputs, which the products read in order. A block of a head in the cache
is a panel, too. A head's blocks are adjacent, so that a sequence with adjacent blocks is read as
one stream, and in huge pages. Both matter: one thread of an EPYC reads 36 GB/s like this, 12 from
blocks anywhere, and 13 in order from small pages.

The keys and the values of a block's head are B x Dh elements each, with Dh padded to a multiple of
16. Keys are [B / 16, Dh, 16], so that 16 positions are the lanes of a vector. If B is not a
multiple of 16 they are [B, Dh], and attention gathers them into panels. Values are [B, Dh].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops.arrays import zeros as zeros
from mie.ops.backend import KVCacheShape
from mie.ops.kv_cache import LARGEST
from mie.ops_jit.layout import LANES, PANELS


def address(array: NDArray[Any]) -> int:
    """Return the address of an array's first element, in a third of the time of ``ctypes.data``."""
    first: int = array.__array_interface__["data"][0]
    return first


def padded_rows(num_rows: int) -> int:
    """Return how many rows the panels of a matrix hold, which are whole groups."""
    return ceil_div(num_rows, LANES * PANELS) * LANES * PANELS


class Panels:
    """A matrix [N, K] as panels [N / 16, K, 16] of one dtype, and its bias [N] in float32.

    N is padded with zeros to whole groups of four panels. An embedding table is kept like this too,
    so that the output head can share its memory.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        dtype: np.dtype[Any] | None,
        bias: NDArray[Any] | None = None,
    ) -> None:
        """Convert blocks of whole rows, one at a time.

        They become ``dtype``. None keeps 16 bits as they are, and all others become float32.
        """
        self.shape = shape
        self.bias: Floats | None = None if bias is None else bias.astype(np.float32)
        num_rows, num_columns = shape
        num_panels = padded_rows(num_rows) // LANES
        memory: NDArray[Any] | None = None
        row = 0
        for block in blocks:
            kept = dtype or (block.dtype if block.dtype.itemsize == 2 else np.dtype(np.float32))
            if memory is None:
                memory = zeros((num_panels, num_columns, LANES), kept, huge=True)
            elif kept != memory.dtype and memory.dtype != np.float32:  # parts of different dtypes
                narrow, memory = memory, zeros(memory.shape, np.float32, huge=True)
                memory[...] = narrow
            _put(memory, row, block)
            row += len(block)
        assert memory is not None, "a matrix has rows"
        self.memory = memory

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the elements."""
        return self.memory.dtype

    @property
    def num_groups(self) -> int:
        """The number of groups of four panels."""
        return len(self.memory) // PANELS


def _put(panels: NDArray[Any], row: int, block: NDArray[Any]) -> None:
    """Write rows [n, K] of the matrix, from number ``row`` on."""
    end = row + len(block)
    first, last = ceil_div(row, LANES), end // LANES
    if first < last:
        whole = block[first * LANES - row : last * LANES - row]
        panels[first:last] = whole.reshape(last - first, LANES, -1).swapaxes(1, 2)
    edges = [*range(row, min(first * LANES, end)), *range(max(last * LANES, row), end)]
    for each in dict.fromkeys(edges):
        panels[each // LANES, :, each % LANES] = block[each - row]


def padded(head_dim: int) -> int:
    """Return the number of elements that a head takes."""
    return ceil_div(head_dim, LANES) * LANES


@dataclass(frozen=True, eq=False)
class JitCache:
    """Keys and values, and the scales of a cache of one byte an element."""

    shape: KVCacheShape
    elements: NDArray[Any]  # [L, 2, Hkv, N, B * padded(Dh)]
    scales: NDArray[np.float32] | None  # [L, 2, Hkv, N, B]

    @classmethod
    def new(cls, shape: KVCacheShape, dtype: np.dtype[Any]) -> JitCache:
        """Return a cache of zeros."""
        dims = (shape.num_layers, 2, shape.num_kv_heads, shape.num_blocks)
        elements = zeros((*dims, shape.block_size * padded(shape.head_dim)), dtype, huge=True)
        has_scales = dtype in LARGEST
        scales = zeros((*dims, shape.block_size), np.float32) if has_scales else None
        return cls(shape, elements, scales)

    def planes(self, layer: int) -> tuple[NDArray[Any] | None, ...]:
        """Return the keys and the values of a layer, and the scales of each, if there are any."""
        scales = (None, None) if self.scales is None else self.scales[layer]
        return (*self.elements[layer], *scales)


def move_blocks(source: JitCache, target: JitCache, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy whole blocks, in every plane. All are read before any is written."""
    for own, other in ((source.elements, target.elements), (source.scales, target.scales)):
        if own is not None and other is not None:
            other[:, :, :, np.asarray(dst, np.int64)] = own[:, :, :, np.asarray(src, np.int64)]
