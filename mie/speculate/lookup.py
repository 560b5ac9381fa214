"""Guess the next tokens of a sequence from the places where its last tokens occurred before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mie.speculate.history import BREAK, History


class Guess(NamedTuple):
    """The next tokens, and the number of last tokens that they followed before."""

    token_ids: list[int]
    num_equal: int


NO_GUESS = Guess([], 0)


def continued(history: History, last: Sequence[int], longest: int, most: int) -> Guess:
    """Continue like the list after the longest run of ``last`` tokens, the latest among equals.

    ``longest`` limits the run (Saxena, prompt lookup decoding, 2023). A continuation that reaches
    the end of the list goes on with its own tokens, as a repetition does.
    """
    best = num_equal = 0
    for place, length in history.places(last, longest):
        if length > num_equal:
            best, num_equal = place, length
            if length == longest:
                break
    if not num_equal:
        return NO_GUESS
    return Guess([*_after(history.token_ids, best, most)], num_equal)


def most_frequent(
    histories: Iterable[History], last: Sequence[int], longest: int, most: int, min_share: float
) -> Guess:
    """Continue as most of the lists did after the longest run of ``last`` tokens.

    This is a walk down the suffix tree of the lists (Oliaro et al., SuffixDecoding, 2025,
    arXiv:2411.04975), at the latest places only. The walk ends where less than ``min_share`` of the
    places agree.
    """
    found = [
        (length, history, place)
        for history in histories
        for place, length in history.places(last, longest)
    ]
    num_equal = max((length for length, _, _ in found), default=0)
    if not num_equal:
        return NO_GUESS
    runs = [
        _after(history.token_ids, place, most)
        for length, history, place in found
        if length == num_equal
    ]
    num_places, token_ids = len(runs), []
    for _ in range(most):
        following = [(token_id, run) for run in runs if (token_id := next(run, None)) is not None]
        if not following:
            break
        # Of equally frequent tokens, the latest place of the first list wins.
        [(token_id, count)] = Counter(token_id for token_id, _ in following).most_common(1)
        if count < min_share * num_places:
            break
        token_ids.append(token_id)
        runs = [run for each, run in following if each == token_id]
    return Guess(token_ids, num_equal)


def _after(known: Sequence[int], place: int, most: int) -> Iterator[int]:
    """Yield the tokens from a place up to a break, and where the list ends, those again."""
    length = len(known) - place
    for index in range(most):
        token_id = known[place + index % length]
        if token_id == BREAK:
            return
        yield token_id
