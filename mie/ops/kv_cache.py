"""The paged KV cache of one layer: writing, gathering and copying its blocks.

A cache is one array [N, B, Hkv, Dh] for the keys and one for the values, or a `QuantizedCache` of
that shape. The slot of a token is ``block_id * B + offset``: the cache seen as [N * B, Hkv, Dh] is
indexed by it.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.ops.arrays import Floats, Ints

QUANTIZED = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn)}
"""What ``kv_cache_dtype`` calls the elements of a quantised cache."""

LARGEST = {QUANTIZED["int8"]: 127.0, QUANTIZED["fp8"]: 448.0}
"""The element that the largest number of a vector becomes."""

SCALE_BYTES = 4
"""Of a scale, a float32."""

SMALLEST_SCALE = 2.0**-100
"""A vector whose scale would be below counts as zero: far from where a GPU flushes to zero."""


@dataclass(frozen=True, eq=False)
class QuantizedCache:
    """Elements of one byte, and a scale for each head of each token: x is element * scale.

    The planes before N go by indices, as an array's do: ``cache[layer, 0]``.
    """

    elements: NDArray[Any]  # [..., N, B, Hkv, Dh], int8 or float8_e4m3fn
    scales: NDArray[np.float32]  # [..., N, B, Hkv]

    @classmethod
    def zeros(cls, shape: tuple[int, ...], dtype: np.dtype[Any]) -> "QuantizedCache":
        """A cache of zeros; ``shape`` [..., N, B, Hkv, Dh]."""
        return cls(np.zeros(shape, dtype), np.zeros(shape[:-1], np.float32))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the numbers that it stands for."""
        return self.elements.shape

    def __getitem__(self, planes: Any) -> "QuantizedCache":
        return QuantizedCache(self.elements[planes], self.scales[planes])


Cache: TypeAlias = Floats | QuantizedCache


def quantize(x: Floats, dtype: np.dtype[Any]) -> QuantizedCache:
    """The vectors of x [..., Dh], each as elements of ``dtype`` and one scale.

    scale = max|x| / 127 (448 for float8_e4m3fn), rounded to float32; element = x / scale, rounded
    to nearest, ties to even. Below `SMALLEST_SCALE` both are 0. With an infinity or a NaN in a
    vector its scale is NaN and its elements are 0: all of it reads as NaN.
    """
    with np.errstate(over="ignore"):  # of a float64: to infinity, which becomes NaN
        scales = (np.abs(x).max(axis=-1) / LARGEST[dtype]).astype(np.float32)
    scales = np.where(np.isfinite(scales), scales, np.float32(np.nan))
    scales = np.where(scales < SMALLEST_SCALE, np.float32(0), scales)
    divisors = np.where(scales > 0, scales, np.float32(np.inf))[..., None]
    elements = np.where(np.isfinite(divisors), x, 0) / divisors
    if dtype == np.int8:
        np.rint(elements, out=elements)
    return QuantizedCache(elements.astype(dtype), scales)


def dequantize(cache: QuantizedCache, dtype: DTypeLike) -> Floats:
    """The numbers that the elements and scales stand for, computed in ``dtype``."""
    numbers = cache.elements.astype(dtype) * cache.scales.astype(dtype)[..., None]
    return cast(Floats, numbers)


def write_kv(
    keys: Floats,
    values: Floats,
    k_cache: Cache,
    v_cache: Cache,
    slot_mapping: Ints,
) -> None:
    """Store keys and values [T, Hkv, Dh] in the caches [N, B, Hkv, Dh] at slot_mapping [T].

    The caches must be contiguous over N and B, so that slots are a view of them.
    """
    for cache, vectors in ((k_cache, keys), (v_cache, values)):
        if isinstance(cache, QuantizedCache):
            quantized = quantize(vectors, cache.elements.dtype)
            _slots(cache.elements)[slot_mapping] = quantized.elements
            _slots(cache.scales)[slot_mapping] = quantized.scales
        else:
            _slots(cache)[slot_mapping] = vectors


def _slots(plane: NDArray[Any]) -> NDArray[Any]:
    """A view [N * B, ...] of a plane [N, B, ...]."""
    return plane.reshape(-1, *plane.shape[2:])


def take_blocks(
    cache: Cache, block_ids: Ints, dtype: DTypeLike, mode: Literal["raise", "clip"] = "raise"
) -> Floats:
    """The numbers [..., B, Hkv, Dh] of the blocks that block_ids [...] name in a cache
    [N, B, Hkv, Dh], computed in ``dtype`` if it is quantised. ``mode``: of ids that name none."""
    if isinstance(cache, QuantizedCache):
        planes = (cache.elements, cache.scales)
        taken = (np.take(plane, block_ids, axis=0, mode=mode) for plane in planes)
        return dequantize(QuantizedCache(*taken), dtype)
    return np.take(cache, block_ids, axis=0, mode=mode)


def gather_kv(
    cache: Cache, block_ids: Ints, start: int, stop: int, dtype: DTypeLike = np.float32
) -> Floats:
    """The tokens start … stop - 1 of a sequence, as an array [stop - start, Hkv, Dh] of its own.

    cache [N, B, Hkv, Dh]; block_ids [M] is the sequence's block table, read only where needed;
    ``dtype`` as in `take_blocks`.
    """
    block_size = cache.shape[1]
    first = start // block_size
    blocks = take_blocks(cache, block_ids[first : -(-stop // block_size)], dtype)
    offset = first * block_size
    return blocks.reshape(-1, *cache.shape[2:])[start - offset : stop - offset]


def copy_blocks(caches: Cache, src: Ints, dst: Ints) -> None:
    """Copy whole blocks src [C] onto dst [C] in every plane of ``caches`` [..., N, B, Hkv, Dh].

    All sources are read before any destination is written.
    """
    move_blocks(caches, caches, src, dst)


def move_blocks(source: Cache, target: Cache, src: Ints, dst: Ints) -> None:
    """Copy whole blocks src [C] of ``source`` onto dst [C] of ``target``, both [..., N, B, Hkv, Dh]
    with their own N and otherwise of one kind, in every plane: elements and scales."""
    if isinstance(source, QuantizedCache):
        target = cast(QuantizedCache, target)
        move_blocks(source.elements, target.elements, src, dst)
        target.scales[..., dst, :, :] = source.scales[..., src, :, :]
    else:
        cast(Floats, target)[..., dst, :, :, :] = source[..., src, :, :, :]
