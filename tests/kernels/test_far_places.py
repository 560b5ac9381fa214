"""Place rows above 2^31 and 2^32 elements, where an offset of 32 bits reaches another row.

The memory is a hole: only the few pages that a test touches take any. The results of far rows must
have the bits of near ones.
"""

import mmap
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import (
    Shape,
    cache_shape,
    launcher_of,
    make_backend,
    make_batch,
    make_cache,
    normal,
)

from mie.ops_gpu.chip import EMULATED_CHIP
from mie.ops_gpu.few_rows import FewRows, Heads
from mie.ops_gpu.kv_cache import KVCache

pytestmark = needs_compiler

NO_RESERVE = 0x4000
"""MAP_NORESERVE of Linux, which Python names from 3.13 on."""

FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE


def hole(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return zeros that take no memory until they are written."""
    dtype = np.dtype(dtype)
    size = int(np.prod([dtype.itemsize, *shape], dtype=np.int64))
    return np.frombuffer(mmap.mmap(-1, size, flags=FLAGS), dtype).reshape(shape)


def far_ids(elements: int, count: int) -> list[int]:
    """Return blocks of so many elements around 2^31 and 2^32 elements."""
    middle, end = (1 << 31) // elements, (1 << 32) // elements
    return [end, middle, end - 1, middle - 1, *range(end + 1, end + count)][:count]


@pytest.mark.parametrize("mode", ["forward", "checked"])
def test_rows_of_an_embedding_are_gathered(mode: str):
    """256,000 tokens of 16,384 elements are 2^32."""
    width = 1 << 15
    table = hole(((1 << 17) + 2, width), np.float16)
    rows = np.array([1 << 16, (1 << 17) + 1, 1 << 17, (1 << 16) - 1], np.int32)
    table[rows] = normal("float16", len(rows), width)
    got = make_backend(mode, "float16").take_rows(table, rows)
    assert got.tobytes() == table[rows].tobytes()


KINDS = {
    # shape, whether results may not depend on the batch
    "streamed": (Shape("float16", 64, 2, 1, 16), False),
    "split": (Shape("float16", 64, 2, 1, 16), True),
    "streamed int8": (Shape("float16", 64, 2, 1, 16, None, "int8"), False),
    "streamed in rows of 192 bytes": (Shape("float16", 96, 2, 1, 16), False),
    "plain": (Shape("float16", 72, 2, 1, 8), False),
    "plain int8": (Shape("float16", 72, 2, 1, 8, None, "int8"), False),
}


def far_cache(cache: KVCache, places: list[int]) -> KVCache:
    """Return a cache that has the blocks 0, 1, ... at other places."""
    planes = []
    for plane in cache.planes:
        far = hole((max(places) + 1, *plane.shape[1:]), plane.dtype)
        far[places] = plane
        planes.append(far)
    return KVCache(layers=planes[:1], scales=planes[1:])


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("streamed", "plain") else [pytest.mark.slow])
        for kind in KINDS
    ],
)
def test_attention_reads_far_blocks(kind: str):
    """Decodes and prompts have the bits that they have with the same blocks near each other."""
    shape, is_deterministic = KINDS[kind]
    batch, num_blocks = make_batch([(1, 70), (20, 45), (1, 3)], shape.block_size)
    cache, _ = make_cache(shape, batch, num_blocks)
    places = far_ids(cache.layers[0][0].size, num_blocks)
    far = far_cache(cache, places)
    tables = np.where(batch.block_tables < 0, -1, np.array(places)[batch.block_tables])
    q = normal(shape.dtype, 22, 2, shape.head_dim)
    backend = make_backend("forward", shape.dtype, is_deterministic, stored=shape.stored)
    near = backend.paged_attention(q, cache, 0, batch, None).copy()
    got = backend.paged_attention(q, far, 0, replace(batch, block_tables=tables), None)
    assert np.isfinite(near).all()
    assert got.tobytes() == near.tobytes()


@pytest.mark.parametrize("how", ["rope", "int8", "product"])
def test_tokens_are_written_to_far_blocks(how: str):
    """A product writes the heads itself, or a kernel of its own does so behind it."""
    head_dim, size = 64, 16
    backend = make_backend("forward", "float16", stored="int8" if how == "int8" else "auto")
    ids = far_ids(2 * size * head_dim, 4)
    near = backend.new_kv_cache(cache_shape(4, size, 1, head_dim))
    far = far_cache(near, ids)
    table = backend.load_rope(10000.0 ** (-np.arange(32) / 32), 1.0, 50)
    x, eye = normal("float16", 4, 3 * head_dim), np.eye(3 * head_dim, dtype=np.float16)
    for cache, blocks in ((near, [*range(4)]), (far, ids)):
        slots = (np.array(blocks) * size + 3).astype(np.int32)
        positions = np.array([5, 40, 1, 7], np.int32)
        batch: Any = SimpleNamespace(positions=positions, slot_mapping=slots)
        if how == "product":
            q = np.empty((4, 1, head_dim), np.float16)
            to = Heads(q=q, kv=cache.layers[0], rope_table=table, batch=batch)
            products = FewRows(launcher_of("forward"), EMULATED_CHIP)
            products.heads(x, eye, to, bias=None, norm=None)
        else:
            backend.rope_write_kv(x.reshape(4, 3, head_dim), table, cache, 0, batch)
    assert near.layers[0].any()
    for ours, theirs in zip(far.planes, near.planes, strict=True):
        assert ours[ids].tobytes() == theirs.tobytes()


def test_far_blocks_are_copied():
    """Blocks go from afar, to afar, and through the staging buffer."""
    dims = (2, 2, 16, 64)
    end = (1 << 32) // 4096
    layer = hole((end + 4, *dims), np.float16)
    numbers = normal("float16", 3, *dims)
    layer[[end, end // 2, end + 1]] = numbers
    cache, backend = KVCache(layers=[layer]), make_backend("forward", "float16")
    backend.move_blocks(cache, cache, [end], [7])
    backend.move_blocks(cache, cache, [end // 2], [end + 2])
    backend.move_blocks(cache, cache, [end + 1, 9], [9, end + 1])
    assert layer[[7, end + 2, 9]].tobytes() == numbers.tobytes()
    assert not layer[end + 1].any()
