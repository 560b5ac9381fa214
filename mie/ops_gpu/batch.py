"""A step's integers on the device, and what the host knows of them."""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from mie.ops.arrays import Ints
from mie.ops.backend import Array, StepBatch
from mie.ops_gpu.arrays import to_host
from mie.ops_gpu.dispatch import TILE_TOKENS


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceBatch(StepBatch):
    """A `StepBatch` whose arrays are int32 on the device.

    Two lists part its sequences by how attention is launched; their sizes and the largest
    numbers stay on the host, where the grids are computed, so that no launch waits for the device.
    """

    decodes: Array  # sequences with one query
    prefills: Array  # the others
    decode_tiles: Array  # tiles of keys of the decodes before each, and of all: 0, ...
    num_decode_tiles: int  # of all
    max_decode_len: int  # the longest of the decodes
    max_prefill_queries: int  # most queries of a prefill


def to_device(xp: Any, batch: StepBatch) -> DeviceBatch:
    """The batch on the device, in one copy; itself if it is there already."""
    if isinstance(batch, DeviceBatch):
        return batch
    host: dict[str, Ints] = {
        field.name: to_host(getattr(batch, field.name))
        for field in fields(StepBatch)
        if not field.name.startswith("drawn")
    }
    counts = np.diff(host["cu_seqlens_q"])
    is_decode = counts == 1
    host["decodes"] = np.flatnonzero(is_decode)
    host["prefills"] = np.flatnonzero(~is_decode)
    decode_lens = host["seq_lens"][is_decode]
    host["decode_tiles"] = np.concatenate([[0], np.cumsum(-(-decode_lens // TILE_TOKENS))])
    packed = np.concatenate([array.ravel() for array in host.values()]).astype(np.int32)
    on_device = xp.asarray(packed)
    arrays, start = {}, 0
    for name, array in host.items():
        arrays[name] = on_device[start : start + array.size].reshape(array.shape)
        start += array.size
    return DeviceBatch(
        **arrays,
        num_decode_tiles=int(host["decode_tiles"][-1]),
        max_decode_len=int(decode_lens.max(initial=0)),
        max_prefill_queries=int(counts[~is_decode].max(initial=0)),
    )
