"""Check the prefill kernel for tensor cores on random calls, row by row, against float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import (
    ERRORS,
    Shape,
    make_backend,
    make_batch,
    make_cache,
    normal,
    operators_attention,
    wide,
)

from mie.ops.backend import StepBatch
from mie.ops_gpu.kv_cache import KVCache

pytestmark = needs_compiler

TILE = 64  # keys of a tile, and rows of a block


def with_stale_entries(
    batch: StepBatch, cache: KVCache, window: int | None
) -> tuple[StepBatch, KVCache]:
    """Let every entry that no query needs name one more block, which is NaN."""
    layer, block_size = cache.layers[0], cache.layers[0].shape[3]
    unwritten = np.full_like(layer[:1], 127 if cache.scales else np.nan)
    tables = batch.block_tables.copy()
    counts = np.diff(batch.cu_seqlens_q)
    for table, count, length in zip(tables, counts, batch.seq_lens, strict=True):
        oldest = 0 if window is None else max(0, length - count + 1 - window)
        table[-(-length // block_size) :] = len(layer)
        table[: oldest // block_size] = len(layer)
    layers = [np.concatenate([layer, unwritten])]
    scales = cache.scales and [
        np.concatenate([cache.scales[0], np.full_like(cache.scales[0][:1], np.nan)])
    ]
    return replace(batch, block_tables=tables), replace(cache, layers=layers, scales=scales)


def grow(batch: StepBatch, cache: KVCache, planes: np.ndarray, growth: float) -> None:
    """Multiply the scales, and ``planes`` [2, N, B, Hkv, Dh], by a power for each tile."""
    size = planes.shape[2]
    for table, length in zip(batch.block_tables, batch.seq_lens, strict=True):
        for index, block in enumerate(table[: -(-length // size)]):
            factor = growth ** ((index * size + np.arange(size)) // TILE)
            planes[:, block] *= factor[:, None, None]
            cache.scales[0][block] *= factor.astype(np.float32)


def prefill(
    mode: Any,
    shape: Shape,
    sequences: list[tuple[int, int]],
    query_scale: float,
    growth: float = 1.0,
) -> None:
    """Compare each row of one call with the operator.

    The numbers of a quantised cache are ``growth`` times as large from tile to tile.
    """
    batch, num_blocks = make_batch(sequences, shape.block_size)
    batch = replace(batch, num_decodes=0)  # a chunk of one token is a prompt, too
    cache, planes = make_cache(shape, batch, num_blocks)
    if growth != 1.0:
        grow(batch, cache, planes, growth)
    num_tokens, num_heads = int(batch.cu_seqlens_q[-1]), shape.group * shape.num_kv_heads
    q = normal(shape.dtype, num_tokens, num_heads, shape.head_dim, seed=8)
    q = (q * query_scale).astype(q.dtype)
    backend = make_backend(mode, shape.dtype, stored=shape.stored)
    stale_batch, stale_cache = with_stale_entries(batch, cache, shape.window)
    got = wide(backend.paged_attention(q, stale_cache, 0, stale_batch, shape.window))
    wanted = operators_attention(q, planes, batch, shape)
    error = np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    worst = error.max()  # NaN if any row is
    assert worst < 2 * ERRORS[shape.dtype], (worst, np.argwhere(~(error < 2 * ERRORS[shape.dtype])))


@pytest.mark.parametrize("mode", ["forward", "checked"])
@pytest.mark.parametrize("stored", ["auto", "int8"])
def test_the_mask_begins_and_ends_at_the_exact_key(mode: str, stored: str):
    """The rows of a warp see all of a tile but one key, or all of it.

    The warp has 16 tokens. The first sees the tile up to its last key, and the last sees it from
    its first key on, each one token earlier, at, or later.
    """
    window = 100  # so that no tile is on both edges
    shape = Shape("float16", 64, 1, 1, 16, window, stored)
    for by in (-1, 0, 1):
        first_sees_last_key, last_sees_first_key = TILE - 1 + by, TILE + window - 1 + by
        prefill(mode, shape, [(16, first_sees_last_key + 16), (16, last_sees_first_key + 1)], 1.0)


@pytest.mark.parametrize("mode", ["forward", "checked"])
@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_the_unit_grows_from_tile_to_tile(mode: str, stored: str):
    """Every tile has a larger scale than those before it, so the sums change their unit."""
    shape = Shape("float16", 64, 3, 1, 32, None, stored)
    prefill(mode, shape, [(40, 80), (17, 230)], 0.02, growth=8.0)
