"""Compare attention in tiles with `ops.attention.paged_attention`, and with itself bit for bit.

Every cache here is NaN except in the slots of the sequences' own tokens. Every block table
continues past its sequence with numbers that are no block.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from mie.ops.attention import paged_attention
from mie.ops.backend import KVCacheShape, StepBatch
from mie.ops_cpu.attention import attention as attention_module
from mie.ops_cpu.attention import geometry as attention_geometry
from mie.ops_cpu.attention import plan as attention_plan
from mie.ops_cpu.attention.attention import Attention
from mie.ops_cpu.attention.geometry import Geometry
from mie.ops_cpu.attention.plan import Planner
from mie.ops_cpu.kv_cache import head_major, new_cache
from mie.ops_cpu.threads.workers import Workers

# A sum of some hundred weighted values of order 1; scores are of a few units.
ATOL = {"float32": 5e-6, "float64": 1e-13}
DTYPES = tuple(ATOL)
LENGTHS = (1, 127, 128, 129, 300, 256, 700, 40)


@pytest.fixture(params=["one split", "several splits"])
def splits(request, monkeypatch):
    """Use the splits of real models, or splits of a few tiles and threads that share any work."""
    if request.param == "several splits":
        monkeypatch.setattr(attention_module, "WORTH_SHARING", 1)
        monkeypatch.setattr(attention_geometry, "SPLIT_SCORES", 1 << 13)
        monkeypatch.setattr(attention_plan, "ITEM_SCORES", 1 << 15)


class Keys:
    """The tokens of some sequences in a cache, in one run of blocks each or in scattered blocks."""

    def __init__(self, lengths, *, heads, scattered, block_size=16, head_dim=8, dtype="float64"):
        rng = np.random.default_rng(7)
        self.lengths, self.heads, self.block_size = np.array(lengths), heads, block_size
        needed = [-(-length // block_size) for length in lengths]
        num_blocks = sum(needed) + 3
        shape = KVCacheShape(
            num_layers=2,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=heads[1],
            head_dim=head_dim,
        )
        self.cache = new_cache(shape, np.dtype(dtype))
        self.cache.fill(np.nan)
        ids = list(range(num_blocks))
        if scattered:
            np.random.default_rng(8).shuffle(ids)
        self.tables = np.full((len(lengths), max(needed) + 2), 10**9)
        total = sum(lengths)
        keys = rng.normal(size=(2, total, heads[1], head_dim))
        self.q = rng.normal(size=(total, heads[0], head_dim)).astype(dtype)
        at = 0
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            self.tables[row, :count] = [ids.pop(0) for _ in range(count)]
            position = np.arange(length)
            blocks = self.tables[row, position // block_size]
            self.cache[1][:, blocks, position % block_size] = keys[:, at : at + length]
            at += length
        self.starts = np.concatenate([[0], np.cumsum(lengths)])

    def batch(self, counts):
        """Return the queries and the batch of a step that computes each sequence's last tokens."""
        rows = np.concatenate(
            [np.arange(end - n, end) for n, end in zip(counts, self.starts[1:], strict=True)]
        )
        empty = np.empty(0, np.int64)
        return self.q[rows], StepBatch(
            token_ids=empty,
            positions=empty,
            slot_mapping=empty,
            cu_seqlens_q=np.concatenate([[0], np.cumsum(counts)]),
            seq_lens=self.lengths,
            block_tables=self.tables,
            logits_rows=empty,
        )

    def expected(self, q, batch, window):
        planes = self.cache[1].astype(np.float64)
        scale = q.shape[-1] ** -0.5
        lay = batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, scale, window
        return paged_attention(q.astype(np.float64), *planes, *lay)


def attend(keys, counts, window=None, *, num_threads=2, invariant=True):
    q, batch = keys.batch(counts)
    attention = Attention(Workers(num_threads))
    return attention(q, keys.cache, 1, batch, window, is_batch_invariant=invariant)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (10, 2)])
@pytest.mark.parametrize("window", [None, 5, 200])
def test_attention_equals_the_definition(splits, dtype, scattered, heads, window):
    keys = Keys(LENGTHS, heads=heads, scattered=scattered, dtype=dtype)
    for counts in ([1] * 8, [1, 5, 1, 129, 300, 1, 70, 40]):
        expected = keys.expected(*keys.batch(counts), window)
        for invariant in (False, True):
            got = attend(keys, counts, window, invariant=invariant)
            assert got.dtype == dtype
            np.testing.assert_allclose(got, expected, rtol=0, atol=ATOL[dtype])


