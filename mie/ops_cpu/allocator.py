"""Memory for what a step computes, in huge pages and used again.

Small pages lie anywhere in physical memory, and so by chance in the same sets of a core's L2 cache:
steps of 64 rows then take 5 to 15 % longer, in one process and not in the next. What lies in a
huge page is spread over all sets.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

HUGE_PAGE = 2 << 20
"""Bytes, on x86-64 and on aarch64 with pages of 4 KiB; elsewhere it is but an alignment."""
SMALL_BYTES = 1 << 16
"""Arrays below are NumPy's own: they are as fast wherever they lie, and a huge page is large."""


def huge_empty(num_bytes: int) -> NDArray[np.uint8]:
    """At least so many bytes; in huge pages, if they are many and Linux has such to give."""
    if num_bytes < SMALL_BYTES:
        return np.empty(num_bytes, np.uint8)
    size = -(-num_bytes // HUGE_PAGE) * HUGE_PAGE
    room = np.empty(size + HUGE_PAGE, np.uint8)  # NumPy asks for huge pages from 4 MiB on
    start = -room.ctypes.data % HUGE_PAGE
    return room[start : start + size]


class CachingAllocator:
    """Makes arrays of memory that was used before, as soon as nothing refers to it any more.

    As much is kept as was in use at once. Not to be called by two threads at a time.
    """

    def __init__(self) -> None:
        self._slabs: list[_Slab] = []  # the smallest first

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """`numpy.empty`."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes < SMALL_BYTES:
            return np.empty(shape, dtype)
        return self._free_slab(num_bytes).bytes[:num_bytes].view(dtype).reshape(shape)

    def _free_slab(self, num_bytes: int) -> _Slab:
        for slab in self._slabs:
            if len(slab.bytes) >= num_bytes and slab.is_free:
                return slab
        new = _Slab(num_bytes)
        # It also serves where a smaller one did.
        kept = [slab for slab in self._slabs if len(slab.bytes) >= num_bytes or not slab.is_free]
        self._slabs = sorted([*kept, new], key=lambda slab: len(slab.bytes))
        return new


class _Slab:
    """Bytes, and whether an array made of them is still referred to."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = huge_empty(num_bytes)
        self._owner = self.bytes.base  # what every view of it refers to, and views of views
        self._num_idle = 0
        self._num_idle = self._num_references

    @property
    def is_free(self) -> bool:
        return self._num_references == self._num_idle

    @property
    def _num_references(self) -> int:
        return sys.getrefcount(self._owner)
