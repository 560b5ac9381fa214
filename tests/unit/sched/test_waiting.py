"""Test that the numbers say why a sequence waits."""

from scheduler_driver import Driver

from mie.engine.watch.waiting import why_waiting


def why(driver, number):
    return why_waiting(driver.scheduler, (number, 0))


def test_a_sequence_that_runs_or_has_ended_does_not_wait():
    driver = Driver()
    driver.add(4, max_tokens=1)
    driver.add(4)
    assert why(driver, 0).because == "nothing"
    driver.step()
    assert why(driver, 0) is None
    assert why(driver, 1) is None
    assert why(driver, 7) is None


def test_no_seat_is_free():
    driver = Driver(max_num_seqs=1)
    driver.add(4)
    driver.step()
    driver.add(4)
    driver.add(4)
    wait = why(driver, 1)
    assert (wait.because, wait.seats, wait.seats_free, wait.position) == ("seats", 1, 0, 0)
    assert (why(driver, 2).because, why(driver, 2).position) == ("queue", 1)


def test_too_few_blocks_are_free():
    driver = Driver(num_blocks=6, watermark=0.2)
    driver.add(12, max_tokens=8)
    driver.step()
    driver.add(9)
    wait = why(driver, 1)
    numbers = (wait.blocks_needed, wait.blocks_free, wait.blocks_evictable, wait.blocks_spare)
    assert (wait.because, *numbers) == ("blocks", 3, 3, 0, 2)
    driver.step()
    assert 1 not in driver.work


def test_blocks_that_can_be_evicted_count_and_those_that_it_shares_are_taken():
    driver = Driver(num_blocks=8, enable_prefix_caching=True)
    driver.add(12, max_tokens=1)
    driver.step()
    driver.add(14)
    wait = why(driver, 1)
    assert wait.num_cached_tokens == 12
    assert (wait.blocks_free, wait.blocks_evictable, wait.blocks_needed) == (5, 3, 4)
    assert wait.because == "nothing"
    driver.step()
    assert driver.work == {1: 2}
    assert driver.manager.num_available == 8 - wait.blocks_needed


def test_the_budget_of_a_step_is_taken():
    driver = Driver(max_num_batched_tokens=8, max_prefill_chunk=8)
    driver.add(3, max_tokens=9)
    driver.add(30)
    driver.step()
    driver.step()
    driver.add(4)
    wait = why(driver, 2)
    assert (wait.because, wait.budget) == ("budget", 8)
    assert (wait.budget_decodes, wait.budget_prefills) == (1, 7)
    driver.step()
    assert driver.work == {0: 1, 1: 7}


def test_choices_that_have_forked_count_once_for_the_quota_of_their_client():
    driver = Driver(scheduling_policy="fair", client_quotas={"a": {"max_num_seqs": 3}})
    driver.add(4, n=2, client="a")
    driver.step()
    driver.add(4, client="a")
    driver.add(4, client="a")
    assert why(driver, 1).because == "nothing"
    driver.step()
    assert driver.work == {0: 2, 1: 4}
    assert why(driver, 2).because == "quota"
