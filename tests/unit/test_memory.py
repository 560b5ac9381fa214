"""The allocator's rules, one by one."""

import pytest

from mie.memory.manager import KVCacheManager
from mie.memory.pool import BlockPool

B = 4


def manager(num_blocks=8, enable_prefix_caching=True):
    return KVCacheManager(num_blocks, B, enable_prefix_caching)


def compute(memory, table, token_ids):
    """Store all the tokens: the copies that were needed, or None."""
    copies = memory.grow(table, len(token_ids))
    if copies is not None:
        memory.commit(table, token_ids, len(token_ids))
    return copies


def test_out_of_memory_is_a_value():
    pool = BlockPool(2)
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    assert pool.allocate() is None


def test_a_block_is_free_when_its_last_holder_leaves():
    pool = BlockPool(1)
    block_id = pool.allocate()
    pool.incref(block_id)
    pool.decref(block_id)
    assert pool.num_free == 0
    pool.decref(block_id)
    assert pool.num_free == 1
    pool.check_invariants()


@pytest.mark.parametrize("misuse", ["incref", "decref"])
def test_a_free_block_cannot_be_counted(misuse):
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="free block 0"):
        getattr(pool, misuse)(0)


def test_a_table_cannot_be_closed_twice():
    memory = manager()
    table = memory.open_table([1])
    memory.close_table(table)
    with pytest.raises(AssertionError, match="closed twice"):
        memory.close_table(table)


def test_growing_is_all_or_nothing():
    memory = manager(num_blocks=2)
    table = memory.open_table([0] * 9)
    assert memory.grow(table, 9) is None
    assert table.block_ids == []
    assert memory.num_available == 2
    assert memory.grow(table, 8) == ()
    assert len(table.block_ids) == 2


def test_full_blocks_are_shared_and_the_last_token_is_always_computed():
    memory = manager()
    first = memory.open_table(list(range(8)))
    compute(memory, first, list(range(8)))
    same = memory.open_table(list(range(8)))
    longer = memory.open_table(list(range(9)))
    assert same.num_cached == 4
    assert longer.num_cached == 8
    assert longer.block_ids == first.block_ids


def test_tokens_are_compared_with_everything_before_them():
    memory = manager()
    compute(memory, memory.open_table([1] * 8), [1] * 8)
    other = memory.open_table([2] * 4 + [1] * 5)
    assert other.num_cached == 0


def test_a_salt_keeps_tenants_apart():
    memory = manager()
    compute(memory, memory.open_table([1] * 5, salt="a"), [1] * 5)
    assert memory.open_table([1] * 5, salt="b").num_cached == 0
    assert memory.open_table([1] * 5, salt="a").num_cached == 4


def test_without_prefix_caching_nothing_is_shared_or_kept():
    memory = manager(enable_prefix_caching=False)
    table = memory.open_table([1] * 8)
    compute(memory, table, [1] * 8)
    assert memory.open_table([1] * 9).num_cached == 0
    memory.close_table(table)
    assert memory.num_cached == 0
    assert memory.num_available == 8


def test_two_that_computed_the_same_block_end_up_sharing_it():
    memory = manager()
    tables = [memory.open_table([1] * 4) for _ in range(2)]
    for table in tables:
        assert memory.grow(table, 4) == ()
    for table in tables:
        table.take_changes()
        memory.commit(table, [1] * 4, 4)
    assert tables[0].block_ids == tables[1].block_ids
    assert tables[1].take_changes() == ((0, tables[0].block_ids[0]),), "the runner must be told"
    assert memory.num_used == 1


def test_each_writer_but_the_last_copies_a_forked_partial_block():
    memory = manager()
    parent = memory.open_table([1] * 6)
    compute(memory, parent, [1] * 6)
    full, partial = parent.block_ids
    forks = [parent, memory.fork(parent), memory.fork(parent)]
    copies = [compute(memory, table, [1] * 6 + [i]) for i, table in enumerate(forks)]
    assert [len(c) for c in copies] == [1, 1, 0]
    assert [c[0][0] for c in copies[:2]] == [partial, partial]
    assert forks[2].block_ids == [full, partial]
    assert len({table.block_ids[1] for table in forks}) == 3
    assert {table.block_ids[0] for table in forks} == {full}


def test_a_copy_that_does_not_fit_leaves_no_trace():
    memory = manager(num_blocks=1)
    parent = memory.open_table([1, 2])
    compute(memory, parent, [1, 2])
    twin = memory.fork(parent)
    assert memory.grow(twin, 3) is None
    assert twin.block_ids == parent.block_ids
    memory.check_invariants([parent, twin])


def test_cached_blocks_outlive_their_request_until_they_are_needed():
    memory = manager(num_blocks=3)
    table = memory.open_table([1] * 8)
    compute(memory, table, [1] * 8)
    memory.close_table(table)
    assert (memory.num_used, memory.num_cached, memory.num_available) == (0, 2, 3)
    big = memory.open_table([2] * 12)
    assert memory.grow(big, 12) == ()
    assert memory.num_cached == 0
    assert memory.open_table([1] * 9).num_cached == 0


def test_leaves_go_first_and_the_least_recently_used_of_them():
    memory = manager(num_blocks=4)
    root, old, new = [0] * 4, [1] * 4, [2] * 4
    for branch in (old, new):
        table = memory.open_table(root + branch)
        compute(memory, table, root + branch)
        memory.close_table(table)
    filler = memory.open_table([9] * 8)
    assert memory.grow(filler, 8) == ()  # one free block, one eviction
    assert memory.open_table([*root, *old, 5]).num_cached == 4, "the old branch is gone"
    assert memory.open_table([*root, *new, 5]).num_cached == 8, "root and new branch are there"


def test_what_is_in_use_is_never_evicted():
    memory = manager(num_blocks=2)
    table = memory.open_table([1] * 4)
    compute(memory, table, [1] * 4)
    other = memory.open_table([2] * 8)
    assert memory.grow(other, 8) is None
    assert memory.open_table([1] * 5).block_ids == table.block_ids


def test_what_came_back_into_use_is_not_evicted_for_its_age():
    memory = manager(num_blocks=3)
    for token_id in (1, 2):
        table = memory.open_table([token_id] * 4)
        compute(memory, table, [token_id] * 4)
        memory.close_table(table)
    again = memory.open_table([1] * 5)
    other = memory.open_table([3] * 8)
    assert memory.grow(other, 8) == ()
    memory.check_invariants([again, other])
    assert again.block_ids[0] not in other.block_ids


def test_many_uses_of_one_prefix_cost_no_memory():
    memory = manager()
    for _ in range(1000):
        table = memory.open_table([1] * 5)
        compute(memory, table, [1] * 5)
        memory.close_table(table)
    assert len(memory._prefix._leaves) < 100
