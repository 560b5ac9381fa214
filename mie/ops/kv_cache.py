"""Write, gather and copy the blocks of one layer's paged KV cache.

A cache is one array [N, B, Hkv, Dh] for the keys and one for the values, or a `QuantizedCache` of
that shape. A token's slot is ``block_id * B + offset``. It indexes the cache viewed as [N * B, Hkv,
Dh].
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints

INT4 = np.dtype(ml_dtypes.int4)
QUANTIZED = {"int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn), "int4": INT4}
"""The element dtypes of a quantised cache, by ``kv_cache_dtype``."""

HALVES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
"""The element dtypes of a cache of 16-bit floats without scales."""

GROUP = 32
"""Channels of a head that share a scale and an offset in int4."""

Cache: TypeAlias = Any
"""An array of floats, a `QuantizedCache` or an `Int4Cache` of `ops.weights`."""


def head_bytes(dtype: np.dtype[Any], size: int) -> int:
    """Return the bytes of ``size`` numbers of a head, with their scales and offsets."""
    if dtype == INT4:
        return size // 2 + 4 * ceil_div(size, GROUP)
    return size * dtype.itemsize + (4 if dtype in QUANTIZED.values() else 0)


def write_kv(
    keys: Floats, values: Floats, k_cache: Cache, v_cache: Cache, slot_mapping: Ints
) -> None:
    """Store keys and values [T, Hkv, Dh] in the caches [N, B, Hkv, Dh] at slot_mapping [T].

    The caches must be contiguous over N and B, so that slots are a view of them.
    """
    for cache, vectors in ((k_cache, keys), (v_cache, values)):
        if isinstance(cache, np.ndarray):
            slots_of(cache)[slot_mapping] = vectors
        else:
            cache.write(vectors, slot_mapping)


def slots_of(plane: NDArray[Any]) -> NDArray[Any]:
    """Return a view [N * B, ...] of a plane [N, B, ...]."""
    return plane.reshape(-1, *plane.shape[2:])


def take_blocks(cache: Cache, block_ids: Ints, dtype: DTypeLike) -> Floats:
    """Return the blocks named by block_ids [...] from a cache [N, B, Hkv, Dh].

    The result is [..., B, Hkv, Dh], computed in ``dtype`` if the cache is quantised.
    """
    blocks: Floats
    if isinstance(cache, np.ndarray):
        blocks = np.take(cache, block_ids, axis=0)
    else:
        blocks = cache.take(block_ids, dtype)
    return blocks


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


def move_blocks(
    source: Cache, target: Cache, src: Sequence[int] | Ints, dst: Sequence[int] | Ints
) -> None:
    """Copy whole blocks src [C] of ``source`` onto dst [C] of ``target``, in every plane.

    Both are [..., N, B, Hkv, Dh] of the same kind, and N may differ. They may be one cache, because
    all sources are read before any destination is written. The planes include elements and scales.
    """
    src, dst = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    if isinstance(source, np.ndarray):
        target[..., dst, :, :, :] = source[..., src, :, :, :]
    else:
        source.move(target, src, dst)
