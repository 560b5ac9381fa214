"""Put a page without access before and after every array of the compiled backend.

Import this before the modules of `mie.ops_jit`. The first argument of the command line is the
layout: arrays "start" at a page, right after a forbidden one, or "end" at a page's end.
"""

import ctypes
import math
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.ops_jit import memory

LAYOUT = sys.argv[1]
_libc = ctypes.CDLL(None, use_errno=True)


def guarded_zeros(shape: tuple[int, ...], dtype: DTypeLike, *, huge: bool = False) -> NDArray[Any]:
    """Replace `memory.zeros`. An array ends or begins at a page without access."""
    del huge
    kind, page = np.dtype(dtype), mmap.PAGESIZE
    size = math.prod(shape)
    room = -(-size * kind.itemsize // page) * page
    pages = mmap.mmap(-1, room + 2 * page, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(pages, np.uint8).ctypes.data
    for at in (address, address + page + room):
        if _libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = page if LAYOUT == "start" else page + room - size * kind.itemsize
    return np.frombuffer(pages, kind, size, start).reshape(shape)


def guarded(array: NDArray[Any]) -> NDArray[Any]:
    """Return a guarded copy."""
    copy = guarded_zeros(array.shape, array.dtype)
    copy[...] = array
    return copy


class GuardedNumpy:
    """NumPy for a module whose own arrays kernels address."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def zeros(self, shape: Any, dtype: DTypeLike) -> NDArray[Any]:
        return guarded(np.zeros(shape, dtype))

    def array(self, *arguments: Any) -> NDArray[Any]:
        return guarded(np.array(*arguments))

    def ascontiguousarray(self, array: Any, dtype: DTypeLike) -> NDArray[Any]:
        return guarded(np.ascontiguousarray(array, dtype))


memory.zeros = guarded_zeros
memory.CHUNK = 0  # each matrix has pages of its own
