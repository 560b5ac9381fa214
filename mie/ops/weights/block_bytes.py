"""Turn a block of a KV cache into bytes and back."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.kv_cache import Cache


def planes_of(cache: Cache, block_id: int) -> list[NDArray[Any]]:
    """Return views of a block of a cache [..., N, B, Hkv, Dh], quantised or not."""
    if isinstance(cache, np.ndarray):
        return [cache[..., block_id, :, :, :]]
    planes: list[NDArray[Any]] = cache.planes_of(block_id)
    return planes


def to_bytes(planes: Iterable[NDArray[Any]]) -> bytes:
    """Return the bytes of the planes of a block, one plane after another."""
    return b"".join([plane.tobytes() for plane in planes])


def set_bytes(planes: Iterable[NDArray[Any]], data: bytes) -> None:
    """Write the result of `to_bytes` to planes of the same shapes and dtypes."""
    at = 0
    for plane in planes:
        plane[...] = np.frombuffer(data, plane.dtype, plane.size, at).reshape(plane.shape)
        at += plane.nbytes
