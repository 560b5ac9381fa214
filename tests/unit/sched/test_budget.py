"""Test how the tokens of a step are divided between clients."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.sched.orders.parts import split

EQUAL = {"a": 1, "b": 1, "c": 1}


@pytest.mark.parametrize(
    ("total", "wanted", "weights", "parts"),
    [
        (9, {"a": 90, "b": 90, "c": 90}, EQUAL, {"a": 3, "b": 3, "c": 3}),
        (10, {"a": 90, "b": 90, "c": 1}, EQUAL, {"c": 1, "a": 4, "b": 5}),
        (12, {"a": 90, "b": 90}, {"a": 2, "b": 1}, {"a": 8, "b": 4}),
        (12, {"a": 3, "b": 90}, {"a": 2, "b": 1}, {"a": 3, "b": 9}),
        (1, {"a": 90, "b": 90}, EQUAL, {"a": 0, "b": 1}),
    ],
)
def test_parts_are_in_proportion_to_the_weights(total, wanted, weights, parts):
    assert split(total, wanted, weights) == parts


@given(st.integers(1, 100), st.dictionaries(st.integers(0, 9), st.integers(1, 60), min_size=1))
def test_all_tokens_are_given_and_each_gets_its_part(total, wanted):
    parts = split(total, wanted, dict.fromkeys(wanted, 1))
    assert sum(parts.values()) == min(total, sum(wanted.values()))
    assert all(min(wanted[key], total // len(wanted)) <= parts[key] <= wanted[key] for key in parts)
