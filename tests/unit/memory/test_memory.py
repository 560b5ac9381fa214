"""Test the allocator's rules, one by one."""

import pytest
from audit import check_memory

from mie.base.stats.memory import WINDOW, MemoryStats
from mie.memory.layers.states import States
from mie.memory.layers.window import Window
from mie.memory.layers.windows import Windows
from mie.memory.manager import KVCacheManager
from mie.memory.pool import REGION, BlockPool
from mie.memory.table import Moves

B = 4


def manager(num_blocks=8, **settings):
    return KVCacheManager(num_blocks, B, **settings)


def opened(memory, token_ids, **settings):
    """Return a table for the tokens with nothing computed yet, or None if there is no room."""
    room = memory.find_allocation(token_ids, **settings)
    return room and memory.open_table(room, (0, 0), 0)


def compute(memory, table, count=None):
    """End the step in which the table's tokens, or the first ``count``, were stored."""
    memory.take_moves()
    memory.end_step()
    memory.commit(table, len(table.token_ids) if count is None else count)
    return table


def stored(memory, token_ids, **settings):
    """Return a table whose tokens are all stored."""
    return compute(memory, opened(memory, token_ids, **settings))


def num_cached(memory, token_ids, **settings):
    """Return how many tokens would be cache hits."""
    return memory.find_allocation(token_ids, **settings).num_computed


def fork(memory, table):
    return memory.fork(table, (0, 1), 1, list(table.token_ids))


def write(memory, table, token_id=7):
    """Write one more token, and return the copies that its place needed."""
    table.token_ids.append(token_id)
    assert memory.grow(table, len(table.token_ids))
    copies = memory.take_moves().copies
    memory.commit(table, len(table.token_ids))
    return copies


# The pool.


@pytest.mark.parametrize("misuse", ["incref", "decref"])
def test_a_free_block_cannot_be_counted(misuse):
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="free block 0"):
        getattr(pool, misuse)(0)


# Full blocks.


def test_sequences_that_computed_equal_blocks_share_one():
    memory = manager()
    tables = [opened(memory, [1] * 4), opened(memory, [1] * 4)]
    tables[1].row = 1
    memory.take_moves()
    for table in tables:
        memory.commit(table, 4)
    assert tables[0].block_ids == tables[1].block_ids
    update = (1, 0, tuple(tables[0].block_ids))
    assert memory.take_moves().updates == [update], "the runner must be told"
    assert memory.num_used == 1


# Partial blocks.


def test_a_pinned_source_never_costs_the_last_block():
    memory = manager(num_blocks=2)
    memory.close_table(stored(memory, [1, 2, 3, 4]))
    assert memory.find_allocation([1, 2, 9, 9, 9]).partial is None
    assert opened(memory, [1, 2, 9, 9, 9]).num_tokens == 0


# Forks.


@pytest.mark.parametrize("num_computed", [1, 4, 5, 7])
@pytest.mark.parametrize("kind", ["plain", "windows", "states"])
def test_a_restored_table_is_not_forked_before_it_has_run(kind, num_computed):
    memory = {
        "plain": lambda: manager(num_host_blocks=8),
        "windows": lambda: KVCacheManager(
            12,
            B,
            [Windows(Window(size=6, num_groups=1, block_size=B, max_chunk=8))],
            num_host_blocks=12,
        ),
        "states": lambda: KVCacheManager(8, B, [States(4, num_host_states=2)], num_host_blocks=8),
    }[kind]()

    def opened_with_state(host=None):
        room = memory.find_allocation(list(range(num_computed + 1)), host=host, use_cache=False)
        return memory.open_table(room, (0, 0), 0)

    host = memory.swap_out(table := compute(memory, opened_with_state(), num_computed))
    memory.close_table(table)
    memory.take_moves()
    memory.end_step()
    table = opened_with_state(host)
    assert table.num_tokens == num_computed
    with pytest.raises(AssertionError, match="only planned"):
        fork(memory, table)
    compute(memory, table)
    assert fork(memory, table).num_tokens == num_computed + 1


def test_each_writer_but_the_last_copies_a_forked_partial_block():
    memory = manager()
    parent = stored(memory, [1] * 6)
    full, partial = parent.block_ids
    forks = [parent, fork(memory, parent), fork(memory, parent)]
    assert memory.num_slots_empty == 2, "a shared block is counted once"
    copies = [write(memory, table, i) for i, table in enumerate(forks)]
    assert [len(c) for c in copies] == [1, 1, 0]
    assert [c[0][0] for c in copies[:2]] == [partial, partial]
    assert forks[2].block_ids == [full, partial]
    assert len({table.block_ids[1] for table in forks}) == 3
    assert {table.block_ids[0] for table in forks} == {full}
    check_memory(memory, forks)


# Blocks that outlive their request.


def test_cached_blocks_outlive_their_request_until_they_are_needed():
    memory = manager(num_blocks=3)
    memory.close_table(stored(memory, [1] * 8))
    assert (memory.num_used, memory.num_cached, memory.num_available) == (0, 2, 3)
    stored(memory, [2] * 12)
    assert memory.num_cached == 0
    assert memory.stats.num_evictions == 2


def test_the_least_recently_used_leaf_is_evicted_first():
    memory = manager(num_blocks=4, partial_block_sharing=False)
    root, old, new = [0] * 4, [1] * 4, [2] * 4
    for branch in (old, new):
        memory.close_table(stored(memory, root + branch))
    filler = opened(memory, [9] * 8)  # one free block, one eviction
    assert num_cached(memory, [*root, *old, 5], num_reserved=-9) == 4, "the old branch is gone"
    assert num_cached(memory, [*root, *new, 5], num_reserved=-9) == 8, "the new branch is there"
    check_memory(memory, [filler])


