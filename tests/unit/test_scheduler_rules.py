"""Test finer rules of the scheduler, which mutants (`scripts/mutation/`) found untested."""

import pytest
from test_scheduler import Driver

# Budgets and order.


def test_choices_share_the_budget_too():
    driver = Driver(max_num_batched_tokens=2)
    request = driver.add(2, n=3, max_tokens=3)
    works = driver.run()
    assert all(sum(work.values()) <= 2 for work in works)
    assert [seq.num_generated for seq in request.sequences] == [3, 3, 3]


def test_a_choice_that_writes_leaves_its_siblings_block_unchanged():
    driver = Driver(max_num_batched_tokens=1)
    driver.add(1, n=2)
    driver.step()
    plan = driver.step()
    assert len(plan.decodes) == 1
    assert len(plan.moves.copies) == 1


def test_decodes_are_ordered_by_row_and_not_by_priority():
    driver = Driver(scheduling_policy="priority")
    for priority in (5, -5):
        driver.add(2, priority=priority)
        driver.step()
    assert driver.step().decodes == (0, 1)


@pytest.mark.parametrize(("num_blocks", "max_model_len", "expected"), [(16, 10, 10), (2, 64, 9)])
def test_max_tokens_cannot_reach_beyond_the_context_or_the_pool(
    num_blocks, max_model_len, expected
):
    driver = Driver(num_blocks=num_blocks, max_model_len=max_model_len)
    [seq] = driver.add(5, max_tokens=50).sequences
    driver.run(max_steps=20)
    assert (seq.finish_reason, seq.num_tokens) == ("length", expected)


def test_static_batching_without_chunking_does_not_overtake_a_prompt():
    sizes = {"max_num_batched_tokens": 18, "max_model_len": 18}
    driver = Driver(batching="static", enable_chunked_prefill=False, **sizes)
    for num_prompt in (15, 10, 10, 4):
        driver.add(num_prompt)
    driver.step()
    assert driver.work == {0: 15}
    driver.step()
    assert driver.work == {0: 1, 1: 10}, "7 are left: not enough for the third"


# Prefix hits.


def test_requests_with_different_salts_share_nothing():
    driver = Driver(enable_prefix_caching=True)
    for salt in ("a", "b", "a"):
        driver.add(9, max_tokens=1, cache_salt=salt)
        driver.run()
    assert [request.metrics.num_cached_tokens for request in driver.requests] == [0, 0, 8]


def test_prompt_logprobs_are_computed_although_the_prompt_is_cached():
    driver = Driver(enable_prefix_caching=True)
    driver.add(9, max_tokens=1)
    driver.run()
    driver.add(9, prompt_logprobs=0)
    driver.step()
    assert driver.work == {1: 9}


def test_a_request_is_one_query_however_often_it_is_admitted():
    driver = Driver(enable_prefix_caching=True)
    request = driver.add(9)
    driver.step()
    driver.scheduler.preempt(request.sequences[0], by=request.sequences[0])
    driver.run()
    assert driver.manager.stats.num_queried_tokens == 9
    assert driver.manager.stats.num_hit_tokens == 0


def test_full_and_partial_block_hits_are_counted_separately():
    driver = Driver(enable_prefix_caching=True)
    driver.add(8, max_tokens=1)
    driver.run()
    request = driver.add(7, max_tokens=1)
    driver.run()
    stats = driver.manager.stats
    assert (stats.num_hit_tokens, stats.num_partial_hit_tokens) == (4, 2)
    assert request.metrics.num_cached_tokens == 6


# Preemption.


def test_cached_blocks_are_not_recomputed():
    driver = Driver(enable_prefix_caching=True)
    request = driver.add(9)
    driver.step()
    driver.scheduler.preempt(request.sequences[0], by=request.sequences[0])
    driver.run()
    assert request.metrics.num_recomputed_tokens == 1, "9 were computed, and 8 found again"


def swapped_out():
    """Return the driver after the step that swapped its second request out, and that sequence."""
    driver = Driver(num_blocks=4, num_host_blocks=4, preemption_mode="swap")
    driver.add(7, max_tokens=9)
    [seq] = driver.add(7, max_tokens=9).sequences
    for _ in range(3):
        driver.step()
    assert seq.host is not None
    return driver, seq


def test_a_swap_loses_no_tokens():
    driver, _ = swapped_out()
    [(*_, mode, _, num_lost)] = driver.events("preempt")
    assert (mode, num_lost) == ("swap", 0)


def test_a_sequence_without_computed_tokens_is_not_swapped_out():
    sizes = {"max_num_batched_tokens": 4, "num_host_blocks": 4}
    driver = Driver(batching="static", preemption_mode="swap", **sizes)
    driver.add(4)
    request = driver.add(4)
    driver.step()
    assert driver.work == {0: 4}, "the second is admitted, and waits for its turn"
    driver.scheduler.preempt(request.sequences[0], by=request.sequences[0])
    assert request.sequences[0].host is None
    assert request.metrics.num_swaps == 0


def test_an_abandoned_step_keeps_earlier_swaps():
    driver, seq = swapped_out()
    driver.scheduler.schedule()
    driver.scheduler.preempt_all()
    assert seq.host is not None
    driver.run()
    assert seq.num_generated == 9


# Rows.


def test_each_row_is_announced_to_the_runner_once():
    driver = Driver()
    driver.add(6, n=2)
    assert [[row.row for row in driver.step().new_rows] for _ in range(3)] == [[0], [1], []]


def test_a_choice_that_ends_before_its_row_is_announced_is_not_announced():
    driver = Driver()
    request = driver.add(6, n=3)
    driver.step()
    driver.scheduler.finish(request.sequences[1], "stop", "END")
    assert [row.row for row in driver.step().new_rows] == [2]


def test_a_row_forgets_the_sequence_that_left_it():
    driver = Driver()
    driver.add(6, n=2)
    driver.run()
    assert not driver.scheduler._seats.rows


# Endings.


def test_an_abort_after_the_end_changes_nothing():
    driver = Driver()
    request = driver.add(3)
    driver.run()
    driver.scheduler.abort(request)
    assert request.sequences[0].finish_reason == "length"
    assert len(driver.events("finish")) == 1


def test_requests_that_are_aborted_in_the_queue_cost_no_memory():
    driver = Driver(max_num_seqs=1)
    driver.add(3)
    driver.step()
    for _ in range(1000):
        driver.scheduler.abort(driver.add(3))
    assert driver.scheduler.waiting == []
