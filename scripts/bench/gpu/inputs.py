"""Make queries and caches on the device, run mie's attention over them, and check it."""

import functools
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.gpu.device import Call, Device
from bench.gpu.numbers import fill_normal, fill_quantised, random_normal, relative_error
from bench.gpu.shapes import BLOCK_SIZE, DecodeShape, PrefillShape, batch_of
from mie.base.arithmetic import ceil_div
from mie.ops.attention import decode_attention
from mie.ops.backend import Array, KVCacheShape, StepBatch
from mie.ops.weights.int4_cache import Int4Cache, dequantize
from mie.ops_gpu.arrays import DTYPES, to_host
from mie.ops_gpu.batch import DeviceBatch, to_device
from mie.ops_gpu.chip import device_memory
from mie.ops_gpu.cupy_backend import CupyBackend
from mie.ops_gpu.kv_cache import ELEMENTS, KVCache

CALLS = 20
"""Calls of a sample, enough that the launch of the graph hardly counts."""
MIN_KV_SETS, L2_MULTIPLE = 3, 3
"""Calls rotate over at least three caches, together at least three times the L2 cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inputs:
    """Queries, a batch, and the caches that calls rotate over: the layers of one cache."""

    shape: DecodeShape | PrefillShape
    backend: CupyBackend
    q: Array  # [T, Hq, Dh]
    cache: KVCache
    host_batch: StepBatch
    batch: DeviceBatch

    @property
    def num_sets(self) -> int:
        return len(self.cache.layers)

    def attend(self, index: int) -> Array:
        """Run mie's attention over one of the caches, as the engine dispatches it."""
        return self.backend.paged_attention(self.q, self.cache, index, self.batch, None)

    def calls(self) -> list[Call]:
        """Return at least `CALLS` calls that use each cache equally often."""
        calls = [functools.partial(self.attend, index) for index in range(self.num_sets)]
        return calls * ceil_div(CALLS, len(calls))

    def checked_places(self) -> list[tuple[int, int]]:
        """Return the (token, sequence) pairs that are checked.

        They are the last queries of the shortest, a middle and the longest sequence, and the first
        query of the longest.
        """
        lengths, starts = self.host_batch.seq_lens, self.host_batch.cu_seqlens_q
        rows = {int(lengths.argmin()), len(lengths) // 2, int(lengths.argmax())}
        last = [(int(starts[row + 1]) - 1, row) for row in sorted(rows)]
        return sorted({*last, (int(starts[lengths.argmax()]), int(lengths.argmax()))})

    def wanted(self, index: int, token: int, row: int) -> NDArray[Any]:
        """Return the result of the NumPy operator for one token [Hq, Dh], in float64."""
        last = int(self.host_batch.cu_seqlens_q[row + 1]) - 1
        length = int(self.host_batch.seq_lens[row]) - (last - token)
        num_blocks = ceil_div(length, BLOCK_SIZE)
        blocks = self.batch.block_tables[row, :num_blocks]
        keys, values = self._numbers(index, blocks).transpose(1, 0, 3, 2, 4)
        out = decode_attention(
            to_host(self.q[token : token + 1]).astype(np.float64),
            keys,
            values,
            np.arange(num_blocks)[None],
            np.array([length]),
            self.shape.head_dim**-0.5,
        )
        only: NDArray[Any] = out[0]
        return only

    def _numbers(self, index: int, blocks: Array) -> NDArray[np.float64]:
        """Return blocks [C, 2, Hkv, B, Dh] of a cache as numbers."""
        layer = self.cache.layers[index]
        if layer.dtype == ELEMENTS["int4"]:
            codes = to_host(layer[blocks]).view(np.uint8)
            scales = to_host(self.cache.scales[index][blocks])
            factors = scales.view(np.float16).reshape(*scales.shape, 2).swapaxes(-1, -2)
            return dequantize(Int4Cache(codes, factors), np.float64).astype(np.float64)
        bits = layer.view(np.uint16) if layer.dtype.itemsize == 2 else layer
        numbers = to_host(bits[blocks]).view(layer.dtype).astype(np.float64)
        if self.cache.is_quantized:
            numbers *= to_host(self.cache.scales[index][blocks])[..., None]
        return numbers

    def error(self) -> float:
        """Return the largest relative error of mie in the checked places, over three caches."""
        errors = []
        for index in range(MIN_KV_SETS):
            # NaN in the memory that the pool hands out again for the result.
            self.backend_empty().view(np.uint16).fill(0xFFFF)
            got = to_host(self.attend(index))
            errors += [
                relative_error(got[token], self.wanted(index, token, row))
                for token, row in self.checked_places()
            ]
        return max(errors)

    def backend_empty(self) -> Array:
        """Return memory for a result."""
        array: Array = type(self.q)(self.q.shape, self.q.dtype)
        return array


def decode_inputs(device: Device, shape: DecodeShape) -> Inputs:
    """Return the inputs of one query for each sequence."""
    return _inputs(device, shape, shape.lengths(), 1, shape.kv_cache_dtype)


def prefill_inputs(device: Device, shape: PrefillShape) -> Inputs:
    """Return the inputs of a chunk of queries for each sequence."""
    return _inputs(device, shape, [shape.context] * shape.num_seqs, shape.num_queries, "auto")


def _inputs(
    device: Device,
    shape: DecodeShape | PrefillShape,
    lengths: list[int],
    num_queries: int,
    kv_cache_dtype: str,
) -> Inputs:
    """Return random numbers in blocks of a random order.

    Raises:
        MemoryError: the caches do not fit.
    """
    xp, backend = device.xp, device.backend(shape.dtype, kv_cache_dtype)
    host_batch, num_blocks = batch_of(lengths, num_queries)
    one_set = KVCacheShape(
        num_layers=1,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    set_bytes, free = backend.kv_cache_bytes(one_set), device_memory(xp, 1.0).available_bytes
    num_sets = max(MIN_KV_SETS, ceil_div(L2_MULTIPLE * device.l2_bytes, set_bytes))
    if num_sets * set_bytes > free * 3 // 4:  # a Jetson's other programs need memory too
        needed = f"{num_sets} caches of {set_bytes / 1e9:.2f} GB"
        raise MemoryError(f"{needed} take more than three quarters of {free / 1e9:.2f} GB")
    cache = backend.new_kv_cache(replace(one_set, num_layers=num_sets))
    for seed, (layer, scales) in enumerate(itertools.zip_longest(cache.layers, cache.scales)):
        if scales is None:
            fill_normal(xp, layer, 2 + seed)
        else:
            fill_quantised(xp, layer, scales, 2 + seed)
    dims = (num_queries * len(lengths), shape.num_heads, shape.head_dim)
    return Inputs(
        shape=shape,
        backend=backend,
        q=random_normal(xp, dims, DTYPES[shape.dtype], 1),
        cache=cache,
        host_batch=host_batch,
        batch=to_device(xp, host_batch),
    )
