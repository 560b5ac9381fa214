"""The KV cache on the device and its copy on the host, and how blocks move.

One array [N, 2, Hkv, B, Dh] a layer: keys and values of a block are neighbours, and the B rows of
one (block, KV head) are contiguous. A block is then one run of memory, and a kernel that reads a
block for one head reads whole bursts.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.backend import Array, KVCacheShape
from mie.ops_gpu.arrays import ceil_div, kernel_type, to_host
from mie.ops_gpu.launcher import Launcher

STAGED_BLOCKS = 256
"""Blocks of a layer that pass through the staging buffer at once: bounds its memory."""

COPY_THREADS, COPY_BYTES = 128, 16
"""Threads of a block of the copy kernels, and the bytes that each copies at a time."""


@dataclass(frozen=True, kw_only=True, eq=False)
class KVCache:
    """A KV cache on the device."""

    layers: list[Array]  # L arrays [N, 2, Hkv, B, Dh]


@dataclass(frozen=True, kw_only=True, eq=False)
class HostCache:
    """Blocks of a KV cache that were swapped out."""

    layers: list[NDArray[Any]]  # L arrays [N, 2, Hkv, B, Dh]


def layer_dims(shape: KVCacheShape) -> tuple[int, ...]:
    """The dimensions of one layer."""
    return (shape.num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)


def copy_blocks(launcher: Launcher, cache: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
    """`ops.kv_cache.copy_blocks`: no destination may be named twice."""
    if set(src) & set(dst):  # a kernel's copies run in no order: read all sources first
        staged = [_gather(launcher, layer, src) for layer in cache.layers]
        for layer, blocks in zip(cache.layers, staged, strict=True):
            _scatter(launcher, blocks, layer, dst)
        return
    src_ids, dst_ids = _ids(launcher, src), _ids(launcher, dst)
    for layer in cache.layers:
        kernel = launcher.kernel("copy_blocks.cu", f"copy_blocks<{kernel_type(layer)}>")
        kernel(*_grid(layer, len(src)), (layer, src_ids, dst_ids, np.int32(_elements(layer))))


def export_blocks(
    launcher: Launcher, cache: KVCache, host: HostCache, src: Sequence[int], dst: Sequence[int]
) -> None:
    """Copy blocks whole from the device to the host."""
    for part in _parts(len(src)):
        for layer, host_layer in zip(cache.layers, host.layers, strict=True):
            host_layer[list(dst[part])] = to_host(_gather(launcher, layer, src[part]))


def import_blocks(
    launcher: Launcher, host: HostCache, cache: KVCache, src: Sequence[int], dst: Sequence[int]
) -> None:
    """Copy blocks whole from the host to the device."""
    for part in _parts(len(src)):
        for layer, host_layer in zip(cache.layers, host.layers, strict=True):
            staged = launcher.xp.asarray(host_layer[list(src[part])])
            _scatter(launcher, staged, layer, dst[part])


def _gather(launcher: Launcher, layer: Array, ids: Sequence[int]) -> Array:
    """The blocks ``ids`` [C] as a new array [C, 2, Hkv, B, Dh] on the device."""
    staged = launcher.xp.empty((len(ids), *layer.shape[1:]), layer.dtype)
    kernel = launcher.kernel("copy_blocks.cu", f"gather_blocks<{kernel_type(layer)}>")
    kernel(
        *_grid(layer, len(ids)), (layer, _ids(launcher, ids), staged, np.int32(_elements(layer)))
    )
    return staged


def _scatter(launcher: Launcher, staged: Array, layer: Array, ids: Sequence[int]) -> None:
    """Write the blocks of `_gather` to the blocks ``ids``."""
    kernel = launcher.kernel("copy_blocks.cu", f"scatter_blocks<{kernel_type(layer)}>")
    kernel(
        *_grid(layer, len(ids)), (staged, _ids(launcher, ids), layer, np.int32(_elements(layer)))
    )


def _parts(count: int) -> Iterator[slice]:
    for start in range(0, count, STAGED_BLOCKS):
        yield slice(start, start + STAGED_BLOCKS)


def _ids(launcher: Launcher, ids: Sequence[int]) -> Array:
    return launcher.xp.asarray(np.array(ids, np.int32))


def _elements(layer: Array) -> int:
    """Elements of a block."""
    return math.prod(layer.shape[1:])


def _grid(layer: Array, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Grid and block of the copy kernels: several CUDA blocks share a large cache block."""
    share = ceil_div(_elements(layer) * layer.dtype.itemsize, 8 * COPY_THREADS * COPY_BYTES)
    return (num_blocks, min(share, 64)), (COPY_THREADS,)
