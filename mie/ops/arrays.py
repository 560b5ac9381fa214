"""Define the array types of the operators' signatures, and allocate large arrays."""

import math
import mmap
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.errors import ConfigError

Floats: TypeAlias = NDArray[np.floating[Any]]
Ints: TypeAlias = NDArray[np.integer[Any]]
Bools: TypeAlias = NDArray[np.bool_]

HUGE_PAGE = 2 << 20


def zeros(shape: tuple[int, ...], dtype: DTypeLike, *, huge: bool = False) -> NDArray[Any]:
    """Return private zeros at a page's begin. They take memory where they are written.

    ``huge`` requests huge pages. They suit memory that is written whole.

    Raises:
        MemoryError: the system refuses.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape)
    num_bytes = max(1, size * dtype.itemsize)
    is_huge = huge and num_bytes >= HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE")
    try:
        # Huge pages begin at multiples of their size. A mapping need not.
        extra = HUGE_PAGE if is_huge else 0
        memory = mmap.mmap(-1, num_bytes + extra, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise MemoryError(f"{num_bytes} bytes cannot be allocated") from error
    start = 0
    if is_huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
        start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE
    elif hasattr(mmap, "MADV_NOHUGEPAGE"):
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, size, start).reshape(shape)


def check_dtype(dtype: str, dtypes: Sequence[str], backend: str) -> None:
    """Raise `ConfigError` if a backend does not compute in ``dtype``, but only in ``dtypes``."""
    if dtype not in dtypes:
        *others, last = dtypes
        raise ConfigError(
            f"dtype {dtype!r} is not supported by the {backend} backend; "
            f"choose {', '.join(others)} or {last}"
        )
