"""Test the scheduler's rules with a model that always answers 7."""

import pickle

import pytest
from scripted_runner import answer_to

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.audit.scheduler import check_scheduler
from mie.errors import ConfigError, RequestError
from mie.memory.manager import KVCacheManager
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import Request

EOS = 3


class Driver:
    """A scheduler with a model that answers at once."""

    def __init__(self, num_blocks=16, max_model_len=64, num_host_blocks=0, **config):
        settings = {
            "block_size": 4,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": False,
            "watermark": 0.0,
            **config,
        }
        config = EngineConfig(**settings)
        self.manager = KVCacheManager(
            num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            num_host_blocks=num_host_blocks,
        )
        self.records = []
        self.scheduler = Scheduler(config, self.manager, max_model_len, self.records.append)
        self.requests = []
        self.work = {}  # {request number: tokens computed in the last step}

    def add(self, num_prompt, max_tokens=4, first_id=10, **params):
        prompt = range(first_id, first_id + num_prompt)
        names = ("priority", "cache_salt", "client")
        labels = {name: params.pop(name) for name in names if name in params}
        return self.add_ids(prompt, max_tokens=max_tokens, labels=labels, **params)

    def add_ids(self, prompt, labels=None, **params):
        params = SamplingParams(**params)
        number = len(self.requests)
        request = Request(str(number), number, list(prompt), params, [EOS], **(labels or {}))
        self.scheduler.check(request)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self, answer=7):
        plan = self.scheduler.schedule()
        decoding = [self.scheduler._seats.rows[row].request.number for row in plan.decodes]
        self.work = {number: decoding.count(number) for number in sorted(decoding)}
        self.work |= {chunk.seq_id[0]: len(chunk.token_ids) for chunk in plan.chunks}
        self.answer(plan, answer)
        return plan

    def answer(self, plan, answer=7):
        got = self.scheduler.update(plan, answer_to(plan, lambda: answer))
        check_scheduler(self.scheduler)
        return got

    @property
    def has_work(self):
        return bool(self.scheduler.running or self.scheduler.waiting)

    def run(self, max_steps=1000):
        """Run until everything is done, and return the work of every step."""
        works = []
        while self.has_work:
            self.step()
            works.append(self.work)
            assert len(works) < max_steps, "the scheduler has work and does nothing"
        return works

    def events(self, kind):
        return [record for record in self.records if record[0] == kind]


def numbers(queue):
    return [seq.request.number for seq in queue]


# Budgets.


def test_a_prompt_is_computed_in_chunks_and_samples_at_its_end():
    driver = Driver(max_num_batched_tokens=4)
    driver.add(10, max_tokens=2)
    plans = [driver.step() for _ in range(3)]
    assert [len(plan.chunks[0].token_ids) for plan in plans] == [4, 4, 2]
    assert [plan.chunks[0].choices for plan in plans] == [(), (), (0,)]
    assert driver.step().decodes == (0,)
    assert not driver.has_work


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


def test_no_prompt_takes_more_than_its_chunk():
    driver = Driver(max_prefill_chunk=3, max_num_batched_tokens=8)
    for _ in range(3):
        driver.add(7, max_tokens=1)
    driver.step()
    assert driver.work == {0: 3, 1: 3, 2: 2}
    driver.step()
    assert driver.work == {0: 3, 1: 3, 2: 2}


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


def test_seats_are_limited():
    driver = Driver(max_num_seqs=2)
    for _ in range(3):
        driver.add(2)
    driver.step()
    assert driver.work == {0: 2, 1: 2}


# Admission.


def test_the_head_of_the_queue_is_never_overtaken():
    driver = Driver(num_blocks=4)
    driver.add(8, max_tokens=8)
    driver.step()
    driver.add(12)
    driver.add(1)
    driver.step()
    assert driver.work == {0: 1}, "the short one would fit, but it is not its turn"


def test_a_sequence_is_admitted_with_room_for_all_its_tokens():
    driver = Driver(num_blocks=4, max_num_batched_tokens=4)
    driver.add(12)
    driver.step()
    assert driver.manager.num_available == 1


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


@pytest.mark.parametrize("admits", [False, True])
def test_no_request_is_admitted_in_a_step_that_preempted(admits):
    policy = {"scheduling_policy": "priority", "admit_after_preemption": admits}
    driver = Driver(num_blocks=5, **policy)
    driver.add(4, max_tokens=9)
    driver.add(12, max_tokens=9, priority=1)
    driver.step()
    driver.add(1)
    plan = driver.step()
    assert plan.preempted == ((1, 0),)
    assert bool(plan.chunks) == admits


