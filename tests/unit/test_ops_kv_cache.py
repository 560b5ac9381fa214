"""Writing, gathering and copying the blocks of a paged cache, against loops over slots."""

from __future__ import annotations

import numpy as np
import pytest

from mie.ops.kv_cache import copy_blocks, gather_kv, move_blocks, write_kv

DTYPES = ("float32", "float64")
BLOCK_SIZES = (1, 3, 16)
NUM_BLOCKS, NUM_KV_HEADS, HEAD_DIM = 7, 2, 4


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_write_kv_fills_the_slots_and_no_other(num_tokens: int, block_size: int, dtype: str):
    shape = (NUM_BLOCKS, block_size, NUM_KV_HEADS, HEAD_DIM)
    k_cache, v_cache = np.full(shape, np.nan, dtype), np.full(shape, np.nan, dtype)
    keys = frozen(normal(0, (num_tokens, NUM_KV_HEADS, HEAD_DIM), dtype))
    values = frozen(normal(1, (num_tokens, NUM_KV_HEADS, HEAD_DIM), dtype))
    slots = np.random.default_rng(2).permutation(NUM_BLOCKS * block_size)[:num_tokens]
    write_kv(keys, values, k_cache, v_cache, frozen(slots))
    written = {(slot // block_size, slot % block_size): t for t, slot in enumerate(slots.tolist())}
    assert len(written) == num_tokens
    for block, offset in np.ndindex(NUM_BLOCKS, block_size):
        t = written.get((block, offset))
        if t is None:
            assert np.isnan(k_cache[block, offset]).all()
            assert np.isnan(v_cache[block, offset]).all()
        else:
            np.testing.assert_array_equal(k_cache[block, offset], keys[t])
            np.testing.assert_array_equal(v_cache[block, offset], values[t])


def test_write_kv_reaches_one_plane_of_a_larger_cache():
    """The backend keeps all layers in one array and passes a plane of it."""
    caches = np.zeros((2, 2, 3, 4, 1, 2))
    write_kv(np.ones((1, 1, 2)), np.full((1, 1, 2), 2.0), caches[1, 0], caches[1, 1], np.array([6]))
    assert caches[1, 0, 1, 2, 0].tolist() == [1.0, 1.0]
    assert caches[1, 1, 1, 2, 0].tolist() == [2.0, 2.0]
    assert np.count_nonzero(caches) == 4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_gather_kv_gives_any_stretch_of_a_sequence(block_size: int, dtype: str):
    cache = frozen(normal(3, (NUM_BLOCKS, block_size, NUM_KV_HEADS, HEAD_DIM), dtype))
    block_ids = [5, 0, 6, 2]
    length = len(block_ids) * block_size
    for start in range(length + 1):
        for stop in range(start, length + 1):
            got = gather_kv(cache, frozen(np.array(block_ids)), start, stop)
            wanted = [cache[block_ids[t // block_size], t % block_size] for t in range(start, stop)]
            assert got.shape == (stop - start, NUM_KV_HEADS, HEAD_DIM)
            assert got.dtype == dtype
            assert got.tolist() == [token.tolist() for token in wanted]
            assert not np.shares_memory(got, cache)


@pytest.mark.parametrize("stale", [10**9, -(10**9), NUM_BLOCKS])
def test_gather_kv_never_looks_at_stale_entries(stale: int):
    cache = normal(4, (NUM_BLOCKS, 3, NUM_KV_HEADS, HEAD_DIM))
    table = np.array([stale, 4, 1, stale, stale])  # a window passed the first block
    got = gather_kv(cache, table, 3, 8)
    np.testing.assert_array_equal(
        got, [cache[4, 0], cache[4, 1], cache[4, 2], cache[1, 0], cache[1, 1]]
    )
    assert gather_kv(cache, table, 9, 9).shape[0] == 0


COPIES = {
    "none": [],
    "one": [(2, 5)],
    "chain": [(0, 1), (1, 2), (2, 3)],
    "chain, backwards": [(2, 3), (1, 2), (0, 1)],
    "exchange": [(4, 6), (6, 4)],
    "one to two": [(3, 0), (3, 1)],
    "onto itself": [(5, 5)],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("planes", [(), (2,), (3, 2)], ids=str)
@pytest.mark.parametrize("pairs", COPIES.values(), ids=COPIES)
def test_copy_blocks_reads_every_source_first(
    pairs: list[tuple[int, int]], planes: tuple[int, ...], dtype: str
):
    caches = normal(5, (*planes, NUM_BLOCKS, 3, NUM_KV_HEADS, HEAD_DIM), dtype)
    before = caches.copy()
    wanted = before.copy()
    for plane in np.ndindex(planes):
        for source, destination in pairs:
            wanted[plane][destination] = before[plane][source]
    src, dst = (np.array([pair[i] for pair in pairs], np.int64) for i in (0, 1))
    copy_blocks(caches, frozen(src), frozen(dst))
    np.testing.assert_array_equal(caches, wanted)
    assert caches.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_move_blocks_carries_every_plane_and_nothing_else(dtype: str):
    source = frozen(normal(6, (2, 2, NUM_BLOCKS, 3, NUM_KV_HEADS, HEAD_DIM), dtype))
    target = normal(7, (2, 2, 3, 3, NUM_KV_HEADS, HEAD_DIM), dtype)
    wanted = target.copy()
    wanted[:, :, 2], wanted[:, :, 0] = source[:, :, 1], source[:, :, 6]
    move_blocks(source, target, np.array([1, 6]), np.array([2, 0]))
    np.testing.assert_array_equal(target, wanted)
