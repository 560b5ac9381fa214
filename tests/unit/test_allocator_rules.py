"""Test the allocator's finer rules, which mutants (`scripts/mutation/`) found untested."""

from test_memory import compute, fork, manager, num_cached, opened, stored, write

from mie.audit.memory import check_memory
from mie.memory.table import Moves

# Forks.


def test_both_sides_of_a_fork_ask_before_they_write():
    memory = manager()
    parent = stored(memory, [1] * 6)
    for table in (parent, fork(memory, parent)):
        assert table.num_writable == table.num_tokens


def test_the_runner_receives_the_blocks_of_a_fork():
    memory = manager()
    parent = stored(memory, [1] * 6)
    fork(memory, parent)
    assert memory.take_moves().updates == [(1, 0, tuple(parent.block_ids))]


def test_a_fork_lends_what_was_computed_for_its_parent():
    memory = manager()
    parent = stored(memory, [1] * 6)
    twin = fork(memory, parent)
    memory.close_table(parent)
    assert num_cached(memory, [1] * 6 + [9]) == 6
    assert memory.find_room([1] * 6 + [9]).partial.block_id == twin.block_ids[1]


def test_the_planned_copy_of_a_fork_is_not_copied_on():
    memory = manager()
    parent = stored(memory, [1] * 6)
    twin = fork(memory, parent)
    parent.token_ids.append(7)
    assert memory.grow(parent, 7)
    opened(memory, [1] * 6 + [9, 9])
    sources = [source for source, _ in memory.take_moves().copies]
    assert sources == [twin.block_ids[1]] * 2, "what both read was written before this step"


# Hits.


def test_a_salt_separates_partial_blocks():
    memory = manager()
    stored(memory, [1, 2, 3, 4])
    stored(memory, [5, 6, 7, 8], salt="a")
    assert num_cached(memory, [1, 2, 9], salt="a") == 0
    assert num_cached(memory, [5, 6, 9], salt="a") == 2
    assert num_cached(memory, [5, 6, 9]) == 0


def test_a_request_that_skips_the_cache_finds_nothing():
    memory = manager()
    stored(memory, [1] * 8)
    assert num_cached(memory, [1] * 9, use_cache=False) == 0


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


# Pins.


def test_a_source_is_pinned_before_a_block_is_taken():
    memory = manager(num_blocks=3)
    for token_id in (1, 2):
        memory.close_table(stored(memory, [token_id] * 4))
    borrower = opened(memory, [1, 1, 9, 9, 9])  # one free block, one eviction
    [(source, target)] = memory.take_moves().copies
    assert target == borrower.block_ids[0]
    assert source not in borrower.block_ids


def test_a_copied_source_that_is_in_use_stays_held():
    memory = manager()
    memory.close_table(stored(memory, [1, 2, 3, 4]))
    tables = [opened(memory, [1, 2, 9]), opened(memory, [1, 2, 3, 4, 5])]
    memory.take_moves()
    memory.end_step()
    assert memory.num_cached == 0
    check_memory(memory, tables)


# Eviction.


def test_reusing_a_prefix_makes_it_recently_used():
    memory = manager(num_blocks=3)
    for token_ids in ([1] * 4, [2] * 4, [1] * 5):
        memory.close_table(stored(memory, token_ids))
    opened(memory, [9] * 8)  # one free block, one eviction
    assert num_cached(memory, [1] * 5, num_spare=-9) == 4
    assert num_cached(memory, [2] * 5, num_spare=-9) == 0


def test_blocks_that_were_not_used_for_long_can_be_evicted():
    memory = manager(num_blocks=4)
    memory.close_table(stored(memory, [1] * 4))
    for _ in range(200):
        memory.close_table(stored(memory, [2] * 5))
    stored(memory, [3] * 16)
    assert memory.num_cached == 0


def test_a_cached_block_that_is_shared_gives_no_free_block():
    memory = manager(num_blocks=2)
    memory.close_table(stored(memory, [1] * 4))
    assert memory.num_available == 2
    assert memory.find_room([1] * 9) is None, "one cached block to share, and one free for two"


def test_a_tree_without_blocks_stays_while_a_table_is_open():
    memory = manager()
    first, second = opened(memory, [1] * 5), opened(memory, [2] * 5)
    memory.close_table(first)
    compute(memory, second)
    check_memory(memory, [second])
    assert num_cached(memory, [2] * 5) == 4


def test_a_tenant_that_stored_nothing_is_forgotten():
    memory = manager()
    memory.close_table(opened(memory, [1], salt="tenant"))
    assert memory._prefix._roots == {}


# Moves.


def test_an_abandoned_step_leaves_no_moves():
    memory = manager(num_host_blocks=2)
    table = stored(memory, [1] * 6)
    memory.swap_out(table)
    opened(memory, [1] * 5 + [9])
    memory.end_step()
    assert memory.take_moves() == Moves()


def test_shared_blocks_are_exported():
    memory = manager(num_host_blocks=2)
    parent = stored(memory, [1] * 6)
    twin = fork(memory, parent)
    host = memory.swap_out(twin)
    exports = memory.take_moves().exports
    assert exports == list(zip(parent.block_ids, host.block_ids, strict=True))


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


def test_the_last_holder_continues_in_new_blocks():
    memory = manager()
    parent = stored(memory, [1] * 6)
    memory.close_table(fork(memory, parent))
    assert write(memory, parent) == []
    assert parent.num_writable == 8
