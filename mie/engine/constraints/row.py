"""Follow a constrained output token by token. The engine handles tokens, not text."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.config.params.sampling import SamplingParams
from mie.engine.constraints.constraint import Constraint, Constraints
from mie.errors import RequestError
from mie.ops.sampling import AllowedTokens, TokenMask, Words


class RowConstraint:
    """Follows the tokens of one row, and gives the tokens that may come next.

    The state derives from the row's tokens, so a row that is made again after a preemption, a fork
    or an exception needs nothing else. It starts at the first call.
    """

    def __init__(
        self,
        constraints: Constraints,
        params: SamplingParams,
        token_ids: Sequence[int],
        num_prompt: int,
        *,
        masks_early: bool = False,
    ) -> None:
        """``token_ids`` is the row's own list. It only grows.

        With ``masks_early``, a drawn row computes its mask as soon as its tokens are accepted,
        because the matcher's state is still in the CPU's cache. On a GPU it is better computed when
        it is needed, while the device computes the logits.
        """
        self._constraints, self._params = constraints, params
        self._num_words = ceil_div(constraints.vocab_size, 32)
        self._token_ids = token_ids
        self._num_prompt = self._num_accepted = num_prompt
        # About the token after those accepted:
        self._mask: Words | None = None
        self._masks_early = masks_early and params.temperature > 0
        self._is_open = False  # whether it is known that several may come
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else self._words_of(allowed)
        eos = self._words_of(constraints.eos_token_ids)
        self._not_eos = ~eos if params.ignore_eos else None
        self._has_limits = allowed is not None or params.ignore_eos

    @cached_property
    def _matcher(self) -> Constraint:
        return self._constraints.start(self._params.structured_outputs)

    def allowed(self, banned_ids: Sequence[int]) -> AllowedTokens:
        """Return the tokens that may follow the row's tokens, except for ``banned_ids``.

        With ``ignore_eos`` end-of-text tokens may follow only if no other token may.

        Raises:
            RequestError: no token may follow.
        """
        self._accept_new()
        if not (banned_ids or self._has_limits):
            return self
        words = self.words()
        if banned_ids:
            words = words & ~self._words_of(banned_ids)
        if self._allowed is not None:
            words = words & self._allowed
        if self._not_eos is not None and (others := words & self._not_eos).any():
            words = others
        if not words.any():
            raise RequestError(
                f"no token can follow after {len(self._token_ids) - self._num_prompt} tokens of "
                "output: structured_outputs allows none of those that min_tokens, "
                "allowed_token_ids and bad words allow (relax one of them)"
            )
        return TokenMask(words)

    def words(self) -> Words:
        """Return the mask of the next token, before bans [ceil(V / 32)]."""
        if self._mask is None:
            self._mask = np.frombuffer(self._matcher.mask(), np.int32, self._num_words)
        return self._mask

    def allows(self, token_id: int) -> bool:
        """Return whether `words` has a token, in less time than `words`."""
        return self._matcher.allows(token_id)

    def forced_token(self, banned_ids: Sequence[int]) -> int | None:
        """Return the only token that may follow, or None if the next step must sample.

        An error is left to that step too, so that it comes after the same tokens.
        """
        try:
            self._accept_new()
            if self._is_open:
                return None
            token_id = self._matcher.determined()
            self._is_open = token_id is None
            if self._is_open and self._masks_early:
                self.words()
        except RequestError:
            return None
        if token_id is None or token_id in banned_ids:
            return None
        is_allowed = self._allowed is None or TokenMask(self._allowed).allows(token_id)
        return token_id if is_allowed else None

    def _accept_new(self) -> None:
        while self._num_accepted < len(self._token_ids):
            self._matcher.accept(self._token_ids[self._num_accepted])
            self._num_accepted += 1
            self._mask, self._is_open = None, False

    def _words_of(self, token_ids: Iterable[int]) -> Words:
        words = np.zeros(self._num_words, np.uint32)
        ids = np.fromiter(token_ids, np.int64)
        np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        return words.view(np.int32)