def test_a_static_batch_drains_before_the_next_is_admitted():
    driver = Driver(batching="static", max_num_seqs=2, max_num_batched_tokens=6)
    for max_tokens in (5, 2, 2, 1):
        driver.add(4, max_tokens=max_tokens)
    works = driver.run()
    assert works[:2] == [{0: 4, 1: 2}, {0: 1, 1: 2}], "the batch is filled whatever the budget"
    first = [set(work) for work in works].index({2, 3})
    assert all(not {2, 3} & set(work) for work in works[:first])
    assert all(not {0, 1} & set(work) for work in works[first:])


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


def test_fair_takes_the_client_that_was_served_least():
    driver = Driver(max_num_seqs=1, scheduling_policy="fair")
    for client in "aaab":
        driver.add_ids([10], labels={"client": client}, max_tokens=2)
    driver.run()
    assert admitted(driver) == [0, 3, 1, 2]


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


def test_a_victim_computes_nothing_in_that_step():
    driver = Driver(num_blocks=3, max_num_batched_tokens=2, block_size=2)
    driver.add(1, max_tokens=8)
    driver.add(1, max_tokens=8)
    while driver.has_work:
        plan = driver.step()
        assert plan.num_tokens <= 2
        assert not {number for number, _ in plan.preempted} & set(driver.work)


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
    assert driver.manager._host_pool.num_free == 4


def test_a_full_host_pool_falls_back_to_recompute_and_is_recorded():
    driver = Driver(num_blocks=4, num_host_blocks=1, preemption_mode="swap")
    driver.add(7, max_tokens=9)
    victim = driver.add(7, max_tokens=9)
    driver.run()
    assert driver.events("preempt")[0][3] == "recompute: host pool full"
    assert victim.metrics.num_swaps == 0
    assert victim.metrics.num_recomputed_tokens == 8


def test_a_step_exports_before_it_imports():
    """Two clients take turns on one seat, and each swaps into the blocks that the other leaves."""
    settings = {"max_num_seqs": 1, "scheduling_policy": "fair", "fair_turn": 2}
    driver = Driver(num_blocks=4, num_host_blocks=8, preemption_mode="swap", **settings)
    for client in "ab":
        driver.add(5, max_tokens=9, client=client)
    both = []
    while driver.has_work:
        moves = driver.step().moves
        exported = {block for block, _ in moves.exports}
        both += [block for _, block in moves.imports if block in exported]
    assert both


@pytest.mark.parametrize("when", ["exported", "imported"])
def test_an_abandoned_swap_is_recomputed(when):
    driver = Driver(num_blocks=4, num_host_blocks=4, preemption_mode="swap")
    driver.add(7, max_tokens=9)
    victim = driver.add(7, max_tokens=9)
    plan = driver.scheduler.schedule()
    while not (plan.moves.exports if when == "exported" else plan.moves.imports):
        driver.answer(plan)
        plan = driver.scheduler.schedule()
    driver.scheduler.preempt_all()
    check_scheduler(driver.scheduler)
    assert victim.sequences[0].host is None
    assert driver.manager.num_used == 0
    driver.run()
    assert victim.sequences[0].num_generated == 9


# Forks.


def test_forks_share_the_prompt_and_copy_once_per_writer_but_the_last():
    driver = Driver()
    request = driver.add(6, n=3, max_tokens=3)
    plan = driver.step()
    assert plan.chunks[0].choices == (0, 1, 2)
    assert driver.manager.num_used == 2
    plan = driver.step()
    assert len(plan.moves.copies) == 2
    assert {source for source, _ in plan.moves.copies} == {1}
    assert driver.manager.num_used == 4
    driver.run()
    assert request.metrics.num_copied_blocks == 2


def test_one_choice_can_finish_without_ending_its_siblings():
    driver = Driver()
    request = driver.add(6, n=3, max_tokens=5)
    driver.step()
    driver.scheduler.finish(request.sequences[0], "stop", "END")
    check_scheduler(driver.scheduler)
    driver.run()
    assert [seq.finish_reason for seq in request.sequences] == ["stop", "length", "length"]
    assert [seq.num_generated for seq in request.sequences] == [1, 5, 5]
    assert driver.manager.num_used == 0


