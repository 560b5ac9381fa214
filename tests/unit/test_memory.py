"""Test the allocator's rules, one by one."""

import pytest

from mie.engine.audit.memory import check_memory, check_pool, walk
from mie.memory.manager import KVCacheManager
from mie.memory.pool import REGION, BlockPool
from mie.memory.table import Moves

B = 4


def manager(num_blocks=8, **settings):
    return KVCacheManager(num_blocks, B, **settings)


def opened(memory, token_ids, **settings):
    """Return a table for the tokens with nothing computed yet, or None if there is no room."""
    room = memory.find_room(token_ids, **settings)
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
    return memory.find_room(token_ids, **settings).num_computed


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


def test_out_of_memory_is_a_value():
    memory = manager(num_blocks=1)
    table = stored(memory, [1] * 4)
    assert memory.find_room([2]) is None
    assert memory.grow(table, 5) is False


def test_a_block_is_free_when_its_last_holder_leaves():
    pool = BlockPool(1)
    block_id = pool.take()
    pool.incref(block_id)
    pool.decref(block_id)
    assert pool.num_free == 0
    pool.decref(block_id)
    assert pool.num_free == 1
    check_pool(pool)


@pytest.mark.parametrize("misuse", ["incref", "decref"])
def test_a_free_block_cannot_be_counted(misuse):
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="free block 0"):
        getattr(pool, misuse)(0)


# Opening and growing, which are all or nothing.


def test_looking_for_room_takes_nothing():
    memory = manager(num_blocks=2)
    assert memory.find_room([0] * 9) is None
    assert memory.find_room([0] * 8).num_new == 2
    assert memory.num_available == 2
    check_memory(memory, [])


def test_a_table_is_opened_with_blocks_for_all_its_tokens():
    memory = manager()
    table = opened(memory, [0] * 9)
    assert len(table.block_ids) == 3
    assert memory.take_moves().updates == [(0, 0, tuple(table.block_ids))]


def test_growing_is_all_or_nothing():
    memory = manager(num_blocks=2)
    table = stored(memory, [0] * 4)
    assert not memory.grow(table, 9)
    assert len(table.block_ids) == 1
    assert memory.num_available == 1
    assert memory.grow(table, 8)
    assert len(table.block_ids) == 2


def test_spare_blocks_must_be_left_over():
    memory = manager(num_blocks=4)
    assert memory.find_room([0] * 8, num_spare=3) is None
    assert memory.find_room([0] * 8, num_spare=2).num_new == 2


# Full blocks.


def test_full_blocks_are_shared_and_the_last_token_is_always_computed():
    memory = manager(partial_block_sharing=False)
    first = stored(memory, list(range(8)))
    same, longer = opened(memory, list(range(8))), opened(memory, list(range(9)))
    assert same.num_tokens == 4
    assert longer.num_tokens == 8
    assert longer.block_ids[:2] == first.block_ids
    assert memory.num_saved == 3


def test_tokens_are_compared_with_everything_before_them():
    memory = manager()
    stored(memory, [1] * 8)
    assert num_cached(memory, [2] * 4 + [1] * 5) == 0


def test_a_salt_separates_tenants():
    memory = manager()
    stored(memory, [1] * 6, salt="a")
    assert num_cached(memory, [1] * 7, salt="b") == 0
    assert num_cached(memory, [1] * 7) == 0
    assert num_cached(memory, [1] * 7, salt="a") == 6


def test_without_prefix_caching_nothing_is_shared_or_kept():
    memory = manager(enable_prefix_caching=False)
    table = stored(memory, [1] * 8)
    assert num_cached(memory, [1] * 9) == 0
    memory.close_table(table)
    assert memory.num_cached == 0
    assert memory.num_available == 8


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


def test_the_beginning_of_a_block_is_reused_by_a_copy():
    memory = manager()
    first = stored(memory, [1, 2, 3, 4, 5, 6, 7, 8])
    other = opened(memory, [1, 2, 3, 4, 5, 6, 9, 9])
    assert other.num_tokens == 6
    assert other.block_ids[0] == first.block_ids[0]
    assert memory.take_moves().copies == [(first.block_ids[1], other.block_ids[1])]
    assert other.num_copies == 1


