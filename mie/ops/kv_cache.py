"""Write, gather and copy the blocks of one layer's paged KV cache.

A cache is one array [N, B, Hkv, Dh] for the keys and one for the values, or a `QuantizedCache` of
that shape. A token's slot is ``block_id * B + offset``, which indexes the cache viewed as [N * B,
Hkv, Dh].
"""

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints

QUANTIZED = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
"""The element dtypes of a quantised cache, by ``kv_cache_dtype``."""

LARGEST = {QUANTIZED["int8"]: 127.0, QUANTIZED["fp8"]: 448.0}
"""The element that the largest magnitude of a vector maps to."""

HALVES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
"""The element dtypes of a cache of 16-bit floats, which has no scales."""

SCALE_BYTES = 4
"""Bytes of a scale, which is a float32."""

SMALLEST_SCALE = 2.0**-100
"""Vectors with a smaller scale are stored as zero. It is well above where a GPU flushes to zero."""


@dataclass(frozen=True, eq=False)
class QuantizedCache:
    """Elements of one byte with a scale for each head of each token. x is element * scale.

    Or elements of 16 bits, which have no scales: x is element. The planes before N are indexed like
    those of an array: ``cache[layer, 0]``.
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

    def __getitem__(self, planes: Any) -> "QuantizedCache":
        scales = None if self.scales is None else self.scales[planes]
        return QuantizedCache(self.elements[planes], scales)


Cache: TypeAlias = Floats | QuantizedCache


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
    with np.errstate(over="ignore"):  # float64 overflows to infinity, which becomes NaN
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


def write_kv(
    keys: Floats, values: Floats, k_cache: Cache, v_cache: Cache, slot_mapping: Ints
) -> None:
    """Store keys and values [T, Hkv, Dh] in the caches [N, B, Hkv, Dh] at slot_mapping [T].

    The caches must be contiguous over N and B, so that slots are a view of them.
    """
    for cache, vectors in ((k_cache, keys), (v_cache, values)):
        if isinstance(cache, QuantizedCache):
            quantized = quantize(vectors, cache.elements.dtype)
            _slots(cache.elements)[slot_mapping] = quantized.elements
            if cache.scales is not None:
                _slots(cache.scales)[slot_mapping] = quantized.scales
        else:
            _slots(cache)[slot_mapping] = vectors


def _slots(plane: NDArray[Any]) -> NDArray[Any]:
    """Return a view [N * B, ...] of a plane [N, B, ...]."""
    return plane.reshape(-1, *plane.shape[2:])


def take_blocks(cache: Cache, block_ids: Ints, dtype: DTypeLike) -> Floats:
    """Return the blocks named by block_ids [...] from a cache [N, B, Hkv, Dh].

    The result is [..., B, Hkv, Dh], computed in ``dtype`` if the cache is quantised.
    """
    if isinstance(cache, QuantizedCache):
        elements = np.take(cache.elements, block_ids, axis=0)
        scales = None if cache.scales is None else np.take(cache.scales, block_ids, axis=0)
        return dequantize(QuantizedCache(elements, scales), dtype)
    return np.take(cache, block_ids, axis=0)


def gather_kv(
    cache: Cache, block_ids: Ints, start: int, stop: int, dtype: DTypeLike = np.float32
) -> Floats:
    """Gather the tokens start … stop - 1 of a sequence into a new array [stop - start, Hkv, Dh].

    cache [N, B, Hkv, Dh]; block_ids [M] is the sequence's block table, read only where needed;
    ``dtype`` as in `take_blocks`.
    """
    block_size = cache.shape[1]
    first = start // block_size
    blocks = take_blocks(cache, block_ids[first : ceil_div(stop, block_size)], dtype)
    offset = first * block_size
    return blocks.reshape(-1, *cache.shape[2:])[start - offset : stop - offset]


def move_blocks(source: Cache, target: Cache, src: Ints, dst: Ints) -> None:
    """Copy whole blocks src [C] of ``source`` onto dst [C] of ``target``, in every plane.

    Both are [..., N, B, Hkv, Dh] of the same kind, and N may differ. They may be one cache, because
    all sources are read before any destination is written. The planes include elements and scales.
    """
    if isinstance(source, QuantizedCache):
        target = cast(QuantizedCache, target)
        move_blocks(source.elements, target.elements, src, dst)
        if source.scales is not None and target.scales is not None:
            target.scales[..., dst, :, :] = source.scales[..., src, :, :]
    else:
        cast(Floats, target)[..., dst, :, :, :] = source[..., src, :, :, :]
