"""Test the scheduler's rules with a model that always answers 7."""

import pickle
from dataclasses import replace

import pytest
from scheduler_driver import Driver

from mie.config.engine import POLICIES, EngineSettings
from mie.errors import ConfigError, RequestError
from mie.sched.orders import ORDERS
from mie.sched.queue import WaitingQueue


def numbers(queue):
    return [seq.request.number for seq in queue]


# Budgets.


def test_decodes_come_before_running_prefills_before_admissions():
    driver = Driver(max_num_batched_tokens=6)
    driver.add(2)
    driver.step()
    driver.add(9)
    driver.add(9)
    driver.step()
    assert driver.work == {0: 1, 1: 5}
    driver.step()
    assert list(driver.work.items()) == [(0, 1), (1, 4), (2, 1)]


def test_the_budget_holds_for_decodes_too_and_the_first_go_first():
    driver = Driver(max_num_batched_tokens=2)
    for _ in range(3):
        driver.add(1, max_tokens=3)
    works = driver.run()
    assert all(sum(work.values()) <= 2 for work in works)
    assert works[:3] == [{0: 1, 1: 1}, {0: 1, 1: 1}, {0: 1, 1: 1}]


def test_an_unchunked_prompt_waits_and_is_not_overtaken():
    driver = Driver(enable_chunked_prefill=False, max_num_batched_tokens=16, max_model_len=16)
    for num_prompt in (10, 8, 2):
        driver.add(num_prompt, max_tokens=2)
    driver.step()
    assert driver.work == {0: 10}
    assert numbers(driver.scheduler.waiting) == [1, 2], "and takes no blocks while it waits"
    driver.step()
    assert driver.work == {0: 1, 1: 8, 2: 2}


def test_without_chunking_a_step_must_take_a_whole_context():
    message = r"max_num_batched_tokens is 8; .* context of 64 tokens \(raise it to that"
    with pytest.raises(ConfigError, match=message):
        Driver(enable_chunked_prefill=False, max_num_batched_tokens=8)


def test_a_cached_prefix_leaves_more_of_the_budget():
    driver = Driver(
        enable_chunked_prefill=False,
        max_num_batched_tokens=16,
        max_model_len=16,
        enable_prefix_caching=True,
    )
    driver.add(13, max_tokens=3)
    driver.step()
    driver.add(14, max_tokens=1)
    driver.step()
    assert driver.work == {0: 1, 1: 1}


# Admission.


def test_admission_leaves_the_watermark_free_unless_nothing_runs():
    driver = Driver(num_blocks=8, watermark=0.25)
    driver.add(28, max_tokens=2)
    driver.step()
    assert driver.manager.num_available == 1, "alone it may have all"
    driver.run()
    driver.add(12, max_tokens=3)
    driver.add(12, max_tokens=3)
    driver.add(1, max_tokens=1)
    driver.step()
    assert driver.work == {1: 12, 2: 12}, "two of eight blocks stay free"


def test_a_running_sequence_is_never_preempted_to_admit():
    driver = Driver(num_blocks=4, scheduling_policy="priority")
    driver.add(9, max_tokens=4, priority=5)
    driver.step()
    driver.add(9, priority=-5)
    assert driver.step().preempted == ()
    assert driver.work == {0: 1}


# Policies.


def admitted(driver):
    """Return the request numbers in the order of their first admission."""
    driver.run()
    return [record[1][0] for record in driver.events("admit")]


def test_fcfs_goes_by_arrival():
    driver = Driver(max_num_seqs=1)
    for num_prompt in (9, 1, 5):
        driver.add(num_prompt)
    assert admitted(driver) == [0, 1, 2]


def test_priority_goes_by_priority_then_arrival():
    driver = Driver(max_num_seqs=1, scheduling_policy="priority")
    for priority in (0, 3, -1, 0, -1):
        driver.add(2, priority=priority)
    assert admitted(driver) == [2, 4, 0, 3, 1]


def test_priority_preempts_the_lowest_then_the_latest():
    driver = Driver(num_blocks=6, scheduling_policy="priority")
    for priority in (2, 0, 2):
        driver.add(7, max_tokens=9, priority=priority)
    driver.step()
    driver.step()
    assert driver.step().preempted == ((2, 0),)
    assert driver.events("preempt") == [
        ("preempt", (2, 0), (1, 0), "recompute", "lowest priority, then last arrived", 8)
    ]


def test_sjf_takes_the_shortest_job():
    driver = Driver(max_num_seqs=1, scheduling_policy="sjf")
    for num_prompt, max_tokens in ((9, 4), (2, 8), (5, 4), (1, None)):
        driver.add(num_prompt, max_tokens=max_tokens)
    assert admitted(driver) == [2, 1, 0, 3], "9, 10, 13 and whatever the context holds"


@pytest.mark.parametrize(("ageing", "bound"), [(1, 40), (8, 8)])
def test_sjf_starves_no_request(ageing, bound):
    driver = Driver(max_num_seqs=1, scheduling_policy="sjf", sjf_ageing=ageing)
    driver.add(1, max_tokens=1)
    driver.step()
    long = driver.add(30, max_tokens=8)
    num_steps = 0
    while not long.sequences[0].was_admitted:
        driver.add(1, max_tokens=1)
        driver.step()
        num_steps += 1
        assert num_steps <= bound
    assert num_steps > bound / 2, "it was not made to wait at all"


