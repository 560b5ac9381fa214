"""Keep the KV cache on the device and swapped blocks on the host, and move blocks between them.

Each layer is one array [N, 2, Hkv, B, Dh]. Keys and values of a block are neighbours, and the B
rows of one (block, KV head) are contiguous. So a block is one run of memory, and a kernel that
reads a block for one head reads whole bursts. A quantised cache (`ops.kv_cache`) has its scales in
a second array for each layer, [N, 2, Hkv, B]. Codes of 4 bits are [N, 2, Hkv, B, Dh / 8] integers.
Their scales and offsets are [N, 2, Hkv, B, groups] pairs of float16, each in 32 bits.

On the host a block is one run of bytes, with all its layers. Kernels gather blocks in this form on
the device, so a copy moves as many as are neighbours on the host, to or from pinned memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Array, KVCacheShape
from mie.ops.kv_cache import GROUP
from mie.ops_gpu.arrays import element_type, kernel_type, to_host
from mie.ops_gpu.cubins import KernelName
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.queue import Queue

STAGED_BYTES = 8 << 20
"""Bytes of the staging buffer, unless a block is larger."""

COPY_THREADS, COPY_BYTES = 128, 16
"""Threads of a block of the copy kernels, and the bytes that each copies at a time."""


ELEMENTS: dict[str, np.dtype[Any]] = {
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(np.uint8),
    "int4": np.dtype(np.uint32),
}
"""The dtypes that hold a quantised cache. CuPy has no 8-bit float, so the bits are stored.

Eight codes of 4 bits are one integer.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class KVCache:
    """A KV cache on the device."""

    layers: Sequence[Array]  # L arrays [N, 2, Hkv, B, Dh]
    scales: Sequence[Array] = ()  # of a quantised cache L arrays [N, 2, Hkv, B, …], float32

    @property
    def is_quantized(self) -> bool:
        """Whether the elements have scales."""
        return bool(self.scales)

    @property
    def planes(self) -> list[Array]:
        """All arrays, each [N, ...], that are copied with a block."""
        return [*self.layers, *self.scales]


@dataclass(frozen=True, kw_only=True, eq=False)
class HostCache:
    """Space for blocks on the host: one array that the device reads and writes itself."""

    blocks: NDArray[np.uint8]  # [N, bytes of a block in all layers]


def new_host_cache(shape: KVCacheShape, dtype: np.dtype[Any], queue: Queue) -> HostCache:
    """Return zeros in pinned memory for blocks of a cache with elements of ``dtype``."""
    one = new_cache(replace(shape, num_blocks=1), dtype, np.empty)
    block_bytes = _places(one)[-1]
    memory = queue.host_memory(shape.num_blocks * block_bytes)
    memory[:] = 0
    return HostCache(blocks=memory.reshape(shape.num_blocks, block_bytes))


def kernels(dtype: np.dtype[Any], of_model: np.dtype[Any]) -> list[KernelName]:
    """Return the kernels that move blocks of a cache of ``dtype`` in a model of another."""
    dtypes = [dtype] if dtype == of_model else [dtype, np.dtype(np.float32)]  # and its scales
    names = ("copy_blocks", "gather_blocks", "scatter_blocks")
    return [
        KernelName("copy_blocks.cu", f"{name}<{element_type(each)}>")
        for name in names
        for each in dtypes
    ]


