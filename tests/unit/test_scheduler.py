"""The scheduler's rules, with a model that always answers 7."""

import pickle

import pytest

from mie.config import EngineConfig
from mie.errors import RequestError
from mie.memory.manager import KVCacheManager
from mie.sched.params import SamplingParams
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import Request

EOS = 3


class Driver:
    """A scheduler whose steps are answered at once."""

    def __init__(self, num_blocks=16, max_model_len=64, enable_prefix_caching=False, **config):
        settings = {"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
        self.manager = KVCacheManager(num_blocks, settings["block_size"], enable_prefix_caching)
        self.scheduler = Scheduler(EngineConfig(**settings), self.manager, max_model_len)
        self.requests = []

    def add(self, num_prompt, max_tokens=4, first_id=10, **params):
        prompt = list(range(first_id, first_id + num_prompt))
        params = SamplingParams(max_tokens=max_tokens, **params)
        request = Request(str(len(self.requests)), len(self.requests), prompt, params, [EOS])
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def step(self, answer=7):
        plan = self.scheduler.schedule()
        self.scheduler.update(plan, [[answer] * len(chunk.choices) for chunk in plan.chunks])
        self.scheduler.check_invariants()
        return plan

    def run(self, max_steps=1000):
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step())
            assert len(plans) < max_steps, "the scheduler has work and does nothing"
        return plans


def work(plan):
    """{request number: tokens computed in the step}"""
    return {chunk.seq_id[0]: len(chunk.token_ids) for chunk in plan.chunks}


def test_a_prompt_is_computed_in_chunks_and_samples_at_its_end():
    driver = Driver(max_num_batched_tokens=4)
    driver.add(10, max_tokens=2)
    plans = driver.run()
    assert [work(plan) for plan in plans] == [{0: 4}, {0: 4}, {0: 2}, {0: 1}]
    assert [plan.chunks[0].choices for plan in plans] == [(), (), (0,), (0,)]


def test_decodes_come_before_running_prefills_before_admissions():
    driver = Driver(max_num_batched_tokens=6)
    driver.add(2)
    driver.step()
    driver.add(9)
    driver.add(9)
    assert work(driver.step()) == {0: 1, 1: 5}
    assert list(work(driver.step()).items()) == [(0, 1), (1, 4), (2, 1)]


def test_nobody_overtakes_the_head_of_the_queue():
    driver = Driver(num_blocks=4)
    driver.add(8, max_tokens=8)
    driver.step()
    driver.add(12)
    driver.add(1)
    assert work(driver.step()) == {0: 1}, "the short one would fit, but it is not its turn"


def test_a_sequence_is_admitted_with_room_for_all_its_tokens():
    driver = Driver(num_blocks=4, max_num_batched_tokens=4)
    driver.add(12)
    driver.step()
    assert driver.manager.num_available == 1


def test_seats_are_limited_and_count_the_choices_to_come():
    driver = Driver(max_num_seqs=3)
    driver.add(2, n=2)
    driver.add(2, n=2)
    driver.add(2)
    assert work(driver.step()) == {0: 2}, "the second needs two seats, the third may not pass it"


def test_the_last_admitted_is_preempted_keeps_its_tokens_and_comes_back_first():
    driver = Driver(num_blocks=4)
    first, second = driver.add(7, max_tokens=9), driver.add(7, max_tokens=9)
    driver.step()
    driver.step()
    plan = driver.step()
    assert plan.preempted == ((1, 0),)
    assert [seq.request for seq in driver.scheduler.waiting] == [second]
    assert second.sequences[0].num_generated == 2
    assert work(plan) == {0: 1}
    driver.add(1)
    assert driver.scheduler.waiting[0].request is second
    driver.run()
    assert [len(r.sequences[0].token_ids) for r in (first, second)] == [16, 16]
    assert second.sequences[0].num_preemptions == 1
    assert second.sequences[0].num_recomputed == 8


def test_who_is_preempted_computes_nothing_in_that_step():
    driver = Driver(num_blocks=3, max_num_batched_tokens=2, block_size=2)
    driver.add(1, max_tokens=8)
    driver.add(1, max_tokens=8)
    for plan in driver.run():
        assert plan.num_tokens <= 2
        assert not set(plan.preempted) & {chunk.seq_id for chunk in plan.chunks}


def test_nobody_is_admitted_in_a_step_that_preempted():
    driver = Driver(num_blocks=4)
    driver.add(7, max_tokens=9)
    driver.add(7, max_tokens=9)
    driver.step()
    driver.step()
    driver.add(1)
    plan = driver.step()
    assert plan.preempted
    assert len(plan.chunks) == 1