class LastComeQueue(WaitingQueue):
    """The last request to arrive first."""

    victim = "first arrived"

    def rank(self, request, step):
        return -request.number


def test_a_policy_of_ones_own_is_a_queue_and_a_name(monkeypatch):
    """This is the example of docs/howto/policy.md."""
    declared = EngineSettings.SETTINGS["scheduling_policy"]
    named = replace(declared, choices=(*declared.choices, "lcfs"))
    settings = {**EngineSettings.SETTINGS, "scheduling_policy": named}
    monkeypatch.setattr(EngineSettings, "SETTINGS", settings)
    monkeypatch.setattr("mie.sched.scheduler.ORDERS", {**ORDERS, "lcfs": LastComeQueue})
    driver = Driver(num_blocks=4, scheduling_policy="lcfs")
    for _ in range(2):
        driver.add(7, max_tokens=9)
    for _ in range(2):
        driver.step()
    assert driver.step().preempted == ((0, 0),)
    assert admitted(driver) == [1, 0]
    assert driver.events("preempt")[0][4] == "first arrived"


def test_each_policy_has_an_order():
    assert [*ORDERS] == [*POLICIES]


# Preemption.


def test_the_last_admitted_is_preempted_keeps_its_tokens_and_comes_back_first():
    driver = Driver(num_blocks=4)
    first, second = driver.add(7, max_tokens=9), driver.add(7, max_tokens=9)
    driver.step()
    driver.step()
    plan = driver.step()
    assert plan.preempted == ((1, 0),)
    assert numbers(driver.scheduler.waiting) == [1]
    assert second.sequences[0].num_generated == 2
    assert driver.work == {0: 1}
    driver.add(1)
    assert driver.scheduler.waiting[0].request is second
    driver.run()
    assert [len(r.sequences[0].token_ids) for r in (first, second)] == [16, 16]
    assert second.metrics.num_preemptions == 1
    assert second.metrics.num_recomputed_tokens == 8
    assert driver.events("preempt")[0][1:4] == ((1, 0), (0, 0), "recompute")


def test_a_swapped_sequence_comes_back_without_computing():
    driver = Driver(num_blocks=4, num_host_blocks=4, preemption_mode="swap")
    driver.add(7, max_tokens=9)
    victim = driver.add(7, max_tokens=9)
    driver.step()
    driver.step()
    plan = driver.step()
    assert [pair[1] for pair in plan.moves.exports] == list(victim.sequences[0].host.block_ids)
    assert driver.manager.num_used == 3
    while not driver.work.get(1):
        plan = driver.step()
    assert driver.work == {1: 1}, "just the token that was sampled last"
    assert len(plan.moves.imports) == 2
    driver.run()
    assert victim.metrics.num_swaps == 1
    assert victim.metrics.num_recomputed_tokens == 0
    assert victim.sequences[0].num_generated == 9
    assert driver.manager.host.pool.num_free == 4
    [(*_, mode, _, num_lost)] = driver.events("preempt")
    assert (mode, num_lost) == ("swap", 0)


# Endings.


@pytest.mark.parametrize(
    ("num_prompt", "params", "message"),
    [
        (64, {}, r"prompt has 64 tokens; the context holds 64.*raise max_model_len to at least 65"),
        (
            40,
            {},
            r"prompt has 40 tokens; the KV cache holds 32 \(raise num_blocks to at least 11\)",
        ),
        (2, {"priority": 1}, r"priority is 1; .* by fcfs \(set scheduling_policy='priority'\)"),
        (2, {"client": "a"}, r"client is 'a'; .* by fcfs \(set scheduling_policy='fair'\)"),
    ],
)
def test_a_request_that_can_never_run_is_refused(num_prompt, params, message):
    driver = Driver(num_blocks=8)
    with pytest.raises(RequestError, match=message):
        driver.add(num_prompt, **params)
    assert not driver.has_work


def test_a_plan_is_plain_data():
    driver = Driver()
    driver.add(6, n=2)
    plan = driver.scheduler.schedule()
    assert pickle.loads(pickle.dumps(plan)) == plan


# Finer rules.


def test_decodes_are_ordered_by_row_and_not_by_priority():
    driver = Driver(scheduling_policy="priority")
    for priority in (5, -5):
        driver.add(2, priority=priority)
        driver.step()
    assert driver.step().decodes == (0, 1)


def test_static_batching_without_chunking_does_not_overtake_a_prompt():
    sizes = {"max_num_batched_tokens": 18, "max_model_len": 18}
    driver = Driver(batching="static", enable_chunked_prefill=False, **sizes)
    for num_prompt in (15, 10, 10, 4):
        driver.add(num_prompt)
    driver.step()
    assert driver.work == {0: 15}
    driver.step()
    assert driver.work == {0: 1, 1: 10}, "7 are left: not enough for the third"


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


def test_each_row_is_announced_to_the_runner_once():
    driver = Driver()
    driver.add(6, n=2)
    assert [[row.row for row in driver.step().new_rows] for _ in range(3)] == [[0], [1], []]