def new_cache(
    shape: KVCacheShape, dtype: np.dtype[Any], zeros: Callable[[tuple[int, ...], Any], Array]
) -> KVCache:
    """Return a cache with elements of ``dtype``, in arrays that ``zeros`` allocates."""
    rows = (shape.num_blocks, 2, shape.num_kv_heads, shape.block_size)
    is_int4 = dtype == ELEMENTS["int4"]
    elements = (*rows, shape.head_dim // 8 if is_int4 else shape.head_dim)
    layers = [zeros(elements, dtype) for _ in range(shape.num_layers)]
    if dtype not in ELEMENTS.values():
        return KVCache(layers=layers)
    of_rows = (*rows, ceil_div(shape.head_dim, GROUP)) if is_int4 else rows
    scales = [zeros(of_rows, np.dtype(np.float32)) for _ in range(shape.num_layers)]
    return KVCache(layers=layers, scales=scales)


def cache_bytes(shape: KVCacheShape, dtype: np.dtype[Any]) -> int:
    """Return the bytes of a cache with elements of ``dtype``."""
    sizes = new_cache(shape, dtype, lambda dims, of: math.prod(dims) * of.itemsize)
    return sum(sizes.planes)


def move_blocks(
    launcher: Launcher,
    queue: Queue,
    source: KVCache | HostCache,
    target: KVCache | HostCache,
    src: Sequence[int],
    dst: Sequence[int],
) -> None:
    """Queue `ops.kv_cache.move_blocks`. No block of the target may be named twice."""
    if isinstance(source, HostCache):
        assert isinstance(target, KVCache), "blocks of the host go to the device"
        _import(launcher, queue, source, target, src, dst)
    elif isinstance(target, HostCache):
        _export(launcher, queue, source, target, src, dst)
    else:
        assert source is target, "the device has one cache"
        _copy(launcher, source, src, dst)


def export_blocks(launcher: Launcher, cache: KVCache, block_ids: Sequence[int]) -> list[bytes]:
    """Wait for the queued work, and return the bytes of blocks in the form of the host."""
    return [
        row.tobytes()
        for part in _parts(len(block_ids), _places(cache)[-1])
        for row in to_host(_gather(launcher, cache, block_ids[part]))
    ]


def import_block(launcher: Launcher, cache: KVCache, block_id: int, data: bytes) -> None:
    """Write the bytes of `export_blocks` to a block."""
    staged = launcher.xp.asarray(np.frombuffer(data, np.uint8)[None])
    _scatter(launcher, staged, cache, [block_id])


def _copy(launcher: Launcher, cache: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
    if set(src) & set(dst):  # a kernel's copies run in no order, so read all sources first
        _scatter(launcher, _gather(launcher, cache, src), cache, dst)
        return
    src_ids, dst_ids = _ids(launcher, src), _ids(launcher, dst)
    for plane in cache.planes:
        kernel = launcher.kernel("copy_blocks.cu", f"copy_blocks<{kernel_type(plane)}>")
        kernel(*_grid(plane, len(src)), (plane, src_ids, dst_ids, np.int32(_elements(plane))))


def _export(
    launcher: Launcher,
    queue: Queue,
    cache: KVCache,
    host: HostCache,
    src: Sequence[int],
    dst: Sequence[int],
) -> None:
    for part in _parts(len(src), host.blocks.shape[1]):
        staged = _gather(launcher, cache, src[part])
        for on_device, on_host in _runs(dst[part]):
            queue.download(staged[on_device], host.blocks[on_host])


def _import(
    launcher: Launcher,
    queue: Queue,
    host: HostCache,
    cache: KVCache,
    src: Sequence[int],
    dst: Sequence[int],
) -> None:
    for part in _parts(len(src), host.blocks.shape[1]):
        staged = launcher.xp.empty((len(src[part]), host.blocks.shape[1]), np.uint8)
        for on_device, on_host in _runs(src[part]):
            queue.upload(host.blocks[on_host], staged[on_device])
        _scatter(launcher, staged, cache, dst[part])


def _gather(launcher: Launcher, cache: KVCache, ids: Sequence[int]) -> Array:
    """Gather the blocks ``ids`` [C] into a new array [C, bytes of a block] on the device."""
    staged = launcher.xp.empty((len(ids), _places(cache)[-1]), np.uint8)
    for plane, part, stride in _planes_of(cache, staged):
        kernel = launcher.kernel("copy_blocks.cu", f"gather_blocks<{kernel_type(plane)}>")
        sizes = (np.int32(_elements(plane)), np.int32(stride))
        kernel(*_grid(plane, len(ids)), (plane, _ids(launcher, ids), part, *sizes))
    return staged


def _scatter(launcher: Launcher, staged: Array, cache: KVCache, ids: Sequence[int]) -> None:
    """Write the blocks of `_gather` to the blocks ``ids``."""
    for plane, part, stride in _planes_of(cache, staged):
        kernel = launcher.kernel("copy_blocks.cu", f"scatter_blocks<{kernel_type(plane)}>")
        sizes = (np.int32(_elements(plane)), np.int32(stride))
        kernel(*_grid(plane, len(ids)), (part, _ids(launcher, ids), plane, *sizes))


def _planes_of(cache: KVCache, staged: Array) -> Iterator[tuple[Array, Array, int]]:
    """Yield each plane, its elements in ``staged`` from the first block on, and their stride."""
    flat = staged.reshape(-1)
    for plane, place in zip(cache.planes, _places(cache)[:-1], strict=True):
        itemsize = plane.dtype.itemsize
        end = flat.size - (flat.size - place) % itemsize
        yield plane, flat[place:end].view(plane.dtype), staged.shape[1] // itemsize


def _places(cache: KVCache) -> list[int]:
    """Return where each plane begins in a block's run of bytes, and its length.

    The length is a multiple of 16, and so are the places of elements, because a kernel copies 16
    bytes at a time.
    """
    sizes = [_elements(plane) * plane.dtype.itemsize for plane in cache.planes]
    *places, end = accumulate(sizes, initial=0)
    return [*places, ceil_div(end, COPY_BYTES) * COPY_BYTES]


def _parts(count: int, block_bytes: int) -> Iterator[slice]:
    """Yield the parts of ``count`` blocks that fit the staging buffer."""
    size = max(1, STAGED_BYTES // block_bytes)
    for start in range(0, count, size):
        yield slice(start, start + size)


def _runs(ids: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield the places in ``ids`` of each run of ascending neighbours, and the run."""
    start = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids) or ids[i] != ids[i - 1] + 1:
            yield slice(start, i), slice(ids[start], ids[start] + i - start)
            start = i


def _ids(launcher: Launcher, ids: Sequence[int]) -> Array:
    return launcher.xp.asarray(np.array(ids, np.int32))


def _elements(plane: Array) -> int:
    """Return the number of elements of a block."""
    return math.prod(plane.shape[1:])


def _grid(plane: Array, num_blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return grid and block of the copy kernels. Several CUDA blocks share a large cache block."""
    share = ceil_div(_elements(plane) * plane.dtype.itemsize, 8 * COPY_THREADS * COPY_BYTES)
    return (num_blocks, min(share, 64)), (COPY_THREADS,)
