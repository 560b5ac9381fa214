"""Test which decodes get drafts, with what they are paid, and how they are settled."""

import pytest
from scheduler_driver import EOS, Driver

from mie.sched.speculation import most_sampled


class FixedDrafts:
    """Drafts the same tokens for every sequence, and remembers what it is told."""

    def __init__(self, *token_ids):
        self.token_ids = token_ids
        self.asked, self.observed, self.ended = [], [], []

    def may_draft(self, seq):
        return bool(self.token_ids)

    def propose(self, seq, most, num_rows, num_tokens):
        self.asked.append((most, num_rows, num_tokens))
        return self.token_ids

    def observe(self, seq, num_drafts, num_accepted):
        self.observed.append((seq.num_tokens, num_drafts, num_accepted))

    def end(self, seq):
        self.ended.append(seq.seq_id)

    def forget(self):
        pass


def decoding(driver, *lengths, max_tokens=20, **params):
    """Add requests, and run the step that computes their prompts."""
    requests = [driver.add(length, max_tokens=max_tokens, **params) for length in lengths]
    driver.step()
    return requests


def drafts_of(plan):
    return {chunk.seq_id[0]: chunk.drafts for chunk in plan.chunks if chunk.num_drafts}


def test_a_decode_becomes_a_chunk_with_its_drafts():
    driver = Driver(drafter=FixedDrafts(7, 8))
    [request] = decoding(driver, 5)
    plan = driver.step(answer=7)
    assert plan.decodes == ()
    [chunk] = plan.chunks
    assert (chunk.start, chunk.token_ids, chunk.choices) == (5, (7, 7, 8), (0,))
    assert chunk.drafts == (7, 8)
    assert (plan.num_tokens, plan.num_prefill_tokens) == (3, 0)
    assert request.sequences[0].output_ids == [7, 7, 7], "one draft is right, and 7 follows it"
    assert request.sequences[0].num_computed == 7
    assert driver.events("verify") == [("verify", (0, 0), 5, 2, 1)]
    assert driver.scheduler.speculation.drafter.observed == [(7, 2, 1)]
    stats = driver.scheduler.speculation.stats
    assert (stats.num_drafts, stats.num_accepted_by_position) == (1, [1, 0])
    assert request.metrics.num_draft_tokens == 2
    assert request.metrics.num_accepted_tokens == 1


def test_prompts_get_no_drafts():
    driver = Driver(drafter=FixedDrafts(7), max_num_batched_tokens=4)
    driver.add(9)
    plans = [driver.step() for _ in range(3)]
    assert not any(map(drafts_of, plans))
    assert drafts_of(driver.step())


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [((7, EOS, 7), (7,)), ((EOS, 7), ()), ((7, 7, 7, 7, 7, 7), (7, 7, 7)), ((), ())],
)
def test_drafts_end_before_the_sequence_may(token_ids, expected):
    """Five tokens are allowed: the one of the prompt, three drafts, and the one after them."""
    driver = Driver(drafter=FixedDrafts(*token_ids))
    decoding(driver, 3, max_tokens=5)
    assert drafts_of(driver.step(answer=9)).get(0, ()) == expected


def test_a_sequence_that_ends_with_drafts_leaves_and_gives_all_blocks_back():
    driver = Driver(drafter=FixedDrafts(7, 7, 7))
    [request] = decoding(driver, 3, max_tokens=5)
    driver.step(answer=7)
    assert request.sequences[0].output_ids == [7] * 5
    assert request.sequences[0].finish_reason == "length"
    assert driver.manager.num_used == 0
    assert driver.scheduler.speculation.drafter.ended == [(0, 0)]


def test_drafts_take_what_the_budget_has_left():
    driver = Driver(drafter=FixedDrafts(9, 9, 9), max_num_batched_tokens=6)
    decoding(driver, 2, 2)
    plan = driver.step()
    assert drafts_of(plan) == {0: (9, 9, 9), 1: (9,)}
    assert plan.num_tokens == 6
    driver.add(9)
    plan = driver.step()
    assert not drafts_of(plan), "a prompt comes first"
    assert plan.num_tokens == 6


def test_a_step_draws_at_most_so_many_tokens_with_drafts():
    driver = Driver(drafter=FixedDrafts(*[9] * 25), num_blocks=64, max_num_seqs=2)
    decoding(driver, 2, 2, max_tokens=40)
    plan = driver.step()
    assert {number: len(drafts) for number, drafts in drafts_of(plan).items()} == {0: 25, 1: 5}
    assert driver.scheduler.speculation.drafter.asked[:2] == [(30, 2, 2), (5, 27, 2)]
    assert [most_sampled(seats) for seats in (1, 3, 8, 100)] == [16, 48, 64, 100]


def test_blocks_for_dropped_drafts_are_given_back():
    driver = Driver(drafter=FixedDrafts(9, 9, 9, 9, 9, 9))
    [request] = decoding(driver, 4)
    plan = driver.scheduler.schedule()
    table = request.sequences[0].table
    assert len(table.block_ids) == 3
    driver.answer(plan, 7)
    assert len(table.block_ids) == 2
    assert table.num_writable == 8
    assert driver.events("trim") == [("trim", (0, 0), 2)]


def test_nothing_is_preempted_for_drafts():
    driver = Driver(num_blocks=3, drafter=FixedDrafts(9, 9, 9))
    decoding(driver, 4, 3)
    plan = driver.step()
    assert not plan.preempted
    assert drafts_of(plan) == {0: (9, 9, 9)}, "the other one's block has a slot for its token only"


def test_only_kept_drafts_are_published():
    driver = Driver(drafter=FixedDrafts(7, 7, 9, 9, 9), enable_prefix_caching=True)
    [request] = decoding(driver, 5)
    driver.step(answer=7)
    assert request.sequences[0].token_ids[5:] == [7, 7, 7, 7]
    sealed = [record[4] for record in driver.events("seal")]
    assert sealed == [(10, 11, 12, 13), (14, 7, 7, 7)]


def test_no_step_is_launched_ahead_while_there_may_be_drafts():
    drafter = FixedDrafts(9)
    driver = Driver(drafter=drafter, async_scheduling=True)
    decoding(driver, 3)
    plan = driver.scheduler.schedule(may_admit=False)
    assert plan.decodes, "a launched step gets no drafts"
    assert driver.scheduler.ahead(plan) == ()
    drafter.token_ids = ()
    assert driver.scheduler.ahead(plan) == plan.decodes
    driver.answer(plan)