def test_reset_restarts_the_hit_rate():
    memory = manager(8)
    memory.stats.add_query(10, 4, 1)
    assert memory.stats.hit_rate == 0.5
    assert memory.reset_prefix_cache()
    assert memory.stats.hit_rate == 0.0
    assert memory.stats.num_hit_tokens == 4, "totals go on"
    memory.stats.add_query(10, 0, 9)
    assert memory.stats.hit_rate == 0.9


# Statistics.


def test_num_saved_does_not_count_a_block_that_is_only_pinned():
    memory = manager(num_blocks=9)
    memory.close_table(stored(memory, [5] * 4))
    stored(memory, [1] * 8)
    tables = [opened(memory, [1] * 9), opened(memory, [1] * 9)]
    assert memory.num_saved == 4
    opened(memory, [5, 5, 6])
    assert memory.num_used == 6, "the source of the copy is kept"
    assert memory.num_saved == 4, "and stands in no table"
    assert len({*tables[0].block_ids, *tables[1].block_ids}) == 4


# Finer rules.


def test_generated_tokens_are_published_as_the_prompt_was():
    memory = manager()
    table = stored(memory, [1] * 7)
    table.token_ids.append(1)
    memory.advance([table])
    memory.close_table(table)
    assert memory.num_cached == 2
    assert num_cached(memory, [1] * 9) == 8


def test_each_way_of_sharing_a_block_is_counted():
    memory = manager()
    for way, expected in [
        (lambda: stored(memory, [1] * 5), 0),
        (lambda: stored(memory, [1] * 4 + [2] * 4), 1),  # a prefix hit
        (lambda: stored(memory, [1] * 4, use_cache=False), 2),  # the merge of two equal blocks
        (lambda: fork(memory, stored(memory, [3] * 6)), 4),
    ]:
        way()
        assert memory.stats.num_shared_blocks == expected


def test_reusing_a_prefix_makes_it_recently_used():
    memory = manager(num_blocks=3)
    for token_ids in ([1] * 4, [2] * 4, [1] * 5):
        memory.close_table(stored(memory, token_ids))
    opened(memory, [9] * 8)  # one free block, one eviction
    assert num_cached(memory, [1] * 5, num_reserved=-9) == 4
    assert num_cached(memory, [2] * 5, num_reserved=-9) == 0


def test_a_cached_block_that_is_shared_gives_no_free_block():
    memory = manager(num_blocks=2)
    memory.close_table(stored(memory, [1] * 4))
    assert memory.num_available == 2
    assert memory.find_allocation([1] * 9) is None, "one block is free for two"


def test_the_planned_copy_of_a_fork_is_not_copied_on():
    memory = manager()
    parent = stored(memory, [1] * 6)
    twin = fork(memory, parent)
    parent.token_ids.append(7)
    assert memory.grow(parent, 7)
    opened(memory, [1] * 6 + [9, 9])
    sources = [source for source, _ in memory.take_moves().copies]
    assert sources == [twin.block_ids[1]] * 2, "what both read was written before this step"


def test_an_abandoned_step_leaves_no_moves():
    memory = manager(num_host_blocks=2)
    table = stored(memory, [1] * 6)
    memory.swap_out(table)
    opened(memory, [1] * 5 + [9])
    memory.end_step()
    assert memory.take_moves() == Moves()


# Runs of blocks, and the hit rate.


@pytest.mark.parametrize("num_regions", [2, 3, 7])
def test_a_table_begins_in_a_free_region_and_grows_block_by_block(num_regions):
    pool = BlockPool(num_regions * REGION + 3)
    runs = [pool.take_run(3, None) for _ in range(num_regions)]
    assert len({run[0] for run in runs}) == num_regions
    for run in runs:
        assert run[0] % REGION == 0
        assert run == tuple(range(run[0], run[0] + 3))
        assert pool.take(run[-1]) == run[-1] + 1
    freed = runs[1]
    pool.decref(*freed, freed[-1] + 1)
    in_region = range(freed[0], freed[0] + REGION)
    pool.decref(*[block for block in in_region if pool.refcount(block)])
    assert pool.take() == freed[0], "the region is wholly free again"


def test_a_region_with_a_held_block_and_an_incomplete_region_are_not_begun():
    pool = BlockPool(2 * REGION + 3)
    assert [pool.take_run(3, None)[0] for _ in range(2)] == [0, REGION]
    pool.decref(0, 1)  # block 2 is held
    assert pool.take() == 1, "the block that was freed last"
    incomplete = pool.take_run(3, 2 * REGION - 1)
    assert incomplete == (2 * REGION, 2 * REGION + 1, 2 * REGION + 2)
    pool.decref(*incomplete)
    assert pool.take() == incomplete[-1], "the block that was freed last"


def test_the_last_region_is_begun_again_when_all_its_blocks_are_free():
    pool = BlockPool(REGION)
    pool.decref(*pool.take_run(3, None))
    assert pool.take() == 0, "the region is wholly free again"


def test_the_hit_rate_covers_the_latest_requests_only():
    stats = MemoryStats()
    stats.add_query(10, 0, 0)
    for count in range(WINDOW - 1):
        assert stats.hit_rate == pytest.approx(count / (count + 1))
        stats.add_query(10, 7, 3)
    assert stats.hit_rate < 1
    stats.add_query(10, 7, 3)
    assert stats.hit_rate == 1, "the first request has left the window"
    assert stats.num_queried_tokens == 10 * (WINDOW + 1)
