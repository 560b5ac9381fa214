"""Keep the KV cache on the device and its copy on the host, and move blocks between them.

Each layer is one array [N, 2, Hkv, B, Dh]. Keys and values of a block are neighbours, and the B
rows of one (block, KV head) are contiguous. So a block is one run of memory, and a kernel that
reads a block for one head reads whole bursts. A quantised cache (`ops.kv_cache`) has its scales in
a second array for each layer, [N, 2, Hkv, B].
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Array, KVCacheShape
from mie.ops_gpu.arrays import kernel_type, to_host
from mie.ops_gpu.launcher import Launcher

STAGED_BLOCKS = 256
"""Number of blocks of a layer in the staging buffer at once, which bounds its memory."""

COPY_THREADS, COPY_BYTES = 128, 16
"""Threads of a block of the copy kernels, and the bytes that each copies at a time."""


ELEMENTS: dict[str, np.dtype[Any]] = {"int8": np.dtype(np.int8), "fp8": np.dtype(np.uint8)}
"""The dtypes that hold a quantised cache. CuPy has no 8-bit float, so the bits are stored."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KVCache:
    """A KV cache on the device, or space for its blocks on the host."""

    layers: Sequence[Array]  # L arrays [N, 2, Hkv, B, Dh]
    scales: Sequence[Array] = ()  # of a quantised cache L arrays [N, 2, Hkv, B], float32

    @property
    def is_quantized(self) -> bool:
        """Whether the elements have one byte and a scale."""
        return bool(self.scales)

    @property
    def planes(self) -> list[Array]:
        """All arrays, each [N, ...], that are copied with a block."""
        return [*self.layers, *self.scales]


def new_cache(
    shape: KVCacheShape, dtype: np.dtype[Any], zeros: Callable[[tuple[int, ...], Any], Array]
) -> KVCache:
    """Return a cache whose elements are of ``dtype``, in arrays that ``zeros`` allocates."""
    dims = (shape.num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    layers = [zeros(dims, dtype) for _ in range(shape.num_layers)]
    if dtype not in ELEMENTS.values():
        return KVCache(layers=layers)
    scales = [zeros(dims[:-1], np.dtype(np.float32)) for _ in range(shape.num_layers)]
    return KVCache(layers=layers, scales=scales)


def copy_blocks(launcher: Launcher, cache: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
    """Perform `ops.kv_cache.copy_blocks`. No destination may be named twice."""
    if set(src) & set(dst):  # a kernel's copies run in no order, so read all sources first
        staged = [_gather(launcher, plane, src) for plane in cache.planes]
        for plane, blocks in zip(cache.planes, staged, strict=True):
            _scatter(launcher, blocks, plane, dst)
        return
    src_ids, dst_ids = _ids(launcher, src), _ids(launcher, dst)
    for plane in cache.planes:
        kernel = launcher.kernel("copy_blocks.cu", f"copy_blocks<{kernel_type(plane)}>")
        kernel(*_grid(plane, len(src)), (plane, src_ids, dst_ids, np.int32(_elements(plane))))


def export_blocks(
    launcher: Launcher, cache: KVCache, host: KVCache, src: Sequence[int], dst: Sequence[int]
) -> None:
    """Copy whole blocks from the device to the host."""
    for part in _parts(len(src)):
        for plane, host_plane in zip(cache.planes, host.planes, strict=True):
            host_plane[list(dst[part])] = to_host(_gather(launcher, plane, src[part]))


def import_blocks(
    launcher: Launcher, host: KVCache, cache: KVCache, src: Sequence[int], dst: Sequence[int]
) -> None:
    """Copy whole blocks from the host to the device."""
    for part in _parts(len(src)):
        for plane, host_plane in zip(cache.planes, host.planes, strict=True):
            staged = launcher.xp.asarray(host_plane[list(src[part])])
            _scatter(launcher, staged, plane, dst[part])


def _gather(launcher: Launcher, plane: Array, ids: Sequence[int]) -> Array:
    """Gather the blocks ``ids`` [C] into a new array [C, 2, Hkv, B, Dh] on the device."""
    staged = launcher.xp.empty((len(ids), *plane.shape[1:]), plane.dtype)
    kernel = launcher.kernel("copy_blocks.cu", f"gather_blocks<{kernel_type(plane)}>")
    kernel(
        *_grid(plane, len(ids)), (plane, _ids(launcher, ids), staged, np.int32(_elements(plane)))
    )
    return staged


def _scatter(launcher: Launcher, staged: Array, plane: Array, ids: Sequence[int]) -> None:
    """Write the blocks of `_gather` to the blocks ``ids``."""
    kernel = launcher.kernel("copy_blocks.cu", f"scatter_blocks<{kernel_type(plane)}>")
    kernel(
        *_grid(plane, len(ids)), (staged, _ids(launcher, ids), plane, np.int32(_elements(plane)))
    )


def _parts(count: int) -> Iterator[slice]:
    for start in range(0, count, STAGED_BLOCKS):
        yield slice(start, start + STAGED_BLOCKS)


def _ids(launcher: Launcher, ids: Sequence[int]) -> Array:
    return launcher.xp.asarray(np.array(ids, np.int32))


def _elements(plane: Array) -> int:
    """Return the number of elements of a block."""
    return math.prod(plane.shape[1:])


def _grid(plane: Array, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return grid and block of the copy kernels. Several CUDA blocks share a large cache block."""
    share = ceil_div(_elements(plane) * plane.dtype.itemsize, 8 * COPY_THREADS * COPY_BYTES)
    return (num_blocks, min(share, 64)), (COPY_THREADS,)