def test_forks_share_the_prompt_and_copy_once_per_writer_but_the_last():
    driver = Driver()
    driver.add(6, n=3, max_tokens=3)
    plan = driver.step()
    assert plan.chunks[0].choices == (0, 1, 2)
    assert driver.manager.num_used == 2
    plan = driver.step()
    assert [len(chunk.copies) for chunk in plan.chunks] == [1, 1, 0]
    assert driver.manager.num_used == 4


def test_one_choice_can_finish_without_ending_its_siblings():
    driver = Driver()
    request = driver.add(6, n=3, max_tokens=5)
    driver.step()
    driver.scheduler.finish(request.sequences[0], "stop", "END")
    driver.scheduler.check_invariants()
    driver.run()
    assert [seq.finish_reason for seq in request.sequences] == ["stop", "length", "length"]
    assert [seq.num_generated for seq in request.sequences] == [1, 5, 5]
    assert driver.manager.num_used == 0


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("n", [1, 2])
def test_abort_is_legal_in_every_state(steps, n):
    driver = Driver(num_blocks=4, max_num_batched_tokens=4)
    requests = [driver.add(7, max_tokens=6, n=n) for _ in range(3)]
    for _ in range(steps):
        driver.step()
    for request in requests:
        driver.scheduler.abort(request)
        driver.scheduler.abort(request)
        driver.scheduler.check_invariants()
    assert driver.manager.num_used == 0
    assert not driver.scheduler.has_work


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
        while driver.scheduler.has_work:
            driver.step(answer)
        assert (seq.finish_reason, seq.stop_reason, seq.num_generated) == expected, params


def test_the_context_and_the_pool_end_a_sequence_with_length():
    for num_blocks, max_model_len, expected in [(16, 10, 10), (2, 64, 9)]:
        driver = Driver(num_blocks=num_blocks, max_model_len=max_model_len)
        [seq] = driver.add(5, max_tokens=None).sequences
        driver.run()
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
        (4, {"n": 9}, r"n is 9; at most 8 .*raise max_num_seqs to at least 9"),
    ],
)
def test_what_can_never_run_is_refused_at_the_door(num_prompt, params, message):
    driver = Driver(num_blocks=8)
    with pytest.raises(RequestError, match=message):
        driver.add(num_prompt, **params)
    assert not driver.scheduler.has_work


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
    spans = [chunk.scored for plan in driver.run() for chunk in plan.chunks if chunk.seq_id[0] == 2]
    scored = [position for span in spans for position in range(*span)]
    assert scored == list(range(8)), "each position with a next token, once"
    assert request.sequences[0].num_cached_tokens == 0


def test_what_was_scored_before_a_preemption_is_not_scored_again():
    driver = Driver(max_num_batched_tokens=5)
    request = driver.add(12, prompt_logprobs=0)
    spans = [driver.step().chunks[0].scored]
    driver.scheduler.preempt(request.sequences[0])
    spans += [chunk.scored for plan in driver.run() for chunk in plan.chunks]
    assert spans[:4] == [(0, 5), (0, 0), (5, 10), (10, 11)]


def test_after_its_scores_are_out_a_preempted_request_may_use_the_cache():
    driver = Driver(num_blocks=6, enable_prefix_caching=True)
    driver.add(9, max_tokens=8)
    request = driver.add(8, max_tokens=4, first_id=40, prompt_logprobs=0)
    driver.step()
    driver.scheduler.preempt(request.sequences[0])
    plan = driver.step()
    resumed = next(chunk for chunk in plan.chunks if chunk.seq_id[0] == 1)
    assert resumed.start == 8
    assert resumed.scored == (0, 0)


def test_a_plan_is_plain_data():
    driver = Driver()
    driver.add(6, n=2)
    plan = driver.scheduler.schedule()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_broken_off_step_is_computed_again():
    driver = Driver(enable_prefix_caching=True)
    requests = [driver.add(5), driver.add(6, n=2), driver.add(7)]
    driver.step()
    driver.scheduler.schedule()
    driver.scheduler.preempt_all()
    driver.scheduler.check_invariants()
    assert driver.manager.num_used == 0
    assert [seq.seq_id for seq in driver.scheduler.waiting] == [(0, 0), (1, 0), (1, 1), (2, 0)]
    driver.run()
    assert {seq.num_generated for request in requests for seq in request.sequences} == {4}
