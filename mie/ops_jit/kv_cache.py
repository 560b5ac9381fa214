"""Lay out the paged KV cache so that a block of a head is a panel of the products.

A head's blocks are adjacent, so that a sequence with adjacent blocks is read as one stream, and in
huge pages. Both matter: one thread of an EPYC reads 36 GB/s like this, 12 from blocks anywhere, and
13 in order from small pages.

The keys and the values of a block's head are B x Dh elements each, with Dh padded to a multiple of
16. Keys are [B / 16, Dh, 16], so that 16 positions are the lanes of a vector. If B is not a
multiple of 16 they are [B, Dh], and attention gathers them into panels. Values are [B, Dh].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.arithmetic import ceil_div
from mie.ops.backend import KVCacheShape
from mie.ops.kv_cache import LARGEST
from mie.ops_jit.memory import zeros

LANES = 16


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


def move_blocks(source: JitCache, target: JitCache, src: Sequence[int], dst: Sequence[int]) -> None:
    """Copy whole blocks, in every plane. All are read before any is written."""
    for own, other in ((source.elements, target.elements), (source.scales, target.scales)):
        if own is not None and other is not None:
            other[:, :, :, np.asarray(dst, np.int64)] = own[:, :, :, np.asarray(src, np.int64)]
