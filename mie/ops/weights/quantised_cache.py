"""Define a paged KV cache of small numbers, and the numbers that it represents."""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.ops.arrays import Floats, Ints
from mie.ops.kv_cache import INT4, QUANTIZED, slots_of
from mie.ops.weights.int4_cache import Int4Cache

LARGEST = {QUANTIZED["int8"]: 127.0, QUANTIZED["fp8"]: 448.0}
"""The element that the largest magnitude of a vector maps to."""

SMALLEST_SCALE = 2.0**-100
"""Vectors with a smaller scale are stored as zero. It is well above where a GPU flushes to zero."""


@dataclass(frozen=True, eq=False)
class QuantizedCache:
    """Elements of one byte with a scale for each head of each token. x is element * scale.

    Or elements of 16 bits without scales: x is element. The planes before N are indexed like an
    array's: ``cache[layer, 0]``.
    """

    elements: NDArray[Any]  # [..., N, B, Hkv, Dh], int8, float8_e4m3fn, bfloat16 or float16
    scales: NDArray[np.float32] | None  # [..., N, B, Hkv], or None for 16 bits

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: np.dtype[Any]) -> "QuantizedCache":
        """Return a cache of zeros of ``shape`` [..., N, B, Hkv, Dh]."""
        scales = np.zeros(shape[:-1], np.float32) if dtype in LARGEST else None
        return cls(np.zeros(shape, dtype), scales)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the numbers that it represents."""
        return self.elements.shape

    def write(self, vectors: Floats, slot_mapping: Ints) -> None:
        """Store vectors [T, Hkv, Dh] in the slots of a plane."""
        quantized = quantize(vectors, self.elements.dtype)
        slots_of(self.elements)[slot_mapping] = quantized.elements
        if self.scales is not None:
            slots_of(self.scales)[slot_mapping] = quantized.scales

    def take(self, block_ids: Ints, dtype: DTypeLike) -> Floats:
        """Return the numbers of blocks [..., B, Hkv, Dh] of a plane, computed in ``dtype``."""
        elements = np.take(self.elements, block_ids, axis=0)
        scales = None if self.scales is None else np.take(self.scales, block_ids, axis=0)
        return dequantize(QuantizedCache(elements, scales), dtype)

    def move(self, target: "QuantizedCache", src: Ints, dst: Ints) -> None:
        """Copy whole blocks to a cache of the same kind, in every plane."""
        target.elements[..., dst, :, :, :] = self.elements[..., src, :, :, :]
        if self.scales is not None and target.scales is not None:
            target.scales[..., dst, :, :] = self.scales[..., src, :, :]

    def planes_of(self, block_id: int) -> list[NDArray[Any]]:
        """Return views of the elements of a block, and of the scales if there are any."""
        scales = [] if self.scales is None else [self.scales[..., block_id, :, :]]
        return [self.elements[..., block_id, :, :, :], *scales]

    def __getitem__(self, planes: Any) -> "QuantizedCache":
        scales = None if self.scales is None else self.scales[planes]
        return QuantizedCache(self.elements[planes], scales)


def new_cache(shape: tuple[int, ...], dtype: np.dtype[Any]) -> QuantizedCache | Int4Cache:
    """Return a cache of zeros of ``shape`` [..., N, B, Hkv, Dh]."""
    return Int4Cache.zeros(shape) if dtype == INT4 else QuantizedCache.zeros(shape, dtype)


def quantize(x: Floats, dtype: np.dtype[Any]) -> QuantizedCache:
    """Quantise the vectors of x [..., Dh], each to elements of ``dtype`` and one scale.

    scale = max|x| / 127 (448 for float8_e4m3fn), rounded to float32. element = x / scale, rounded
    to nearest, ties to even. Below `SMALLEST_SCALE` both are 0. A vector with an infinity or a NaN
    gets scale NaN and elements 0, so all of it reads as NaN. Elements of 16 bits are x, rounded to
    nearest, ties to even, without a scale.
    """
    if dtype not in LARGEST:
        with np.errstate(over="ignore"):  # above 65504 float16 has infinity
            return QuantizedCache(x.astype(dtype), None)
    with np.errstate(over="ignore"):  # float64 overflows to infinity and becomes NaN
        scales = (np.abs(x).max(axis=-1) / LARGEST[dtype]).astype(np.float32)
    scales = np.where(np.isfinite(scales), scales, np.float32(np.nan))
    scales = np.where(scales < SMALLEST_SCALE, np.float32(0), scales)
    divisors = np.where(scales > 0, scales, np.float32(np.inf))[..., None]
    elements = np.where(np.isfinite(divisors), x, 0) / divisors
    if dtype == np.int8:
        np.rint(elements, out=elements)
    return QuantizedCache(elements.astype(dtype), scales)


def dequantize(cache: QuantizedCache, dtype: DTypeLike) -> Floats:
    """Return the numbers that the elements and scales represent, computed in ``dtype``."""
    numbers = cache.elements.astype(dtype)
    if cache.scales is not None:
        numbers *= cache.scales.astype(dtype)[..., None]
    return cast(Floats, numbers)
