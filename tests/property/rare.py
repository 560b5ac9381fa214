"""Random examples until rare cases have occurred."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

from hypothesis import seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

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


def check_machine(
    machine: type[RuleBasedStateMachine],
    seen: Counter[T],
    wanted: Mapping[T, int],
    max_examples: int = 40,
) -> None:
    """Run a state machine for 60 operations at a time until cases have occurred.

    There are ``max_examples`` runs, or as many as the profile has if that is more.
    """
    max_examples = max(max_examples, settings().max_examples)
    chosen = settings(max_examples=max_examples, stateful_step_count=60)
    check_until_seen(
        lambda each: run_state_machine_as_test(each, settings=chosen), machine, seen, wanted
    )