# Endings.


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("n", [1, 2])
def test_abort_is_legal_in_every_state(steps, n, mode):
    driver = Driver(num_blocks=4, max_num_batched_tokens=4, num_host_blocks=4, preemption_mode=mode)
    requests = [driver.add(7, max_tokens=6, n=n) for _ in range(3)]
    for _ in range(steps):
        driver.step()
    for request in requests:
        driver.scheduler.abort(request)
        driver.scheduler.abort(request)
        check_scheduler(driver.scheduler)
    assert driver.manager.num_used == 0
    assert not driver.has_work


def test_eos_stop_tokens_and_limits_end_a_sequence():
    for answer, params, expected in [
        (EOS, {}, ("stop", None, 1)),
        (EOS, {"ignore_eos": True}, ("length", None, 4)),
        (7, {"stop_token_ids": [7]}, ("stop", 7, 1)),
        (7, {}, ("length", None, 4)),
        (7, {"stop_token_ids": [7], "trace_decode_token_ids": [7, 7]}, ("stop", 7, 3)),
        (EOS, {"trace_decode_token_ids": [EOS, EOS]}, ("stop", None, 3)),
    ]:
        driver = Driver()
        [seq] = driver.add(3, **params).sequences
        while driver.has_work:
            driver.step(answer)
        assert (seq.finish_reason, seq.stop_reason, seq.num_generated) == expected, params


def test_the_context_and_the_pool_end_a_sequence_with_length():
    for num_blocks, max_model_len, max_tokens, expected in [
        (16, 10, None, 10),
        (16, 10, 50, 10),
        (2, 64, None, 9),
        (2, 64, 50, 9),
    ]:
        driver = Driver(num_blocks=num_blocks, max_model_len=max_model_len)
        [seq] = driver.add(5, max_tokens=max_tokens).sequences
        driver.run(max_steps=20)
        assert seq.finish_reason == "length"
        assert seq.num_tokens == expected


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


def test_the_largest_that_fits_is_served():
    driver = Driver(num_blocks=8)
    [seq] = driver.add(32, max_tokens=None).sequences
    driver.run()
    assert (seq.finish_reason, seq.num_generated) == ("length", 1)


def test_prompt_logprobs_skip_prefix_hits_and_are_scored_once():
    driver = Driver(num_blocks=4, max_num_batched_tokens=5, enable_prefix_caching=True)
    driver.add(9, max_tokens=1)
    driver.run()
    driver.add(7, max_tokens=9, first_id=50)
    driver.step()
    request = driver.add(9, max_tokens=6, prompt_logprobs=0)
    spans = []
    while driver.has_work:
        spans += [chunk.scored for chunk in driver.step().chunks if chunk.seq_id[0] == 2]
    scored = [position for span in spans for position in range(*span)]
    assert scored == list(range(8)), "each position with a next token, once"
    assert request.metrics.num_cached_tokens == 0


def test_scores_before_a_preemption_are_not_computed_again():
    driver = Driver(max_num_batched_tokens=5)
    request = driver.add(12, prompt_logprobs=0)
    spans = [driver.step().chunks[0].scored]
    driver.scheduler.preempt(request.sequences[0], by=request.sequences[0])
    while driver.has_work:
        spans += [chunk.scored for chunk in driver.step().chunks]
    assert spans[:4] == [(0, 5), (0, 0), (5, 10), (10, 11)]


def test_a_plan_is_plain_data():
    driver = Driver()
    driver.add(6, n=2)
    plan = driver.scheduler.schedule()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_an_abandoned_step_is_recomputed():
    driver = Driver(enable_prefix_caching=True)
    requests = [driver.add(5), driver.add(6, n=2), driver.add(7)]
    driver.step()
    driver.scheduler.schedule()
    driver.scheduler.preempt_all()
    check_scheduler(driver.scheduler)
    assert driver.manager.num_used == 0
    assert [seq.seq_id for seq in driver.scheduler.waiting] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    driver.run()
    assert {seq.num_generated for request in requests for seq in request.sequences} == {4}


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


def test_an_abort_after_the_end_changes_nothing():
    driver = Driver()
    request = driver.add(3)
    driver.run()
    driver.scheduler.abort(request)
    assert request.sequences[0].finish_reason == "length"
    assert len(driver.events("finish")) == 1
