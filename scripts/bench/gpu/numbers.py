"""Random numbers on a device, and how far results are off."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.backend import Array

ERRORS = {"float16": 1e-3, "bfloat16": 6e-3}
"""Relative norm errors that are allowed; tests/kernels/test_kernels.py has the same."""


def random_words(xp: Any, num_bytes: int) -> Array:
    """Random bits: zeros can be faster than data."""
    chunk = xp.asarray(
        np.random.default_rng(0).integers(0, 2**32, min(num_bytes // 4, 1 << 22), np.uint32)
    )
    words = xp.empty(num_bytes // 4, np.uint32)
    for start in range(0, words.size, chunk.size):
        words[start : start + chunk.size] = chunk[: words.size - start]
    return words


def fill_normal(xp: Any, out: Array, seed: int) -> Array:
    """Standard normal numbers, drawn in pieces so that their float64 form needs little room."""
    xp.random.seed(seed)
    flat = out.reshape(-1)
    for start in range(0, flat.size, 1 << 24):
        part = flat[start : start + (1 << 24)]
        part[...] = rounded(xp.random.standard_normal(part.size), out.dtype)
    return out


def random_normal(xp: Any, shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> Array:
    """A new array of them."""
    return fill_normal(xp, xp.empty(shape, dtype), seed)


def fill_quantised(xp: Any, elements: Array, scales: Array, seed: int) -> None:
    """An int8 cache of numbers about as large as standard normal ones."""
    xp.random.seed(seed)
    flat = elements.reshape(-1)
    for start in range(0, flat.size, 1 << 24):
        part = flat[start : start + (1 << 24)]
        part[...] = xp.random.randint(-127, 128, part.size).astype(np.int8)
    scales[...] = xp.random.uniform(1 / 127, 3 / 127, scales.shape).astype(np.float32)


def rounded(wide: Array, dtype: np.dtype[Any]) -> Array:
    """The numbers in the dtype; bfloat16 by its bits, since few of CuPy's kernels know it."""
    if dtype.name != "bfloat16":
        return wide.astype(dtype)
    bits = wide.astype(np.float32).view(np.uint32) + np.uint32(0x8000)
    return (bits >> np.uint32(16)).astype(np.uint16).view(dtype)


def relative_error(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    """|got - wanted| / |wanted|; infinite where something is no number."""
    difference = got.astype(np.float64) - wanted
    error = float(np.linalg.norm(difference) / np.linalg.norm(wanted))
    return error if math.isfinite(error) else math.inf
