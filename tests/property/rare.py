"""Random examples until rare cases have occurred."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from hypothesis import seed

T = TypeVar("T", bound=Hashable)

ROUNDS = 12
"""Maximum number of times that a property runs. One is nearly always enough."""


def check_until_seen(
    check: Callable[[Any], object], test: Any, seen: Counter[T], wanted: Mapping[T, int]
) -> None:
    """Run a property, and again with other examples while cases are too rare.

    ``check`` runs ``test``, a test or a state machine of Hypothesis, and counts cases in ``seen``.
    A new choice of a setting changes all examples, so a case that is rare may be absent from some.

    Raises:
        AssertionError: a case has occurred less often than ``wanted`` after all rounds.
    """
    seen.clear()
    for number in range(ROUNDS):
        check(seed(number)(test) if number else test)
        lacking = {case: count for case, count in wanted.items() if seen[case] < count}
        if not lacking:
            return
    raise AssertionError(f"too rare in {ROUNDS} rounds: {lacking} of {dict(seen)}")
