"""Lay out the KV cache of floats head by head, so that adjacent blocks form one matrix of a head.

Outside, a cache is an array [L, 2, N, B, Hkv, Dh], as everywhere. In memory it is [L, 2, Hkv, N, B,
Dh].
"""

from typing import Any

import numpy as np

from mie.ops.arrays import Floats, zeros
from mie.ops.backend import KVCacheShape


def new_cache(shape: KVCacheShape, dtype: np.dtype[Any]) -> Floats:
    """Return a cache of zeros [L, 2, N, B, Hkv, Dh], a view of head-major memory.

    Its pages are small. NumPy would ask for huge ones. The first token writes to every head of
    every layer, so it would take 2 MiB for each.
    """
    s = shape
    dims = (s.num_layers, 2, s.num_kv_heads, s.num_blocks, s.block_size, s.head_dim)
    cache: Floats = zeros(dims, dtype).transpose(0, 1, 3, 4, 2, 5)
    return cache


def head_major(cache: Floats) -> Floats:
    """Return the same memory as a contiguous [L, 2, Hkv, N, B, Dh]."""
    memory: Floats = cache.transpose(0, 1, 4, 2, 3, 5)
    return memory
