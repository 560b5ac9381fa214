"""Lay out the KV cache of floats head by head, so that adjacent blocks form one matrix of a head.

Outside, a cache is an array [L, 2, N, B, Hkv, Dh], as everywhere. In memory it is [L, 2, Hkv, N, B,
Dh].
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Floats
from mie.ops.backend import KVCacheShape


def new_cache(shape: KVCacheShape, dtype: np.dtype[Any]) -> Floats:
    """Return a cache of zeros [L, 2, N, B, Hkv, Dh], a view of head-major memory."""
    s = shape
    dims = (s.num_layers, 2, s.num_kv_heads, s.num_blocks, s.block_size, s.head_dim)
    cache: Floats = _zeros(dims, dtype).transpose(0, 1, 3, 4, 2, 5)
    return cache


def _zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros in small pages, which take memory only where they are written.

    NumPy would ask for huge pages. The first token writes to every head of every layer, so it would
    take 2 MiB for each.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, max(1, num_bytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be allocated") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


def head_major(cache: Floats) -> Floats:
    """Return the same memory as a contiguous [L, 2, Hkv, N, B, Dh]."""
    memory: Floats = cache.transpose(0, 1, 4, 2, 3, 5)
    return memory