def test_the_best_of_many_children_is_found():
    memory = manager(num_blocks=40)
    for middle in range(30):
        memory.close_table(stored(memory, [0, 0, 0, 0, 5, middle, middle, 5]))
    best = [0, 0, 0, 0, 5, 17, 17, 6, 1]
    assert memory.find_room(best).num_computed == 7
    assert memory.find_room([0, 0, 0, 0, 5, 99, 1]).num_computed == 5
    assert memory.find_room([0, 0, 0, 0, 4, 17, 1]).num_computed == 4


def test_a_running_sequences_block_lends_what_was_written_before_this_step():
    memory = manager()
    owner = stored(memory, [1, 2, 3, 4, 5, 6])
    owner.token_ids.append(7)
    assert memory.grow(owner, 7)  # being written in this step
    borrower = opened(memory, [1, 2, 3, 4, 5, 6, 7, 8])
    assert borrower.num_tokens == 6
    assert borrower.block_ids[1] != owner.block_ids[1]
    memory.take_moves()
    memory.end_step()
    memory.commit(owner, 7)
    assert owner.block_ids[1] not in borrower.block_ids


def test_a_copy_that_is_only_planned_is_not_copied_on():
    memory = manager()
    source = stored(memory, [1, 2, 3, 4, 5, 6])
    for _ in range(2):
        opened(memory, [1, 2, 3, 4, 5, 6, 9, 9])
    assert {copied for copied, _ in memory.take_moves().copies} == {source.block_ids[1]}


def test_the_source_of_a_copy_is_pinned_until_the_step_ends():
    memory = manager(num_blocks=3)
    memory.close_table(stored(memory, [1, 2, 3, 4]))
    borrower = opened(memory, [1, 2, 9])
    assert memory.num_cached == 0, "the source cannot be evicted"
    assert memory.num_available == 1
    memory.take_moves()
    memory.end_step()
    assert memory.num_cached == 1
    check_memory(memory, [borrower])


def test_a_pinned_source_never_costs_the_last_block():
    memory = manager(num_blocks=2)
    memory.close_table(stored(memory, [1, 2, 3, 4]))
    assert memory.find_room([1, 2, 9, 9, 9]).partial is None
    assert opened(memory, [1, 2, 9, 9, 9]).num_tokens == 0


def test_partial_sharing_can_be_turned_off():
    memory = manager(partial_block_sharing=False)
    stored(memory, [1, 2, 3, 4, 5, 6, 7, 8])
    assert num_cached(memory, [1, 2, 3, 4, 5, 6, 9, 9]) == 4


# Forks.


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


def test_a_copy_that_does_not_fit_leaves_no_trace():
    memory = manager(num_blocks=1)
    parent = stored(memory, [1, 2])
    twin = fork(memory, parent)
    assert not memory.grow(twin, 3)
    assert twin.block_ids == parent.block_ids
    check_memory(memory, [parent, twin])


def test_a_sibling_that_leaves_takes_its_share_of_the_empty_slots_along():
    memory = manager()
    parent = stored(memory, [1] * 5)
    twin = fork(memory, parent)
    memory.close_table(twin)
    assert memory.num_slots_empty == 3
    check_memory(memory, [parent])


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
    assert num_cached(memory, [*root, *old, 5], num_spare=-9) == 4, "the old branch is gone"
    assert num_cached(memory, [*root, *new, 5], num_spare=-9) == 8, "root and new branch are there"
    check_memory(memory, [filler])


def test_blocks_in_use_are_never_evicted():
    memory = manager(num_blocks=2)
    table = stored(memory, [1] * 4)
    assert opened(memory, [2] * 8) is None
    assert opened(memory, [1] * 5).block_ids[0] == table.block_ids[0]


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_the_cache_keeps_to_its_budget(budget):
    memory = manager(max_cached_blocks=budget)
    for token_id in range(4):
        memory.close_table(stored(memory, [token_id] * 8))
        assert memory.num_cached <= budget
    check_memory(memory, [])
    assert memory.num_cached == budget


