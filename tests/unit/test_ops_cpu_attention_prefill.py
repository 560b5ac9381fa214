"""Prefills that are computed side by side, and what they have in common with decodes: bit for bit,
in the caches of `test_ops_cpu_attention`, which are NaN where no token is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from test_ops_cpu_attention import ATOL, Keys, attend

from mie.ops_cpu.attention import attention
from mie.ops_cpu.attention import plan as attention_plan
from mie.ops_cpu.attention import prefill_plan as attention_prefill_plan
from mie.ops_cpu.attention.plan import Geometry, Tiles
from mie.ops_cpu.attention.prefill_plan import Products, plan_prefills

# By name: the tokens of each sequence, and how many of them are queries.
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
    """Threads that share the least work."""
    for module in (attention, attention_prefill_plan):
        monkeypatch.setattr(module, "WORTH_SHARING", 0)


@pytest.mark.parametrize("heads", [(9, 3), (4, 2)])
@pytest.mark.parametrize("window", [None, 20, 140])
@pytest.mark.parametrize("step", STEPS)
def test_side_by_side_as_alone(always_shared, step, window, heads):
    lengths, counts = STEPS[step]
    sizes = {"heads": heads, "head_dim": 64, "dtype": "float32"}  # of which tiles are read in part
    keys = Keys(lengths, strewn=True, **sizes)
    together = attend(keys, counts, window, num_threads=2)
    q, batch = keys.batch(counts)
    expected = keys.expected(q, batch, window)
    np.testing.assert_allclose(together, expected, rtol=0, atol=ATOL["float32"])
    for i, (first, count) in enumerate(zip(batch.cu_seqlens_q, counts, strict=False)):
        alone = Keys(lengths, strewn=True, **sizes)
        alone.lengths, alone.tables = alone.lengths[i : i + 1], alone.tables[i : i + 1]
        alone.starts = alone.starts[i : i + 2]
        own = attend(alone, [count], window, num_threads=1)
        np.testing.assert_array_equal(together[first : first + count], own)


def planned(lengths, counts, *, num_threads=2, heads=(9, 3)):
    """The shares of the threads, head size 64."""
    geometry = Geometry(
        num_kv_heads=heads[1], group=heads[0] // heads[1], head_dim=64, block_size=16
    )
    _, batch = Keys(lengths, heads=heads, strewn=False).batch(counts)
    products = Products.like_decode(geometry, packs=True, shortens=True)
    starts, tiles = batch.cu_seqlens_q.tolist(), Tiles(batch, geometry)
    chosen = range(len(lengths))
    return plan_prefills(starts, chosen, tiles, geometry, None, products, num_threads)


def test_many_short_prompts_are_few_jobs():
    shares = planned([16] * 64, [16] * 64)
    assert [len(share) for share in shares] == [2, 2]
    assert {job.chunk.rows.shape for share in shares for job in share} == {(16, 16)}
    assert {span.width for share in shares for job in share for span in job.chunk.spans} == {16}


def test_the_threads_get_the_same_and_all_of_it():
    lengths = [512, 40, 16, 16, 130, 2]
    shares = planned(lengths, lengths)
    costs = [sum(job.cost for job in share) for share in shares]
    assert max(costs) < 1.1 * min(costs)
    done = Counter()
    for job in (job for share in shares for job in share):
        rows = job.chunk.rows if job.chunk.own is None else job.chunk.rows[job.chunk.own]
        done.update((row, head) for row in rows.ravel().tolist() for head in range(3)[job.heads])
    assert done == Counter((row, head) for row in range(sum(lengths)) for head in range(3))


def test_little_is_done_by_one_thread():
    assert [len(share) for share in planned([16] * 4, [16] * 4)] == [2, 0]


@pytest.mark.parametrize("heads", [(4, 1), (9, 3)])
def test_groups_of_a_window_are_added_up_in_order(monkeypatch, heads):
    """A decode takes units of equal size together, and of a window the first may be the smallest:
    here of one tile, before three groups of two."""
    geometry = Geometry(
        num_kv_heads=heads[1], group=heads[0] // heads[1], head_dim=8, block_size=16
    )
    tiles_of_group = 2
    scores = tiles_of_group * geometry.num_kv_heads * geometry.num_rows * geometry.tile
    for module in (attention_plan, attention_prefill_plan):
        monkeypatch.setattr(module, "SCORES", scores)
    tile = geometry.tile
    lengths = [10 * tile - i for i in range(20)]
    window = 7 * tile - 30  # from the end of the fourth tile on
    keys = Keys(lengths, heads=heads, strewn=True, dtype="float32")
    decoded = attend(keys, [1] * len(lengths), window)
    in_prompts = attend(keys, [3] * len(lengths), window)
    np.testing.assert_array_equal(decoded, in_prompts[2::3])
