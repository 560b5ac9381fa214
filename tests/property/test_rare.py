"""Test the helper that runs properties until rare cases have occurred."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rare import ROUNDS, check_until_seen

seen: Counter[str] = Counter()
drawn: list[int] = []


@given(st.integers(0, 1 << 40))
@settings(max_examples=5)
def draw(number: int) -> None:
    drawn.append(number)
    seen["small" if number < 1 << 39 else "large"] += 1
    seen["examples"] += 1


def test_one_round_is_enough_for_a_common_case() -> None:
    check_until_seen(lambda test: test(), draw, seen, {"examples": 5})
    assert seen["examples"] == 5


def test_other_examples_are_drawn_until_a_case_has_occurred() -> None:
    drawn.clear()
    check_until_seen(lambda test: test(), draw, seen, {"examples": 12})
    assert seen["examples"] == 15
    rounds = [tuple(drawn[at : at + 5]) for at in (0, 5, 10)]
    assert len({*rounds}) == 3


def test_a_case_that_never_occurs_is_named() -> None:
    with pytest.raises(AssertionError, match=rf"too rare in {ROUNDS} rounds: .'fraction': 1."):
        check_until_seen(lambda test: test(), draw, seen, {"fraction": 1})
    assert seen["examples"] == 5 * ROUNDS