def test_reset_restarts_the_hit_rate():
    memory = manager(8)
    memory.stats.add_query(10, 4, 1)
    assert memory.stats.hit_rate == 0.5
    assert memory.reset_prefix_cache()
    assert memory.stats.hit_rate == 0.0
    assert memory.stats.num_hit_tokens == 4, "totals go on"
    memory.stats.add_query(10, 0, 9)
    assert memory.stats.hit_rate == 0.9


def test_reset_clears_the_cache_unless_blocks_are_in_use():
    memory = manager()
    table = stored(memory, [1] * 8, salt="tenant")
    assert not memory.reset_prefix_cache()
    assert num_cached(memory, [1] * 9, salt="tenant") == 8
    memory.close_table(table)
    assert memory.reset_prefix_cache()
    assert memory.num_cached == 0
    assert memory._prefix._roots == {}, "a tenant that has nothing costs nothing"


# Swapping.


def test_a_swapped_table_holds_no_block_and_returns_complete():
    memory = manager(num_blocks=4, num_host_blocks=3, enable_prefix_caching=False)
    table = stored(memory, [1, 2, 3, 4, 5, 6])
    device = list(table.block_ids)
    host = memory.swap_out(table)
    memory.close_table(table)
    assert memory.take_moves().exports == list(zip(device, host.block_ids, strict=True))
    assert memory.num_used == 0
    check_memory(memory, [], [host])
    back = opened(memory, [1, 2, 3, 4, 5, 6, 7], host=host)
    assert back.num_tokens == 6
    assert memory.take_moves().imports == list(zip(host.block_ids, back.block_ids, strict=True))
    check_memory(memory, [back])


def test_swapping_in_looks_into_the_prefix_cache_first():
    memory = manager(num_host_blocks=3)
    table = stored(memory, [1, 2, 3, 4, 5, 6])
    cached = table.block_ids[0]
    host = memory.swap_out(table)
    memory.close_table(table)
    memory.take_moves()
    back = opened(memory, [1, 2, 3, 4, 5, 6, 7], host=host)
    assert back.block_ids[0] == cached
    assert memory.take_moves().imports == [(host.block_ids[1], back.block_ids[1])]
    assert memory.stats.num_imported == 1


def test_the_cache_may_know_more_than_was_swapped_out():
    memory = manager(num_host_blocks=3)
    table = compute(memory, opened(memory, [1] * 9), 3)
    host = memory.swap_out(table)
    memory.close_table(table)
    stored(memory, [1] * 8)
    back = opened(memory, [1] * 9, host=host)
    assert back.num_tokens == 8
    memory.take_moves()
    assert memory.stats.num_imported == 0
    check_memory(memory, [t for n in walk(memory._prefix) for t in n.tables])


def test_a_full_host_pool_is_a_value_and_nothing_is_done():
    memory = manager(num_host_blocks=1)
    table = stored(memory, [1] * 5)
    assert memory.swap_out(table) is None
    assert memory.take_moves().exports == []
    check_memory(memory, [table])


def test_shared_blocks_are_exported_for_each_sibling():
    memory = manager(num_host_blocks=4)
    parent = stored(memory, [1] * 6)
    hosts = []
    for table in (parent, fork(memory, parent)):
        hosts.append(memory.swap_out(table))
        memory.close_table(table)
    assert len({h for host in hosts for h in host.block_ids}) == 4
    check_memory(memory, [], hosts)
    memory.drop_host(hosts[0])
    check_memory(memory, [], hosts[1:])


# Statistics.


def test_hits_are_counted_by_kind_and_over_a_window():
    memory = manager()
    memory.stats.add_query(10, 4, 2)
    memory.stats.add_query(10, 0, 0)
    stats = memory.stats
    counts = (stats.num_queried_tokens, stats.num_hit_tokens, stats.num_partial_hit_tokens)
    assert counts == (20, 4, 2)
    assert stats.hit_rate == 0.3
    for _ in range(1000):
        memory.stats.add_query(1, 1, 0)
    assert memory.stats.hit_rate == 1.0


