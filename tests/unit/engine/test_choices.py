"""Test how the n choices of a request get their seats."""

import pytest
from scheduler_driver import Driver


def running(driver):
    return [seq.seq_id for seq in driver.scheduler.running]


def waiting(driver):
    return [seq.seq_id for seq in driver.scheduler.waiting]


def lengths(request):
    return [seq.num_generated for seq in request.sequences]


# The fork.


def test_choices_take_the_free_seats_and_the_rest_wait():
    driver = Driver(max_num_seqs=3)
    driver.add(2, max_tokens=9)
    request = driver.add(6, n=4, max_tokens=3)
    [_, chunk] = driver.step().chunks
    assert chunk.choices == (0, 1)
    assert running(driver) == [(0, 0), (1, 0), (1, 1)]
    assert waiting(driver) == [(1, 2), (1, 3)]
    driver.run()
    assert lengths(request) == [3, 3, 3, 3]


def test_many_choices_do_not_keep_a_small_request_waiting():
    driver = Driver(num_blocks=600, max_num_seqs=8, max_model_len=512, max_num_batched_tokens=256)
    for _ in range(7):
        driver.add(4, max_tokens=200)
    driver.step()
    driver.add(4, n=8, max_tokens=10)
    small = driver.add(4, max_tokens=2)
    num_idle = num_steps = 0
    while not small.is_finished:
        driver.step()
        num_steps += 1
        has_waited = small.sequences[0].num_generated == 0
        num_idle += has_waited and len(driver.scheduler.running) < 8
    assert num_idle <= 8, "a seat is empty for one step after each choice that ends in it"
    assert num_steps < 100, "eight choices of ten tokens, one after the other"


def test_two_requests_that_fork_in_one_step_share_the_blocks():
    driver = Driver(num_blocks=6)
    for _ in range(2):
        driver.add(5, n=3)
    driver.step()
    assert running(driver) == [(0, 0), (0, 1), (0, 2), (1, 0)], "two blocks for two forks"
    assert driver.step().preempted == ()


@pytest.mark.parametrize("num_prompt", [5, 8])
def test_a_choice_forks_only_if_there_is_a_block_for_its_next_token(num_prompt):
    driver = Driver(num_blocks=5)
    driver.add(4, max_tokens=4)
    driver.step()
    driver.add(num_prompt, n=4, max_tokens=2)
    driver.step()
    assert running(driver) == [(0, 0), (1, 0), (1, 1)], "four blocks are taken, one is left"
    assert waiting(driver) == [(1, 2), (1, 3)]


def test_forks_leave_the_watermark_free():
    driver = Driver(num_blocks=10, watermark=0.5)
    driver.add(5, n=8)
    driver.step()
    assert len(driver.scheduler.running) == 1 + 3, "8 are left, of which 5 stay free"


def test_the_blocks_of_forks_to_come_are_not_given_to_the_next():
    driver = Driver(num_blocks=8)
    driver.add(1, max_tokens=30)
    driver.step()
    driver.add(5, n=3, max_tokens=4)
    driver.add(17, max_tokens=4)
    driver.step()
    assert driver.work == {0: 1, 1: 5}, "two blocks and two for the forks leave 3 of 7"
    assert driver.step().preempted == ()


def test_a_static_batch_is_not_joined_by_choices_that_wait():
    driver = Driver(batching="static", max_num_seqs=3)
    long = driver.add(2, max_tokens=6)
    request = driver.add(2, n=3, max_tokens=2)
    driver.step()
    assert running(driver) == [(0, 0), (1, 0), (1, 1)]
    while not long.is_finished:
        assert waiting(driver) == [(1, 2)]
        driver.step()
    driver.run()
    assert lengths(request) == [2, 2, 2]


# Waiting choices.


def test_a_waiting_choice_finds_the_prompt_in_the_cache():
    driver = Driver(max_num_seqs=1, enable_prefix_caching=True)
    request = driver.add(9, n=3, max_tokens=2)
    works = driver.run()
    assert [work[0] for work in works] == [9, 1] + [1, 1] * 2
    assert request.metrics.num_cached_tokens == 0, "at the first admission nothing was cached"
    assert request.metrics.num_recomputed_tokens == 0
    assert driver.manager.stats.num_queried_tokens == 9, "a request is one query"


def test_no_step_is_launched_ahead_while_a_choice_waits():
    driver = Driver(max_num_seqs=3, async_scheduling=True)
    driver.add(3, n=2, max_tokens=9)
    driver.step()
    plan = driver.scheduler.schedule()
    assert driver.scheduler.ahead(plan) == (0, 1)
    driver.answer(plan)
    driver.add(3)
    plan = driver.scheduler.schedule(may_admit=False)
    assert driver.scheduler.ahead(plan) == ()
