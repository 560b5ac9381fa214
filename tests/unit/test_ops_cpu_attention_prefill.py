"""Test prefills that are computed side by side, and that decodes and prefills agree bit for bit.

The caches are those of `test_ops_cpu_attention`, which are NaN in slots without a token.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from test_ops_cpu_attention import ATOL, Keys, attend, plan, work_of_threads

from mie.ops_cpu.attention import attention
from mie.ops_cpu.attention import geometry as attention_geometry
from mie.ops_cpu.attention.attention import Attention
from mie.ops_cpu.attention.geometry import Geometry
from mie.ops_cpu.threads.workers import Workers

# The tokens of each sequence, and how many of them are queries.
STEPS = {
    "equal": ([16] * 9, [16] * 9),
    "in chunks": ([100] * 4, [100] * 4),
    "the last is shorter": ([16, 16, 16, 10], [16, 16, 16, 10]),
    "unequal": ([5, 30, 17, 16, 9, 2, 29, 60, 64], [5, 30, 17, 16, 9, 2, 29, 60, 64]),
    "decodes between": ([16, 300, 16, 40, 16, 16], [16, 1, 16, 1, 16, 16]),
    "far apart": ([300, 300, 16, 16], [1, 16, 1, 16]),
    "after one beginning": ([272, 280, 265, 272, 258], [16, 24, 9, 16, 2]),
}


@pytest.fixture
def always_shared(monkeypatch):
    """Let threads share any work."""
    monkeypatch.setattr(attention, "WORTH_SHARING", 1)


@pytest.mark.parametrize("heads", [(9, 3), (4, 2)])
@pytest.mark.parametrize("window", [None, 20, 140])
@pytest.mark.parametrize("step", STEPS)
def test_prefills_side_by_side_equal_prefills_alone(always_shared, step, window, heads):
    lengths, counts = STEPS[step]
    sizes = {"heads": heads, "head_dim": 64, "dtype": "float32"}
    keys = Keys(lengths, scattered=True, **sizes)
    together = attend(keys, counts, window, num_threads=2)
    q, batch = keys.batch(counts)
    expected = keys.expected(q, batch, window)
    np.testing.assert_allclose(together, expected, rtol=0, atol=ATOL["float32"])
    for i, (first, count) in enumerate(zip(batch.cu_seqlens_q, counts, strict=False)):
        alone = Keys(lengths, scattered=True, **sizes)
        alone.lengths, alone.tables = alone.lengths[i : i + 1], alone.tables[i : i + 1]
        alone.starts = alone.starts[i : i + 2]
        own = attend(alone, [count], window, num_threads=1)
        np.testing.assert_array_equal(together[first : first + count], own)


def test_many_short_prompts_are_few_items():
    items = plan([16] * 64, [16] * 64, heads=(9, 3), head_dim=64)
    assert [item.rows.shape for item in items] == [(16, 16)] * 4
    assert {span.width for item in items for span in item.spans} == {16}


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([512, 40, 16, 16, 130, 2], [512, 40, 16, 16, 130, 2]),
        ([512, 40, 16, 16, 130, 700], [200, 1, 16, 1, 2, 1]),
    ],
)
def test_items_cover_each_query_and_head_once(lengths, counts, window, num_threads):
    sizes = {"heads": (9, 3), "head_dim": 64}
    items = plan(lengths, counts, window=window, num_threads=num_threads, **sizes)
    computed = Counter()
    for item in items:
        rows = item.rows if item.real is None else item.rows[item.real]
        computed.update(
            (row, head) for row in rows.ravel().tolist() for head in range(3)[item.heads]
        )
    assert computed == Counter((row, head) for row in range(sum(counts)) for head in range(3))


def test_threads_get_equal_prefills():
    lengths = [512, 40, 16, 16, 130, 2]
    loads = work_of_threads(plan(lengths, lengths, heads=(9, 3), head_dim=64), 2)
    assert max(loads) < 1.1 * min(loads)


@pytest.mark.parametrize(("num_prompts", "num_threads"), [(4, 1), (64, 2)])
def test_one_thread_computes_little_work(num_prompts, num_threads, monkeypatch):
    used = []
    monkeypatch.setattr(Workers, "share", lambda self, work, items, number: used.append(number))
    keys = Keys([16] * num_prompts, heads=(9, 3), scattered=False, head_dim=64)
    q, batch = keys.batch([16] * num_prompts)
    Attention(Workers(2))(q, keys.cache, 1, batch, None, is_batch_invariant=True)
    assert used == [num_threads]


@pytest.mark.parametrize("heads", [(4, 1), (9, 3)])
def test_splits_of_a_window_are_added_in_order(monkeypatch, heads):
    """The first split of a window may be the smallest: here one tile, before three of two."""
    geometry = Geometry(
        num_kv_heads=heads[1],
        heads_per_kv=heads[0] // heads[1],
        head_dim=8,
        block_size=16,
        dtype=np.dtype("float32"),
    )
    scores = 2 * geometry.num_kv_heads * geometry.num_rows * geometry.tile
    monkeypatch.setattr(attention_geometry, "SPLIT_SCORES", scores)
    tile = geometry.tile
    lengths = [10 * tile - i for i in range(20)]
    window = 7 * tile - 30  # begins at the end of the fourth tile
    keys = Keys(lengths, heads=heads, scattered=True, dtype="float32")
    decoded = attend(keys, [1] * len(lengths), window)
    in_prompts = attend(keys, [3] * len(lengths), window)
    np.testing.assert_array_equal(decoded, in_prompts[2::3])
