"""Take KV caches in memory that helper processes share.

The float cache is laid out head-major, so that a head's keys in adjacent blocks form one matrix.
Outside, a cache is an array [L, 2, N, B, Hkv, Dh], as everywhere. In memory it is [L, 2, Hkv, N, B,
Dh].
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mie.ops.arrays import Floats
from mie.ops.backend import KVCacheShape
from mie.ops.kv_cache import QuantizedCache
from mie.ops_cpu.allocator import shared_zeros


def new_cache(shape: KVCacheShape, dtype: np.dtype[Any]) -> Floats:
    """Return a cache of zeros [L, 2, N, B, Hkv, Dh], a view of head-major memory."""
    s = shape
    dims = (s.num_layers, 2, s.num_kv_heads, s.num_blocks, s.block_size, s.head_dim)
    # NumPy would ask for huge pages. The first token writes to every head of every layer, so it
    # would take (and clear) 2 MiB for each.
    cache: Floats = shared_zeros(dims, dtype).transpose(0, 1, 3, 4, 2, 5)
    return cache


def new_quantized_cache(shape: KVCacheShape, dtype: np.dtype[Any]) -> QuantizedCache:
    """Return a cache of zeros [L, 2, N, B, Hkv, Dh]."""
    s = shape
    dims = (s.num_layers, 2, s.num_blocks, s.block_size, s.num_kv_heads, s.head_dim)
    return QuantizedCache(shared_zeros(dims, dtype), shared_zeros(dims[:-1], np.float32))


def head_major(cache: Floats) -> Floats:
    """Return the same memory as a contiguous [L, 2, Hkv, N, B, Dh]."""
    memory: Floats = cache.transpose(0, 1, 4, 2, 3, 5)
    return memory
