"""Test the tables that the scheduler keeps for beams, and which requests may fork them."""

import pytest
from scheduler_driver import EOS, Driver

from mie.config.params.sampling import SamplingParams
from mie.sched.sequence import Request


def add_beam(driver, prompt, parent=None, salt=None):
    number = len(driver.requests)
    params = SamplingParams(max_tokens=1)
    of = {"is_beam": True, "parent_id": parent and parent.request_id, "cache_salt": salt}
    request = Request(str(number), list(prompt), params, **of).enter(number, [EOS])
    driver.scheduler.add(request)
    driver.requests.append(request)
    return request


@pytest.fixture
def driver():
    return Driver(num_blocks=8)


def test_children_fork_all_blocks_and_copy_the_one_that_is_partly_filled(driver):
    parent = add_beam(driver, range(10, 16))
    driver.run()
    for token in (40, 41):
        add_beam(driver, [*range(10, 16), token], parent)
    plan = driver.step()
    assert [chunk.token_ids for chunk in plan.chunks] == [(40,), (41,)]
    assert len(plan.moves.copies) == 2
    assert driver.manager.num_used == 1 + 3, "one shared block, and a last one for each"


def test_a_beam_is_recomputed_if_no_block_is_left_for_its_copy():
    driver = Driver(num_blocks=2)
    parent = add_beam(driver, range(10, 16))
    driver.run()
    child = add_beam(driver, [*range(10, 16), 40], parent)
    plan = driver.step()
    assert [len(chunk.token_ids) for chunk in plan.chunks] == [7]
    assert child.metrics.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "salt"),
    [([*range(10, 16), 40], "tenant"), ([9, *range(11, 16), 40], None), (range(10, 16), None)],
    ids=["another tenant", "other tokens", "no new token"],
)
def test_a_request_that_does_not_continue_the_beam_computes_its_prompt(driver, prompt, salt):
    parent = add_beam(driver, range(10, 16))
    driver.run()
    child = add_beam(driver, prompt, parent, salt)
    plan = driver.step()
    assert [chunk.token_ids for chunk in plan.chunks] == [tuple(prompt)]
    assert child.metrics.num_cached_tokens == 0


def test_kept_blocks_are_freed_before_a_sequence_is_preempted(driver):
    add_beam(driver, range(10, 26))
    second = add_beam(driver, range(30, 36))
    driver.step()
    assert driver.manager.num_used == 6
    request = driver.add(8, max_tokens=8)
    driver.run()
    assert request.metrics.num_preemptions == 0
    assert [seq.request for seq in driver.scheduler._admission.kept.values()] == [second]


def test_kept_blocks_do_not_prevent_admission(driver):
    add_beam(driver, range(10, 26))
    driver.step()
    request = driver.add(28, max_tokens=2)
    driver.run()
    assert request.is_finished
    assert driver.manager.num_used == 0
