"""Test how many drafts a step computes: the rule, its table of costs, and its bounds."""

import pytest

from mie.speculate.costs import COSTS, costs_of
from mie.speculate.rule import RETRY, Record, RowCosts, Rule, Share


def learned(rule, record, num_right, num_guesses, times=40, num_equal=4):
    record.num_equal = num_equal
    for _ in range(times):
        rule.learn(record, num_guesses, num_right)


def test_a_share_forgets_slowly():
    share = Share()
    share.add(2, 3, 1.0)
    share.add(1, 1, 0.5)
    assert (share.right, share.drawn) == (2.0, 2.5)


@pytest.mark.parametrize("name", sorted(COSTS))
def test_costs_of_rows_rise_and_begin_with_one(name):
    costs = [COSTS[name].of(count) for count in range(1, 200)]
    assert costs[0] == 1
    assert costs == sorted(costs)


def test_more_rows_than_the_table_cost_as_much_as_the_last():
    costs = RowCosts([1, 1.5, 2.5])
    assert [costs.of(count) for count in (0, 1, 2, 3, 5)] == [1, 1, 1.5, 2.5, 4.5]


def test_right_guesses_make_long_drafts_and_wrong_ones_none():
    rule = Rule(COSTS["jit"])
    good, bad = Record(), Record()
    assert rule.length(good, 4, 7, 1, 1) > 0
    learned(rule, good, 7, 7)
    assert rule.length(good, 4, 7, 1, 1) == 7
    assert rule.length(good, 4, 3, 1, 1) == 3, "at most"
    learned(rule, bad, 0, 7)
    assert rule.length(bad, 4, 7, 1, 1) == 0, "its own share counts more than the others'"


def test_a_sequence_without_guesses_tries_again_alone_and_not_in_a_batch():
    rule, record = Rule(COSTS["jit"]), Record()
    learned(rule, record, 0, 3, num_equal=2)
    lengths = [rule.length(record, 2, 7, 1, 1) for _ in range(2 * RETRY)]
    assert lengths.count(1) == 2
    assert lengths.count(0) == 2 * RETRY - 2
    assert not any(rule.length(record, 2, 7, 8, 8) for _ in range(2 * RETRY))


def test_a_batch_that_computes_all_the_time_gets_no_drafts():
    rule, record = Rule(COSTS["jit"]), Record()
    for num_rows in (8, 64, 500):
        assert rule.length(record, 3, 7, num_rows, num_rows) == 0


def test_rows_that_cost_nothing_get_drafts_in_any_batch():
    rule = Rule(RowCosts([1.0] * 100))
    assert rule.length(Record(), 2, 7, 60, 60) == 7


def test_the_length_is_the_one_with_most_tokens_for_its_time():
    rule, record = Rule(COSTS["jit"]), Record()
    rule.learn(record, 4, 2)
    chance, costs = rule.chance(record, 3), COSTS["jit"]
    rates = [
        sum(chance**index for index in range(count + 1)) / costs.of(1 + count) for count in range(8)
    ]
    assert rule.length(record, 3, 7, 1, 1) == rates.index(max(rates))


def test_rounded_activations_have_costs_of_their_own_where_a_backend_has_them() -> None:
    assert costs_of("jit", "int8") is COSTS["jit int8"]
    assert costs_of("jit", "float32") is COSTS["jit"]
    assert costs_of("numpy", "int8") is COSTS["numpy"]
    assert costs_of("mine", "float32") is COSTS["jit"]
