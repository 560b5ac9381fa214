"""Test how the n choices of a request get their seats."""

import pytest
from test_scheduler import Driver

from mie.engine.audit.scheduler import check_scheduler


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


def test_more_choices_than_seats_are_served():
    driver = Driver(max_num_seqs=1)
    request = driver.add(6, n=5, max_tokens=3)
    works = driver.run()
    assert lengths(request) == [3] * 5
    assert all(sum(work.values()) <= 6 for work in works)
    assert driver.manager.num_used == 0


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


def test_seats_of_forks_to_come_are_not_given_to_the_next():
    driver = Driver(max_num_seqs=3)
    driver.add(2, n=3, max_tokens=9)
    driver.add(2, n=2)
    driver.step()
    assert driver.work == {0: 2}
    assert running(driver) == [(0, 0), (0, 1), (0, 2)]


def test_two_requests_that_fork_in_one_step_share_the_seats():
    driver = Driver(max_num_seqs=4, max_prefill_chunk=4)
    for _ in range(2):
        driver.add(8, n=3, max_tokens=9)
    driver.step()
    driver.step()
    assert running(driver) == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert waiting(driver) == [(1, 1), (1, 2)]


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


def test_choices_do_not_pass_the_head_of_the_queue():
    driver = Driver(num_blocks=9, scheduling_policy="priority", max_num_batched_tokens=8)
    driver.add(16, n=2, max_tokens=9)
    driver.step()
    driver.add(24, priority=-1, max_tokens=9)
    driver.step()
    assert running(driver) == [(0, 0)]
    assert waiting(driver) == [(1, 0), (0, 1)]


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


def test_a_waiting_choice_recomputes_the_prompt_without_a_cache():
    driver = Driver(max_num_seqs=1)
    driver.add(9, n=2, max_tokens=2)
    assert [work[0] for work in driver.run()] == [9, 1, 9, 1]


@pytest.mark.parametrize("caching", [False, True])
def test_prompt_logprobs_are_computed_once_for_all_choices(caching):
    driver = Driver(max_num_seqs=1, max_num_batched_tokens=4, enable_prefix_caching=caching)
    request = driver.add(9, n=3, max_tokens=2, prompt_logprobs=0)
    spans = []
    while driver.has_work:
        spans += [chunk.scored for chunk in driver.step().chunks]
    scored = [position for span in spans for position in range(*span)]
    assert scored == list(range(8))
    assert [-row.logprobs[0] for row in request.prompt_logprobs] == scored


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


# Endings.


def test_the_next_choice_leads_when_the_first_ends_before_the_fork():
    driver = Driver(max_num_batched_tokens=4)
    request = driver.add(8, n=3, max_tokens=2)
    driver.step()
    driver.scheduler.finish(request.sequences[0], "abort")
    check_scheduler(driver.scheduler)
    assert (running(driver), waiting(driver)) == ([], [(0, 1)])
    assert driver.manager.num_used == 0
    plans = [driver.step() for _ in range(2)]
    assert plans[1].chunks[0].choices == (1, 2)
    driver.run()
    assert lengths(request) == [0, 2, 2]


def test_a_choice_that_ended_before_the_fork_gets_no_seat():
    driver = Driver(max_num_batched_tokens=4)
    request = driver.add(8, n=3, max_tokens=2)
    driver.step()
    driver.scheduler.finish(request.sequences[1], "abort")
    assert driver.step().chunks[0].choices == (0, 2)
    driver.run()
    assert lengths(request) == [2, 0, 2]


def test_an_abort_before_the_fork_ends_all_choices():
    driver = Driver(max_num_batched_tokens=4)
    request = driver.add(8, n=3)
    driver.step()
    driver.scheduler.abort(request)
    assert request.is_finished
    assert not driver.has_work
    assert [record[0] for record in driver.records[-1:]] == ["finish"]
    assert not driver.events("wait")


def test_a_choice_that_waits_for_a_seat_can_be_ended():
    driver = Driver(max_num_seqs=1)
    request = driver.add(3, n=3, max_tokens=2)
    driver.step()
    driver.scheduler.finish(request.sequences[1], "abort")
    check_scheduler(driver.scheduler)
    assert waiting(driver) == [(0, 2)]
    driver.run()
    assert lengths(request) == [2, 0, 2]