@pytest.mark.parametrize("block_size", [1, 3, 100, 128, 256])
def test_attention_equals_the_definition_for_any_block_size(block_size):
    keys = Keys(LENGTHS, heads=(4, 2), scattered=True, block_size=block_size)
    for counts in ([1] * 8, [1, 5, 1, 129, 300, 1, 70, 40]):
        q, batch = keys.batch(counts)
        got = attend(keys, counts)
        np.testing.assert_allclose(got, keys.expected(q, batch, None), rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1)])
@pytest.mark.parametrize("window", [None, 100])
def test_a_result_depends_only_on_what_the_query_sees(splits, dtype, heads, window):
    """It is the same bit for bit alone and in a batch, in a decode, a prompt and a chunk.

    It is also the same for adjacent and scattered blocks, and for one thread and three.
    """
    everyone = [attend(Keys(LENGTHS, heads=heads, scattered=False, dtype=dtype), LENGTHS, window)]
    scattered = Keys(LENGTHS, heads=heads, scattered=True, dtype=dtype)
    everyone += [attend(scattered, LENGTHS, window, num_threads=n) for n in (1, 3)]
    for other in everyone[1:]:
        np.testing.assert_array_equal(other, everyone[0])
    last = [stop - 1 for stop in np.cumsum(LENGTHS)]
    for decoded in (attend(scattered, [1] * 8, window, num_threads=n) for n in (1, 2, 3)):
        np.testing.assert_array_equal(decoded, everyone[0][last])
    for count in (2, 3, 40):
        chunk = attend(scattered, [min(count, n) for n in LENGTHS], window)
        rows = np.concatenate(
            [
                np.arange(stop - min(count, stop - start), stop)
                for start, stop in pairwise([0, *np.cumsum(LENGTHS)])
            ]
        )
        np.testing.assert_array_equal(chunk, everyone[0][rows])
    for i in (3, 6):
        alone = Keys(LENGTHS, heads=heads, scattered=True, dtype=dtype)
        alone.lengths, alone.tables = alone.lengths[i : i + 1], alone.tables[i : i + 1]
        alone.starts = alone.starts[i : i + 2]
        np.testing.assert_array_equal(attend(alone, [1], window), everyone[0][last[i]][None])


def test_a_plan_is_not_reused_in_another_step():
    keys = Keys(LENGTHS, heads=(4, 2), scattered=True)
    attention = Attention(Workers(1))
    for counts in ([1] * 8, [1, 5, 1, 2, 3, 1, 7, 4], [1] * 8):
        q, batch = keys.batch(counts)
        for window in (None, 50, None):
            got = attention(q, keys.cache, 1, batch, window, is_batch_invariant=True)
            np.testing.assert_allclose(got, keys.expected(q, batch, window), rtol=0, atol=1e-13)
    other = keys.cache.copy(order="K")
    other[1, 1] *= 2.0
    got = attention(q, other, 1, batch, None, is_batch_invariant=True)
    np.testing.assert_allclose(got, 2 * keys.expected(q, batch, None), rtol=0, atol=1e-13)


@pytest.mark.parametrize("window", [None, 5])
def test_reading_only_the_filled_part_of_a_tile_changes_no_bit(monkeypatch, window):
    keys = Keys((1, 127, 9, 300, 256, 16, 40), heads=(9, 3), scattered=True, dtype="float32")
    in_part = attend(keys, [1] * 7, window)
    monkeypatch.setattr(Geometry, "short_tiles_are_exact", False)
    np.testing.assert_array_equal(attend(keys, [1] * 7, window), in_part)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (9, 3), (7, 1)])
def test_a_decode_without_padding_changes_no_bit(monkeypatch, dtype, heads, window):
    lengths = (1, 127, 9, 300, 256, 16, 40)
    keys = Keys(lengths, heads=heads, scattered=True, head_dim=64, dtype=dtype)
    expected = attend(keys, [1] * 7, window)
    monkeypatch.setattr(Geometry, "padding_is_exact", False)
    np.testing.assert_array_equal(attend(keys, [1] * 7, window), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (9, 3)])
