"""Make random numbers on a device, and compute how far results are off."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.backend import Array
from mie.ops_gpu.kv_cache import ELEMENTS

ERRORS = {"float16": 1e-3, "bfloat16": 6e-3}
"""Relative norm errors that are allowed, as in tests/kernels/test_kernels.py."""


def random_words(xp: Any, num_bytes: int) -> Array:
    """Return random bits, because zeros can be faster than data."""
    chunk = xp.asarray(
        np.random.default_rng(0).integers(0, 2**32, min(num_bytes // 4, 1 << 22), np.uint32)
    )
    words = xp.empty(num_bytes // 4, np.uint32)
    for start in range(0, words.size, chunk.size):
        words[start : start + chunk.size] = chunk[: words.size - start]
    return words


def fill_normal(xp: Any, out: Array, seed: int) -> Array:
    """Fill an array with standard normal numbers, in pieces that keep their float64 form small."""
    xp.random.seed(seed)
    flat = out.reshape(-1)
    for start in range(0, flat.size, 1 << 24):
        part = flat[start : start + (1 << 24)]
        part[...] = rounded(xp.random.standard_normal(part.size), out.dtype)
    return out


def random_normal(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Array:
    """Return a new array of standard normal numbers."""
    return fill_normal(xp, xp.empty(shape, dtype), seed)


def fill_quantised(xp: Any, elements: Array, scales: Array, seed: int) -> None:
    """Fill a cache of int8 or int4 with numbers about as large as standard normal ones."""
    xp.random.seed(seed)
    is_int4 = elements.dtype == ELEMENTS["int4"]
    flat = elements.view(np.int8).reshape(-1)
    for start in range(0, flat.size, 1 << 24):
        part = flat[start : start + (1 << 24)]
        lowest = -128 if is_int4 else -127
        part[...] = xp.random.randint(lowest, 128, part.size).astype(np.int8)
    if is_int4:  # a scale and an offset
        scales.view(np.float16).reshape(-1, 2)[...] = xp.asarray([0.1, -0.75], np.float16)
    else:
        scales[...] = xp.random.uniform(1 / 127, 3 / 127, scales.shape).astype(np.float32)


def rounded(wide: Array, dtype: np.dtype[Any]) -> Array:
    """Round numbers to the dtype, bfloat16 through its bits because few CuPy kernels support it."""
    if dtype.name != "bfloat16":
        return wide.astype(dtype)
    bits = wide.astype(np.float32).view(np.uint32) + np.uint32(0x8000)
    return (bits >> np.uint32(16)).astype(np.uint16).view(dtype)


def relative_error(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    """Return |got - wanted| / |wanted|, or infinity if a value is NaN."""
    difference = got.astype(np.float64) - wanted
    error = float(np.linalg.norm(difference) / np.linalg.norm(wanted))
    return error if math.isfinite(error) else math.inf
