"""Test what is learnt about a kind of call, with invented times."""

from __future__ import annotations

from collections import Counter

import pytest

from mie.ops_cpu.threads.counts import (
    EARLIER,
    NUM_CALLS,
    NUM_TRIALS,
    HeadStart,
    ThreadCount,
    Trials,
)


def use(count: ThreadCount, seconds: dict[int, float], num_calls: int) -> Counter[int]:
    """Make calls that take ``seconds`` by their number of threads. Return the numbers used."""
    used: Counter[int] = Counter()
    for _ in range(num_calls):
        number = count.choose()
        used[number] += 1
        if count.is_trial:
            count.note(seconds[number])
    return used


def test_the_choices_are_powers_of_two_and_all_threads():
    used = use(ThreadCount(1, 12), dict.fromkeys((1, 2, 4, 8, 12), 1.0), 5 * NUM_TRIALS)
    assert used == dict.fromkeys((1, 2, 4, 8, 12), NUM_TRIALS)


@pytest.mark.parametrize("fastest", [1, 2, 4])
def test_the_fastest_number_is_used_after_the_trials(fastest: int):
    count = ThreadCount(1, 4)
    seconds = {number: 1.0 if number == fastest else 1.5 for number in (1, 2, 4)}
    use(count, seconds, 3 * NUM_TRIALS)
    assert use(count, seconds, 100) == {fastest: 100}


def test_one_disturbed_call_changes_nothing():
    count = ThreadCount(1, 2)
    for i in range(2 * NUM_TRIALS):
        number = count.choose()
        count.note(50.0 if i == 2 else {1: 2.0, 2: 1.0}[number])
    assert count.choose() == 2


def test_all_are_tried_again_after_many_calls():
    count = ThreadCount(1, 2)
    use(count, {1: 1.0, 2: 2.0}, NUM_CALLS)
    use(count, {1: 2.0, 2: 1.0}, 2 * NUM_TRIALS)
    assert use(count, {2: 1.0}, 50) == {2: 50}


def test_a_single_choice_is_always_used():
    assert use(ThreadCount(8, 8), {8: 1.0}, 2 * NUM_CALLS) == {8: 2 * NUM_CALLS}


def test_a_settled_number_needs_no_times():
    assert not ThreadCount(8, 8).is_trial
    count = ThreadCount(1, 2)
    use(count, {1: 1.0, 2: 2.0}, 2 * NUM_TRIALS)
    assert not count.is_trial
    use(count, {1: 1.0}, NUM_CALLS - 2 * NUM_TRIALS)
    assert not count.is_trial
    count.choose()
    assert count.is_trial


def test_the_first_half_of_a_turn_does_not_count():
    """A turn begins with calls that are slow because the choice has changed."""
    trials = Trials("ab", num_turns=2, length=4)
    used = ""
    for _ in range(16):
        choice = trials.choose()
        is_early = len(used) % 4 < 2
        used += choice
        trials.note({"a": 9.0 if is_early else 1.0, "b": 2.0}[choice])
    assert used == "aaaabbbbaaaabbbb"
    assert not trials.is_trial
    assert [trials.choose() for _ in range(3)] == ["a"] * 3


def test_a_choice_that_is_slower_in_the_second_half_loses():
    trials = Trials("ab", num_turns=1, length=4)
    for _ in range(8):
        trials.note({"a": 3.0, "b": 2.0}[trials.choose()])
    assert trials.choose() == "b"


@pytest.mark.parametrize("num_threads", [2, 3, 8])
@pytest.mark.parametrize("delay", [0.0, 25e-6, 60e-6])
def test_the_caller_takes_as_much_as_lets_all_threads_end_together(delay: float, num_threads: int):
    size, each = 40 * num_threads, 5e-6
    head_start = HeadStart(size, num_threads)
    for _ in range(400):
        helper = (size - head_start.extra) / num_threads
        caller = helper + head_start.extra
        lag = (delay + helper * each) - caller * each
        head_start.note(lag, max(caller * each, delay + helper * each))
    assert lag == pytest.approx(-EARLIER, abs=each / 2)


@pytest.mark.parametrize("lag", [-1.0, 1.0])
def test_every_thread_keeps_some_work(lag: float):
    head_start = HeadStart(16, 2)
    for _ in range(1000):
        head_start.note(lag, 1.0)
    helper = (16 - head_start.extra) / 2
    assert helper >= 4
    assert helper + head_start.extra >= 4