@pytest.mark.parametrize("single", [False, True])
def test_a_decode_has_the_bits_of_a_prefill_with_products_of_one_row_or_more(
    monkeypatch, dtype, window, heads, single
):
    monkeypatch.setattr(Geometry, "has_single_rows", single)
    lengths = (1, 127, 9, 300, 256, 16, 40)
    keys = Keys(lengths, heads=heads, scattered=True, head_dim=64, dtype=dtype)
    counts = [min(n, 30) for n in lengths]
    prefilled, expected = attend(keys, counts, window), keys.expected(*keys.batch(counts), window)
    np.testing.assert_allclose(prefilled, expected, rtol=0, atol=ATOL[dtype])
    q, _ = keys.batch(counts)
    last = np.cumsum(counts) - 1
    _, batch = keys.batch([1] * len(lengths))
    decoded = Attention(Workers(2))(q[last], keys.cache, 1, batch, window, is_batch_invariant=True)
    np.testing.assert_array_equal(decoded, prefilled[last])


@pytest.mark.parametrize(
    ("heads_per_kv", "head_dim", "packs", "rows"),
    [(1, 64, True, 1), (3, 64, True, 1), (3, 32, True, 4), (4, 64, True, 4), (3, 64, False, 3)],
)
def test_products_have_one_row_where_small_ones_are_packed(
    monkeypatch, heads_per_kv, head_dim, packs, rows
):
    monkeypatch.setattr(Geometry, "_is_exact_without_others", lambda self, few: not packs)
    geometry = Geometry(
        num_kv_heads=3,
        heads_per_kv=heads_per_kv,
        head_dim=head_dim,
        block_size=16,
        dtype=np.dtype("float32"),
    )
    assert geometry.decode_form.num_rows == rows
    assert geometry.prefill_form.num_rows == (1 if rows == 1 else 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("length", [1, 15, 16, 40, 127, 128, 129, 300, 700])
def test_reading_a_last_tile_in_place_changes_no_bit(splits, monkeypatch, dtype, window, length):
    """The slots after its tokens are NaN, in place too."""
    keys = Keys((length,), heads=(9, 3), scattered=False, head_dim=64, dtype=dtype)
    in_place = attend(keys, [1], window)
    expected = keys.expected(*keys.batch([1]), window)
    np.testing.assert_allclose(in_place, expected, rtol=0, atol=ATOL[dtype])
    monkeypatch.setattr(Geometry, "short_sums_are_exact", False)
    np.testing.assert_array_equal(attend(keys, [1], window), in_place)


@pytest.mark.parametrize("invariant", [False, True])
def test_a_query_may_see_no_key_of_a_split_that_others_see(monkeypatch, invariant):
    """The second split begins at 640. With a window of 5, only the first queries see the first."""
    monkeypatch.setattr(attention_geometry, "SPLIT_SCORES", 1 << 13)
    keys = Keys((700,), heads=(9, 3), scattered=True)
    got = attend(keys, [60], 5, invariant=invariant)
    expected = keys.expected(*keys.batch([60]), 5)
    np.testing.assert_allclose(got, expected, rtol=0, atol=ATOL["float64"])


def plan(lengths, counts, *, heads=(3, 3), head_dim=8, num_threads=2, window=None):
    """Return the items of a step."""
    geometry = Geometry(
        num_kv_heads=heads[1],
        heads_per_kv=heads[0] // heads[1],
        head_dim=head_dim,
        block_size=16,
        dtype=np.dtype("float32"),
    )
    batch = Keys(lengths, heads=heads, scattered=True).batch(counts)[1]
    return Planner(batch, geometry, window, is_batch_invariant=True).items(num_threads)


def work_of_threads(items, num_threads):
    """Return the products of threads that take the items in order as soon as they are idle."""
    loads = [0] * num_threads
    for item in items:
        loads[loads.index(min(loads))] += item.num_products
    return loads


@pytest.mark.parametrize("num_threads", [2, 3, 10])
def test_threads_get_equal_decodes(monkeypatch, num_threads):
    """What each thread reads is about equal, and padding to the fullest tile costs little."""
    monkeypatch.setattr(Geometry, "short_tiles_are_exact", True)  # as with most kernels
    lengths = [(17 + 29 * i) % 80 + 1 for i in range(64)]
    items = plan(lengths, [1] * 64, num_threads=num_threads)
    costs = [len(item.rows) * item.spans[0].width for item in items]
    assert len(costs) == num_threads
    assert sum(costs) < 1.3 * sum(-(-length // 16) * 16 for length in lengths)
    assert max(costs) < 1.25 * sum(costs) / num_threads


@pytest.mark.parametrize(
    ("lengths", "counts"), [([700], [1]), ([700] * 3, [1] * 3), ([700], [60]), ([900, 5], [1, 1])]
)
def test_few_items_are_split_by_kv_heads(lengths, counts):
    items = plan(lengths, counts, heads=(8, 4), num_threads=2)
    loads = work_of_threads(items, 2)
    assert max(loads) < 1.25 * sum(loads) / 2
    largest = max(items, key=lambda item: item.num_products)
    assert largest.heads.stop - largest.heads.start == 2


@pytest.mark.parametrize(("num_threads", "length"), [(3, 9000), (8, 9000), (64, 30_000)])
def test_one_long_decode_is_cut_by_keys_where_threads_exceed_heads(num_threads, length):
    items = plan([length], [1], heads=(4, 2), num_threads=num_threads)
    loads = work_of_threads(items, num_threads)
    num_splits = -(-length // (attention_geometry.SPLIT_TILES * attention_geometry.TILE))
    assert max(loads) <= max(0.75 * sum(loads), 2) / min(num_threads / 2, num_splits)
    for head in range(2):
        own = [item for item in items if item.heads == slice(head, head + 1)]
        assert len(own) > 1
        assert len({id(item.whole) for item in own}) == 1
        assert [item.first_span for item in own] == [
            sum(len(before.spans) for before in own[:i]) for i in range(len(own))
        ]
        assert [span for item in own for span in item.spans] == own[0].whole.spans


@pytest.mark.parametrize("window", [None, 700])
def test_cutting_a_decode_by_keys_changes_no_bit(splits, window):
    keys = Keys((2900, 3), heads=(4, 1), scattered=True, dtype="float32")
    q, batch = keys.batch([1, 1])
    expected = attend(keys, [1, 1], window, num_threads=1)
    np.testing.assert_allclose(expected, keys.expected(q, batch, window), rtol=0, atol=5e-6)
    for num_threads in (2, 3, 7):
        np.testing.assert_array_equal(
            attend(keys, [1, 1], window, num_threads=num_threads), expected
        )


def test_equal_items_are_not_split_by_kv_heads():
    items = plan([40] * 64, [1] * 64, heads=(8, 4), num_threads=2)
    assert [item.heads for item in items] == [slice(0, 4)] * 2


def test_nan_in_a_query_affects_only_its_own_result():
    keys = Keys(LENGTHS, heads=(9, 3), scattered=True)
    expected = attend(keys, [1] * 8)
    keys.q[keys.starts[4] - 1] = np.nan
    got = attend(keys, [1] * 8)
    assert np.isnan(got[3]).all()
    np.testing.assert_array_equal(np.delete(got, 3, 0), np.delete(expected, 3, 0))


def test_using_all_rows_of_a_product_changes_no_bit(monkeypatch):
    """With 3 query heads for each KV head, a decode uses 3 of 4 rows, and a prompt uses all."""
    keys = Keys(LENGTHS, heads=(9, 3), scattered=False, dtype="float32")
    packed = attend(keys, LENGTHS)
    monkeypatch.setattr(Geometry, "rows_are_alike", False)
    np.testing.assert_array_equal(attend(keys, LENGTHS), packed)


def test_a_new_cache_is_zero_and_head_major():
    shape = KVCacheShape(num_layers=2, num_blocks=5, block_size=3, num_kv_heads=2, head_dim=4)
    cache = new_cache(shape, np.dtype("float32"))
    assert cache.shape == (2, 2, 5, 3, 2, 4)
    assert not cache.any()
    assert head_major(cache).flags.c_contiguous


def test_a_cache_that_does_not_fit_raises_memory_error():
    shape = KVCacheShape(
        num_layers=2, num_blocks=10**12, block_size=16, num_kv_heads=2, head_dim=64
    )
    with pytest.raises(MemoryError):
        new_cache(shape, np.dtype("float32"))