def test_fragmentation_is_reserved_minus_used_slots():
    memory = manager()
    table = opened(memory, [1] * 6)
    assert memory.num_slots_empty == 8
    compute(memory, table)
    assert memory.num_slots_empty == 2
    other = opened(memory, [1] * 7)
    assert other.num_tokens == 6
    assert memory.num_slots_empty == 2 + 2
    memory.end_step()
    memory.close_table(table)
    assert memory.num_slots_empty == 2


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


def test_a_table_grows_into_its_neighbours():
    """Each of two tables begins in its own region and continues where it ended."""
    memory = KVCacheManager(3 * REGION, 2, enable_prefix_caching=False)
    tables = []
    for row in (0, 1):
        room = memory.find_room([1] * 6)
        assert room is not None
        tables.append(memory.open_table(room, (row, 0), row))
    for num_tokens in (7, 9, 11):
        for table in tables:
            assert memory.grow(table, num_tokens)
    assert tables[0].block_ids == [0, 1, 2, 3, 4, 5]
    assert tables[1].block_ids == [REGION + i for i in range(6)]


def test_any_block_is_used_without_a_free_region_or_neighbour():
    pool = BlockPool(2 * REGION + 1)
    taken = [pool.take(), pool.take(), pool.take(REGION - 1)]
    assert taken == [0, REGION, 1]  # no region is free, and REGION is held
    assert sorted(taken + [pool.take(2 * REGION) for _ in range(2 * REGION - 2)]) == list(
        range(2 * REGION + 1)
    )
    assert pool.num_free == 0
    pool.decref(*range(2 * REGION + 1))
    assert pool.take() in (0, REGION)
    check_pool(pool)


# Finer rules.


def test_an_unfinished_prompt_lends_its_partial_block():
    memory = manager()
    owner = compute(memory, opened(memory, list(range(12))), 6)
    opened(memory, [0, 1, 2, 3, 4, 5, 99])
    [(source, _)] = memory.take_moves().copies
    assert source == owner.block_ids[1], "the second of three"


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
    assert num_cached(memory, [1] * 5, num_spare=-9) == 4
    assert num_cached(memory, [2] * 5, num_spare=-9) == 0


def test_a_cached_block_that_is_shared_gives_no_free_block():
    memory = manager(num_blocks=2)
    memory.close_table(stored(memory, [1] * 4))
    assert memory.num_available == 2
    assert memory.find_room([1] * 9) is None, "one cached block to share, and one free for two"


def test_a_tenant_that_stored_nothing_is_forgotten():
    memory = manager()
    memory.close_table(opened(memory, [1], salt="tenant"))
    assert memory._prefix._roots == {}


def test_swapped_out_blocks_are_not_patched_from_the_cache():
    memory = manager(num_host_blocks=2)
    table = stored(memory, [1, 2, 3, 4, 5, 6])
    host = memory.swap_out(table)
    memory.close_table(table)
    stored(memory, [1, 2, 3, 4, 5, 9, 9, 9])
    back = opened(memory, [1, 2, 3, 4, 5, 6, 7], host=host)
    moves = memory.take_moves()
    assert moves.imports == [(host.block_ids[1], back.block_ids[1])]
    assert moves.copies == [], "it would come after the import, and undo it"


def test_the_planned_copy_of_a_fork_is_not_copied_on():
    memory = manager()
    parent = stored(memory, [1] * 6)
    twin = fork(memory, parent)
    parent.token_ids.append(7)
    assert memory.grow(parent, 7)
    opened(memory, [1] * 6 + [9, 9])
    sources = [source for source, _ in memory.take_moves().copies]
    assert sources == [twin.block_ids[1]] * 2, "what both read was written before this step"


def test_a_source_is_pinned_before_a_block_is_taken():
    memory = manager(num_blocks=3)
    for token_id in (1, 2):
        memory.close_table(stored(memory, [token_id] * 4))
    borrower = opened(memory, [1, 1, 9, 9, 9])  # one free block, one eviction
    [(source, target)] = memory.take_moves().copies
    assert target == borrower.block_ids[0]
    assert source not in borrower.block_ids


def test_an_abandoned_step_leaves_no_moves():
    memory = manager(num_host_blocks=2)
    table = stored(memory, [1] * 6)
    memory.swap_out(table)
    opened(memory, [1] * 5 + [9])
    memory.end_step()
    assert memory.take_moves() == Moves()
