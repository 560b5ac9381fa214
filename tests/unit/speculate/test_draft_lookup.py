"""Test the lookup of drafts: histories, continuations, finished answers, and their bounds."""

import random

import pytest

from mie.speculate.answers import Answers
from mie.speculate.history import BREAK, History
from mie.speculate.lookup import NO_GUESS, continued, most_frequent


def history_of(token_ids, width=2):
    history = History(width)
    history.extend(token_ids)
    return history


def longest_by_hand(known, last, width, longest):
    """Return the length of the longest suffix of ``last`` before a place with a next token."""
    best = 0
    for place in range(1, len(known)):
        length = 0
        while (
            length < min(place, longest, len(last))
            and known[place - 1 - length] == (last[-1 - length])
        ):
            length += 1
        best = max(best, length)
    return best if best >= width else 0


def test_a_sequence_goes_on_as_after_the_same_tokens():
    known = [1, 2, 3, 4, 9, 8, 1, 2, 3]
    assert continued(history_of(known), known, 4, 3) == ([4, 9, 8], 3)


def test_the_longest_run_wins_and_among_equals_the_latest():
    assert continued(history_of([7, 1, 2, 5, 8, 1, 2, 6, 7, 1, 2]), [7, 1, 2], 4, 1) == ([5], 3)
    assert continued(history_of([1, 2, 5, 1, 2, 6, 1, 2]), [1, 2], 4, 1) == ([6], 2)


def test_a_repetition_goes_on_past_the_end():
    known = [1, 2, 3, 1, 2, 3]
    assert continued(history_of(known), known, 3, 7).token_ids == [1, 2, 3, 1, 2, 3, 1]


def test_too_short_a_run_is_no_guess():
    assert continued(history_of([1, 2, 3, 4, 2]), [4, 2], 4, 3) == NO_GUESS
    assert continued(history_of([1]), [1], 4, 3) == NO_GUESS


def test_runs_are_found_as_by_hand_however_the_list_grows():
    draw = random.Random(3)
    for _ in range(200):
        known = [draw.randrange(3) for _ in range(draw.randrange(1, 25))]
        width, longest = draw.randrange(1, 3), draw.randrange(3, 6)
        history, start = History(width), 0
        while start < len(known):
            end = start + draw.randrange(1, 4)
            history.extend(known[start:end])
            start = end
        found = continued(history, known, longest, 2).num_equal
        assert found == longest_by_hand(known, known, width, longest)


def test_a_walk_takes_the_most_frequent_token_and_stops_where_few_agree():
    known = [1, 2, 5, 7, 1, 2, 5, 8, 1, 2, 6, 9]
    assert most_frequent([history_of(known)], [1, 2], 4, 3, 0.4) == ([5], 2)
    assert most_frequent([history_of(known)], [1, 2], 4, 2, 0.1).token_ids == [5, 8]


def test_a_walk_ends_at_a_break():
    other = history_of([1, 2, 3, BREAK, 4])
    assert most_frequent([other], [1, 2], 4, 5, 0.1).token_ids == [3]


def test_answers_of_other_salts_are_never_seen():
    answers = Answers(2, 10, 100)
    answers.add([1, 2, 3], "a")
    answers.add([1, 2, 4], None)
    guess = lambda salt: most_frequent(answers.of(salt), [1, 2], 4, 1, 0.1).token_ids  # noqa: E731
    assert [guess("a"), guess(None), guess("b")] == [[3], [4], []]
    answers.clear()
    assert [guess("a"), answers.num_tokens] == [[], 0]


@pytest.mark.parametrize("most_tokens", [20, 50, 64])
def test_answers_are_bounded_in_tokens_and_the_latest_stay(most_tokens):
    answers, draw = Answers(2, 1000, most_tokens), random.Random(1)
    for number in range(200):
        length = draw.randrange(2, 14)
        answers.add([number] * length, draw.choice(["a", "b", "c"]))
        assert answers.num_tokens <= most_tokens
    answers.add([7, 8, 9], "a")
    assert most_frequent(answers.of("a"), [7, 8], 4, 1, 0.1).token_ids == [9]


def test_answers_are_bounded_in_number():
    answers = Answers(2, 4, 10**6)
    for number in range(50):
        answers.add([number, number + 1, 5], None)
        assert answers.num_tokens <= 4 * 4
    assert Answers(2, 0, 10**6).of(None) == []
