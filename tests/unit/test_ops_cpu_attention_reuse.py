"""Compare attention that keeps its plans from step to step with attention that plans each step.

Every slot without a token is NaN, and so is a block again as soon as its sequence leaves.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mie.ops.attention import paged_attention
from mie.ops.backend import KVCacheShape, StepBatch
from mie.ops_cpu.attention import attention as attention_module
from mie.ops_cpu.attention import geometry as attention_geometry
from mie.ops_cpu.attention.attention import Attention
from mie.ops_cpu.attention.geometry import Geometry
from mie.ops_cpu.attention.plan import Planner
from mie.ops_cpu.kv_cache import new_cache
from mie.ops_cpu.threads.workers import Workers

BLOCK_SIZE, NUM_BLOCKS, HEAD_DIM = 16, 80, 16


class Load:
    """Sequences that come, decode, are preempted and leave, with their tokens in a cache."""

    def __init__(self, seed, heads):
        self.rng = np.random.default_rng(seed)
        self.heads = heads
        shape = KVCacheShape(
            num_layers=2,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            num_kv_heads=heads[1],
            head_dim=HEAD_DIM,
        )
        self.cache = new_cache(shape, np.dtype("float32"))
        self.cache.fill(np.nan)
        self.free = list(range(NUM_BLOCKS))
        self.lengths: list[int] = []
        self.blocks: list[list[int]] = []

    def join(self, length):
        """Add a sequence whose first ``length`` tokens are stored."""
        self.lengths.append(0)
        self.blocks.append([])
        self.extend(len(self.lengths) - 1, length)

    def leave(self, s):
        """Remove a sequence. Another may get its blocks at once."""
        self.cache[:, :, self.blocks[s]] = np.nan
        self.free += self.blocks.pop(s)
        del self.lengths[s]

    def extend(self, s, count):
        for position in range(self.lengths[s], self.lengths[s] + count):
            if position % BLOCK_SIZE == 0:
                self.blocks[s].append(self.free.pop(int(self.rng.integers(len(self.free)))))
            block = self.blocks[s][-1]
            keys = self.rng.normal(size=(2, 2, self.heads[1], HEAD_DIM))
            self.cache[:, :, block, position % BLOCK_SIZE] = keys
        self.lengths[s] += count

    def step(self, counts):
        """Store so many tokens of each sequence. Return their queries and the batch."""
        for s, count in enumerate(counts):
            self.extend(s, count)
        tables = np.full((len(counts), max(map(len, self.blocks))), 10**9)
        for row, blocks in zip(tables, self.blocks, strict=True):
            row[: len(blocks)] = blocks
        empty = np.empty(0, np.int64)
        batch = StepBatch(
            token_ids=empty,
            positions=empty,
            slot_mapping=empty,
            cu_seqlens_q=np.concatenate([[0], np.cumsum(counts)]),
            seq_lens=np.array(self.lengths),
            block_tables=tables,
            logits_rows=empty,
        )
        q = self.rng.normal(size=(sum(counts), self.heads[0], HEAD_DIM)).astype(np.float32)
        return q, batch


@pytest.fixture
def num_plans(monkeypatch):
    """The number of plans that were made, as a list of one."""
    made = [0]
    plain = Planner.items

    def items(self, num_threads):
        made[0] += 1
        return plain(self, num_threads)

    monkeypatch.setattr(Planner, "items", items)
    return made


def attend(attention, load, q, batch, window, invariant):
    return [
        attention(q, load.cache, layer, batch, window, is_batch_invariant=invariant)
        for layer in (0, 1)
    ]


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 2)])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_any_mix_of_steps_equals_fresh_plans(heads, num_threads, num_plans, monkeypatch):
    """Long sequences are several splits, which threads share."""
    monkeypatch.setattr(attention_module, "WORTH_SHARING", 1)
    monkeypatch.setattr(attention_geometry, "SPLIT_SCORES", 1 << 11)
    load = Load(seed=num_threads, heads=heads)
    rng, kept = load.rng, Attention(Workers(num_threads))
    for length in (120, 31, 250):
        load.join(length)
    made = num_steps = 0
    for _ in range(60):
        happens = rng.random()
        if happens < 0.06 and len(load.lengths) < 4:
            load.join(int(rng.integers(1, 140)))
        elif (happens < 0.12 and len(load.lengths) > 1) or max(load.lengths) > 290:
            load.leave(int(np.argmax(load.lengths)))
        elif happens < 0.15:  # preempted and computed again, in other blocks or the same
            load.leave(0)
            load.join(int(rng.integers(1, 140)))
        counts = [1] * len(load.lengths)
        if rng.random() < 0.1:
            counts[int(rng.integers(len(counts)))] = int(rng.integers(1, 6))
        q, batch = load.step(counts)
        fresh = Attention(Workers(1))
        for window, invariant in ((None, True), (20, True), (None, False)):
            expected = attend(fresh, load, q, batch, window, invariant)
            before = num_plans[0]
            got = attend(kept, load, q, batch, window, invariant)
            if window is None:
                made, num_steps = made + num_plans[0] - before, num_steps + 1
            np.testing.assert_array_equal(got, expected)
        lay = batch.block_tables, batch.cu_seqlens_q, batch.seq_lens, HEAD_DIM**-0.5, None
        defined = paged_attention(q, *load.cache[1], *lay)
        np.testing.assert_allclose(got[1], defined, rtol=0, atol=5e-6)
    assert made < 0.7 * num_steps  # or nothing was tested


def test_a_plan_serves_until_a_sequence_needs_another_block(num_plans):
    load, attention = Load(seed=0, heads=(4, 2)), Attention(Workers(1))
    load.join(130)
    load.join(8)
    expected = 1
    for _ in range(2 * BLOCK_SIZE):
        needs_block = any(length % BLOCK_SIZE == 0 for length in load.lengths)
        expected += needs_block
        attend(attention, load, *load.step([1, 1]), None, True)
        assert num_plans[0] == expected
    assert expected == 5


def test_a_shorter_sequence_may_follow_in_the_same_blocks():
    """Its slots past the end are hidden and may hold NaN, although the plan saw them filled."""
    load, attention = Load(seed=0, heads=(4, 2)), Attention(Workers(1))
    load.join(127)
    attend(attention, load, *load.step([1]), None, True)
    for _ in range(2):
        [blocks], load.lengths[0] = load.blocks, 119
        load.cache[:, :, blocks[-1], 7:] = np.nan
        q, batch = load.step([1])
        got = attend(attention, load, q, batch, None, True)
        expected = attend(Attention(Workers(1)), load, q, batch, None, True)
        np.testing.assert_array_equal(got, expected)
        assert np.isfinite(got).all()


def test_a_sequence_of_the_same_length_may_be_in_other_blocks():
    load, attention = Load(seed=0, heads=(4, 2)), Attention(Workers(1))
    for _ in range(3):
        load.join(40)
        q, batch = load.step([1])
        got = attend(attention, load, q, batch, None, True)
        expected = attend(Attention(Workers(1)), load, q, batch, None, True)
        np.testing.assert_array_equal(got, expected)
        load.leave(0)


def test_a_table_may_name_the_next_block_in_advance():
    load, attention = Load(seed=0, heads=(4, 2)), Attention(Workers(1))
    load.join(BLOCK_SIZE - 1)
    steps = [load.step([1]) for _ in range(2)]
    for q, batch in steps:
        batch = replace(batch, block_tables=steps[1][1].block_tables)
        got = attend(attention, load, q, batch, None, True)
        expected = attend(Attention(Workers(1)), load, q, batch, None, True)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("heads", [(4, 2), (8, 2)])
@pytest.mark.parametrize("jumps", [(), (5,), (9,)])
def test_a_plan_of_one_sequence_serves_while_its_blocks_are_adjacent(heads, jumps, num_plans):
    """The last of its blocks is at the end of the pool, and those after ``jumps`` are elsewhere."""
    load, attention = Load(seed=0, heads=heads), Attention(Workers(1))
    tile = geometry_of(load).tile
    num_blocks = 2 * tile // BLOCK_SIZE - 1
    last = NUM_BLOCKS - 1
    order = [last - i - 3 * sum(i < jump for jump in jumps) for i in reversed(range(num_blocks))]
    load.free = order[:1]
    load.join(3)
    while True:
        if load.lengths[0] % BLOCK_SIZE == 0:
            if len(load.blocks[0]) == num_blocks:
                break
            load.free = [order[len(load.blocks[0])]]
        q, batch = load.step([1])
        before = num_plans[0]
        expected = attend(Attention(Workers(1)), load, q, batch, None, True)
        fresh, num_plans[0] = num_plans[0], before
        assert fresh == before + 1
        np.testing.assert_array_equal(attend(attention, load, q, batch, None, True), expected)
    if geometry_of(load).short_sums_are_exact and not jumps:
        assert num_plans[0] == 2  # one for each tile
    else:
        assert num_plans[0] > 2


def test_another_sequence_may_have_one_more_block():
    load, attention = Load(seed=0, heads=(4, 2)), Attention(Workers(1))
    for block_ids in ([10, 11], [9, 11, 12], [9, 11, 12, 13]):
        load.free = []
        for count, block_id in enumerate(block_ids):
            load.free.append(block_id)
            if count == 0:
                load.join(BLOCK_SIZE)
            else:
                load.extend(0, BLOCK_SIZE - (block_id == block_ids[-1]))
        q, batch = load.step([1])
        got = attend(attention, load, q, batch, None, True)
        expected = attend(Attention(Workers(1)), load, q, batch, None, True)
        np.testing.assert_array_equal(got, expected)
        load.leave(0)


def geometry_of(load):
    return Geometry(
        num_kv_heads=load.heads[1],
        heads_per_kv=load.heads[0] // load.heads[1],
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        dtype=np.dtype("float32"),
    )


@pytest.mark.parametrize("window", [None, 20])
def test_a_thread_may_read_a_split_for_one_head_and_for_several(window, monkeypatch):
    """Some items are cut by heads, and others with the same keys are not."""
    monkeypatch.setattr(attention_module, "WORTH_SHARING", 1)
    monkeypatch.setattr(attention_geometry, "SPLIT_SCORES", 1 << 11)
    workers = Workers(2)
    workers.are_resting = True  # so one thread computes all items
    for lengths in ((60, 90), (11, 24), (150, 3)):
        load, attention = Load(seed=0, heads=(8, 2)), Attention(workers)
        for length in lengths:
            load.join(length)
        for num_tokens in (100, 113, 127):
            q, batch = load.step([1, num_tokens])
            got = attend(attention, load, q, batch, window, True)
            expected = attend(Attention(Workers(1)), load, q, batch, window, True)
            np.testing.assert_array_equal(got, expected)
