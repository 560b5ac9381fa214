"""Allocate the memory of weights and of a step in huge pages.

Small pages are scattered over physical memory and can map to the same sets of a core's L2 cache.
Steps of 64 rows then take 5 to 15 % longer, in one process and not in the next. The data in a huge
page is spread over all sets.

Arrays begin at a cache line. NumPy's own begin 16 bytes after one, so every 64-byte load from them
touches two lines. A product of one row then takes 15 % longer.
"""

from __future__ import annotations

import math
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.arithmetic import ceil_div

HUGE_PAGE = 2 << 20
"""Bytes of a huge page on x86-64, and on aarch64 with 4 KiB pages. Elsewhere only an alignment."""
CACHE_LINE = 64
"""Bytes of a cache line, and of the widest load."""
SMALL_BYTES = 1 << 16
"""Smaller arrays are left to NumPy. Huge pages would not make them faster."""
CHUNK_BYTES = 1 << 26
"""Bytes that small matrices are cut from. They take memory only where they are written."""


def huge_empty(num_bytes: int) -> NDArray[np.uint8]:
    """Return at least this many bytes, in huge pages if they are many and Linux has some.

    They begin at a cache line.
    """
    unit = CACHE_LINE if num_bytes < SMALL_BYTES else HUGE_PAGE
    size = ceil_div(num_bytes, unit) * unit
    memory = np.empty(size + unit, np.uint8)  # NumPy asks for huge pages from 4 MiB on
    start = -memory.ctypes.data % unit
    return memory[start : start + size]


def shared_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return zeros that this process shares with the children it forks, in small pages.

    They begin at a page, and take memory only where they are written.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, max(1, num_bytes))
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be allocated") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, math.prod(shape)).reshape(shape)


class WeightAllocator:
    """Allocates the arrays of a model's weights next to each other.

    Most matrices are no multiple of a huge page. Together they fill huge pages. The memory is freed
    with the last array in it.
    """

    def __init__(self) -> None:
        self._rests: list[NDArray[np.uint8]] = []

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Allocate like `numpy.empty`, at a cache line."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        size = ceil_div(num_bytes, CACHE_LINE) * CACHE_LINE
        fitting = (i for i, rest in enumerate(self._rests) if len(rest) >= size)
        i = next(fitting, len(self._rests))
        if i == len(self._rests):
            self._rests.append(huge_empty(CHUNK_BYTES if 2 * size < CHUNK_BYTES else size))
        own, self._rests[i] = self._rests[i][:num_bytes], self._rests[i][size:]
        return own.view(dtype).reshape(shape)


class Scratch:
    """Named working memory of one thread, which grows on demand."""

    def __init__(self, dtype: DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._arrays: dict[str, NDArray[Any]] = {}
        self.held: object = None
        """What the owner last read into it and may use again."""

    def take(self, name: str, *shape: int) -> NDArray[Any]:
        """Return an uninitialised array of that shape. It overwrites the last one of that name."""
        size = math.prod(shape)
        if name not in self._arrays or self._arrays[name].size < size:
            self._arrays[name] = huge_empty(size * self.dtype.itemsize).view(self.dtype)
        return self._arrays[name][:size].reshape(shape)


class CachingAllocator:
    """Allocates arrays from memory that is reused as soon as nothing refers to it.

    It keeps as much memory as was in use at once. Do not call it from two threads at a time.
    """

    def __init__(self) -> None:
        self._slabs: list[_Slab] = []  # the smallest first

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Allocate like `numpy.empty`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < SMALL_BYTES:
            return np.empty(shape, dtype)
        return self._free_slab(num_bytes).bytes[:num_bytes].view(dtype).reshape(shape)

    def release(self) -> None:
        """Free the memory that no array refers to."""
        self._slabs = [slab for slab in self._slabs if not slab.is_free]

    def _free_slab(self, num_bytes: int) -> _Slab:
        for slab in self._slabs:
            if len(slab.bytes) >= num_bytes and slab.is_free:
                return slab
        new = _Slab(num_bytes)
        # The new slab also serves where a smaller one did.
        kept = [slab for slab in self._slabs if len(slab.bytes) >= num_bytes or not slab.is_free]
        self._slabs = sorted([*kept, new], key=lambda slab: len(slab.bytes))
        return new


class _Slab:
    """A block of bytes that knows whether an array made from it is still referenced."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = huge_empty(num_bytes)
        self._owner = self.bytes.base  # every view of it refers to this, as do views of views
        self._num_idle = 0
        self._num_idle = self._num_references

    @property
    def is_free(self) -> bool:
        return self._num_references == self._num_idle

    @property
    def _num_references(self) -> int:
        return sys.getrefcount(self._owner)
