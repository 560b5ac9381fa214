"""Lay out the float KV cache head-major, so that a head's keys in adjacent blocks form one matrix.

Outside, a cache is an array [L, 2, N, B, Hkv, Dh], as everywhere. In memory it is [L, 2, Hkv, N, B,
Dh].
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np

from mie.ops.arrays import Floats
from mie.ops.backend import KVCacheShape


def new_cache(shape: KVCacheShape, dtype: np.dtype[Any]) -> Floats:
    """Return a cache of zeros [L, 2, N, B, Hkv, Dh], a view of head-major memory."""
    s = shape
    dims = (s.num_layers, 2, s.num_kv_heads, s.num_blocks, s.block_size, s.head_dim)
    cache: Floats = _pages(math.prod(dims), dtype).reshape(dims).transpose(0, 1, 3, 4, 2, 5)
    return cache


def _pages(size: int, dtype: np.dtype[Any]) -> Floats:
    """Return ``size`` zeros that take memory only where they are written, in small pages.

    NumPy would ask for huge pages. The first token writes to every head of every layer, so it would
    take (and clear) 2 MiB for each.
    """
    try:
        memory = mmap.mmap(-1, max(1, size * dtype.itemsize))
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{size * dtype.itemsize} bytes cannot be allocated") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    zeros: Floats = np.frombuffer(memory, dtype, size)
    return zeros


def head_major(cache: Floats) -> Floats:
    """Return the same memory as a contiguous [L, 2, Hkv, N, B, Dh]."""
    memory: Floats = cache.transpose(0, 1, 4, 2, 3, 5)
    return memory
