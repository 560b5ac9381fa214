"""Follow an output token by token with llguidance.

llguidance reports errors as states of a matcher and raises nothing. Every call here checks for
them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mie.base.arithmetic import ceil_div
from mie.errors import RequestError
from mie.structured.limits import FIRST_SECONDS, SECONDS_PER_TOKEN, why

if TYPE_CHECKING:
    from mie.structured.grammars import Grammar


class Matcher:
    """The state of one output: the tokens that may come next.

    Every question raises `RequestError` if the grammar is too complex to continue.
    """

    def __init__(self, grammar: Grammar, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        self._grammar = grammar  # stays compiled, so that an equal output can start at once
        self._matcher = grammar.matcher.deep_copy()
        self._eos_token_ids = eos_token_ids
        self._num_bytes = 4 * ceil_div(vocab_size, 32)
        self._seconds_left = FIRST_SECONDS
        # The tokens of the next characters, if those are determined. The library finds them again
        # at each token and tokenizes all that are left, so they are kept until they are accepted.
        # They are found at the same tokens each time, so the same tokens give the same state.
        self._run: Sequence[int] | None = None
        self._earlier_runs: list[Sequence[int]] = []

    def determined(self) -> int | None:
        """Return the only token that may come next, or None if there are several.

        The next characters may determine it, or the end.
        """
        run = self._next_run()
        if run:
            return run[0]
        if self._matcher.is_stopped() and len(self._eos_token_ids) == 1:
            self._check()
            return self._eos_token_ids[0]
        return None

    def mask(self) -> bytes:
        """Return a bit for each token that may come next: token i is bit i % 8 of byte i // 8."""
        run = self._next_run()
        if run:
            return self._mask_of(run[0])
        with self._counted():
            mask: bytes = self._matcher.compute_bitmask()
        self._check()
        return mask

    def _mask_of(self, token_id: int) -> bytes:
        return (1 << token_id).to_bytes(self._num_bytes, "little")

    def allows(self, token_id: int) -> bool:
        """Return whether the mask has a token, in a fraction of a mask's time."""
        run = self._next_run()
        if run:
            return token_id == run[0]
        if token_id in self._eos_token_ids:  # `validate_tokens` refuses some that masks have
            return bool(self.mask()[token_id // 8] >> token_id % 8 & 1)
        self._check()
        with self._counted():
            return self._matcher.validate_tokens([token_id]) == 1

    def accept(self, token_id: int) -> None:
        """Advance by a token. A token that may not come next is a `RequestError`."""
        run, self._run = self._next_run(), ()
        self._seconds_left += SECONDS_PER_TOKEN
        with self._counted():
            is_accepted = self._matcher.consume_token(token_id)
        if not is_accepted:
            raise RequestError(self._cannot_be_followed())
        self._earlier_runs.append(run)
        self._run = (run[1:] or None) if run and run[0] == token_id else None

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the CPU time that the library takes."""
        began = time.thread_time()
        yield
        self._seconds_left -= time.thread_time() - began

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RequestError(self._cannot_be_followed())
        if self._seconds_left < 0:
            raise RequestError(
                f"structured_outputs cannot be followed: its masks took more than {FIRST_SECONDS:g}"
                f" s of CPU time and {SECONDS_PER_TOKEN:g} s for each token (write a simpler one)"
            )

    def _cannot_be_followed(self) -> str:
        return f"structured_outputs cannot be followed: {why(self._matcher.get_error())}"

    def _next_run(self) -> Sequence[int]:
        run = self._run
        if run is None:
            with self._counted():
                run = self._run = self._matcher.compute_ff_tokens() or ()
        return run

    def validate(self, token_ids: Sequence[int]) -> int:
        """Return how many of the tokens may come next, one after another. Nothing changes."""
        count = self._matcher.validate_tokens(list(token_ids))
        if count < len(token_ids) and token_ids[count] in self._eos_token_ids:
            # The library refuses an end of text here that its masks allow.
            trial = self._matcher.deep_copy()
            trial.consume_tokens(list(token_ids[:count]))
            count += trial.is_accepting()
        return count

    def rollback(self, num_tokens: int) -> None:
        """Return to the state before the last accepted tokens."""
        assert self._matcher.rollback(num_tokens), "more tokens than were accepted"
        if num_tokens > 0:
            self._run = self._earlier_runs[-num_tokens]
            del self._earlier_runs[-num_tokens:]
