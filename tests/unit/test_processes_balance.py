"""Test how work moves between processes, with a model of their times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from mie.ops_cpu.processes.balance import LEAST_CHANGE, MOST_UNEQUAL, NUM_STEPS, UNITS, Balance

FIXED = 0.1
"""Seconds of a step that do not depend on the share. All work together takes a second."""


def step(balance: Balance, seconds: Sequence[float], lates: Sequence[float] | None = None) -> None:
    """Let each process take as many seconds for all the work, and be late once."""
    shares = [(stop - start) / UNITS for start, stop in pairwise(balance.ends)]
    lates = lates or [0.0] * len(seconds)
    works = [
        FIXED + share * each + late
        for share, each, late in zip(shares, seconds, lates, strict=True)
    ]
    balance.note(works, [max(works) - work for work in works])


def units(balance: Balance) -> list[int]:
    return [stop - start for start, stop in pairwise(balance.ends)]


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8])
def test_equal_processes_keep_equal_shares(number: int) -> None:
    balance = Balance(number)
    before = balance.ends
    assert max(units(balance)) - min(units(balance)) <= 1
    for _ in range(10 * NUM_STEPS):
        share = 1 / number
        balance.note([share] * number, [0.0] * number)
    assert balance.ends is before


@pytest.mark.parametrize("slow", [0, 1, 2])
@pytest.mark.parametrize("number", [2, 3])
def test_a_process_that_is_twice_as_slow_gets_about_half_as_much(slow: int, number: int) -> None:
    slow = min(slow, number - 1)
    balance, seconds = Balance(number), [1.0] * number
    seconds[slow] = 2.0
    for _ in range(20 * NUM_STEPS):
        step(balance, seconds)
    shares = units(balance)
    own = shares.pop(slow)
    assert all(0.4 < own / other < 0.65 for other in shares)
    for _ in range(20 * NUM_STEPS):  # it is fast again
        step(balance, [1.0] * number)
    shares = units(balance)
    assert max(shares) - min(shares) <= 2 * LEAST_CHANGE


@pytest.mark.parametrize("seconds", [[1.0, 1.05], [1.05, 1.0], [1.0, 1.0, 1.05]])
def test_a_small_difference_that_stays_moves_no_border(seconds: list[float]) -> None:
    """A border moves by more than it is worth, and would have to move back."""
    balance = Balance(len(seconds))
    before = balance.ends
    for _ in range(100 * NUM_STEPS):
        step(balance, seconds)
    assert balance.ends is before


SPEEDS = [[1, 1.1], [1, 2], [8, 1], [1, 1, 2], [1, 2, 3, 4, 5], [1, 1, 1, 3, 1, 1, 1, 1]]


@pytest.mark.parametrize("seconds", SPEEDS)
def test_borders_come_to_rest(seconds: list[float]) -> None:
    balance, num_changes = Balance(len(seconds)), 0
    for _ in range(300 * NUM_STEPS):
        before = balance.ends
        step(balance, seconds)
        num_changes += balance.ends is not before
    assert num_changes <= 10
    shares = units(balance)
    times = [FIXED + each * n / UNITS for each, n in zip(seconds, shares, strict=True)]
    assert max(times) < 1.25 * sum(times) / len(times)


@pytest.mark.parametrize("at", [0, NUM_STEPS // 2, NUM_STEPS - 1])
def test_single_late_steps_change_nothing(at: int) -> None:
    balance = Balance(2)
    before = balance.ends
    for i in range(10 * NUM_STEPS):
        step(balance, [1.0, 1.0], [0.0, 100.0 if i % NUM_STEPS == at else 0.0])
    assert balance.ends is before


def test_shares_change_only_after_enough_steps() -> None:
    balance = Balance(2)
    for i in range(1, 3 * NUM_STEPS + 1):
        before = balance.ends
        step(balance, [1.0, 9.0])
        assert (balance.ends is not before) == (i % NUM_STEPS == 0)


def test_borders_move_by_some_units_or_not_at_all() -> None:
    balance, rng, num_changes = Balance(3), random.Random(0), 0
    for _ in range(200 * NUM_STEPS):
        before = balance.ends
        step(balance, [rng.uniform(0.5, 2.0) for _ in range(3)])
        if balance.ends is not before:
            num_changes += 1
            moves = [abs(a - b) for a, b in zip(balance.ends, before, strict=True)]
            assert max(moves) >= LEAST_CHANGE
    assert num_changes > 0


@pytest.mark.parametrize("number", [2, 3, 5])
def test_shares_stay_within_limits_and_are_all_of_the_work(number: int) -> None:
    balance, rng = Balance(number), random.Random(number)
    for _ in range(100):
        seconds = [rng.choice([1e-9, 1.0, 1e3]) for _ in range(number)]
        for _ in range(NUM_STEPS):
            step(balance, seconds)
        assert balance.ends[0] == 0
        assert balance.ends[-1] == sum(units(balance)) == UNITS
        # Shares are scaled so that their sum is 1, and borders are rounded.
        assert min(units(balance)) >= 0.7 * UNITS / number / MOST_UNEQUAL - 1


def test_steps_without_shared_work_change_nothing() -> None:
    balance = Balance(2)
    before = balance.ends
    for _ in range(2 * NUM_STEPS):
        balance.note([0.0, 0.0], [0.0, 1.0])
    assert balance.ends is before
