"""Test the slots and blocks that a step with drafts takes beside those of full attention."""

import pytest
from audit import check_memory

from mie.memory.layers.states import States
from mie.memory.layers.window import Window
from mie.memory.layers.windows import Windows
from mie.memory.manager import KVCacheManager
from mie.memory.table import BlockTable

B = 4
PROMPT = [1, 2, 3, 4, 5]


def decoding(manager: KVCacheManager) -> BlockTable:
    """Open a table, and store the prompt. The step after it decodes the sixth token."""
    allocation = manager.find_allocation(PROMPT)
    assert allocation is not None
    table = manager.open_table(allocation, (0, 0), 0)
    end_step(manager)
    manager.commit(table, len(PROMPT))
    table.token_ids = [*PROMPT, 6]
    assert manager.grow(table, len(PROMPT) + 1)
    return table


def end_step(manager: KVCacheManager) -> None:
    manager.take_moves()
    manager.end_step()


def test_drafts_after_a_fork_keep_the_state_that_the_fork_is_to_get():
    """The copy to the fork's slot is only planned, so the parent's slot has the state."""
    states = States(4)
    manager = KVCacheManager(16, B, [states], enable_prefix_caching=False)
    allocation = manager.find_allocation([1, 2, 3, 4, 5])
    assert allocation is not None
    table = manager.open_table(allocation, (0, 0), 0)
    manager.take_moves()
    manager.end_step()
    manager.commit(table, 5)
    fork = manager.fork(table, (0, 1), 1, [1, 2, 3, 4, 5, 6])
    assert manager.grow(fork, 6)
    assert manager.reserve_drafts(fork, 10)
    parent, own = states.states[table].slot, states.states[fork]
    slot, saved = own.slot, own.kept
    assert {*manager.take_moves().parts["states"].copies} == {(parent, slot), (parent, saved)}
    manager.end_step()
    manager.settle(fork, 7, is_whole=False)
    assert (own.slot, own.kept, fork.num_tokens) == (saved, None, 5)
    assert len(fork.block_ids) == 2, "the blocks for drafts were given back"
    assert [*manager.take_moves().parts["states"].updates] == [(1, 0, (saved,))]
    assert states.slots_by_use == {"running": 2, "snapshot": 0, "free": 2}


def test_without_a_free_slot_there_are_no_drafts():
    manager = KVCacheManager(16, B, [States(1)], enable_prefix_caching=False)
    allocation = manager.find_allocation([1, 2, 3, 4])
    assert allocation is not None
    table = manager.open_table(allocation, (0, 0), 0)
    manager.commit(table, 4)
    table.token_ids = [1, 2, 3, 4, 5]
    assert manager.grow(table, 5)
    assert not manager.reserve_drafts(table, 12)
    assert len(table.block_ids) == 2, "the blocks for drafts were given back"


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_row_reads_the_state_before_wrong_drafts_and_the_one_after_right_drafts(is_whole: bool):
    states = States(2)
    manager = KVCacheManager(16, B, [states], enable_prefix_caching=False)
    table = decoding(manager)
    own = states.states[table]
    assert manager.reserve_drafts(table, 9)
    before, after = own.kept, own.slot
    assert manager.take_moves().parts["states"].copies == [(after, before)]
    manager.end_step()
    manager.settle(table, 9 if is_whole else 7, is_whole=is_whole)
    updates = manager.take_moves().parts["states"].updates
    assert (own.slot, [*updates]) == ((after, []) if is_whole else (before, [(0, 0, (before,))]))
    check_memory(manager, [table])


def test_a_sequence_that_leaves_in_a_step_with_drafts_frees_both_slots():
    states = States(2)
    manager = KVCacheManager(16, B, [states], enable_prefix_caching=False)
    table = decoding(manager)
    assert manager.reserve_drafts(table, 9)
    assert states.slots_by_use == {"running": 1, "snapshot": 0, "free": 0}
    manager.close_table(table)
    assert states.slots_by_use == {"running": 0, "snapshot": 0, "free": 2}
    check_memory(manager, [])


def test_dropped_drafts_free_their_blocks_of_layers_with_a_window():
    window = Window(size=6, num_groups=2, block_size=B, max_chunk=16)
    windows = Windows(window)
    manager = KVCacheManager(40, B, [windows], enable_prefix_caching=False)
    table = decoding(manager)
    num_used, num_held = manager.num_used, windows.num_held
    assert manager.reserve_drafts(table, 15)
    assert manager.num_used == num_used + 2 * (1 + window.num_groups)
    end_step(manager)
    manager.settle(table, 6, is_whole=False)
    assert (manager.num_used, windows.num_held) == (num_used, num_held)
    check_memory(manager, [table])
    manager.close_table(table)
    assert manager.num_used == 0
    check_memory(manager, [])
