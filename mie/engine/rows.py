"""Hold the runner's state of a running sequence, and choose the controls of its next token."""

from collections.abc import Iterable, Mapping

import numpy as np

from mie.engine.constraints.bad_words import BadWords
from mie.engine.constraints.constraint import Constraints
from mie.engine.constraints.row import RowConstraint
from mie.engine.uniform import Uniforms
from mie.ops.sampling import GREEDY, RowControls
from mie.sched.plan import NewRow


class RowFault(Exception):
    """The sampling or the log-probabilities of one row raised. Other rows are not affected."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__(f"row {row}: {type(error).__name__}: {error}")
        self.row = row
        self.error = error


class Row:
    """The runner's state of one running sequence."""

    def __init__(
        self, new: NewRow, constraints: Constraints | None = None, *, masks_early: bool = False
    ) -> None:
        self.token_ids = list(new.token_ids)  # for a plain row, only the initial tokens
        self.num_prompt = new.num_prompt
        self.params = new.params
        self.choice = new.choice
        self._new = new
        self._bad_words = BadWords(new.params.bad_words_token_ids or ())
        bias = new.params.logit_bias
        self._bias = (np.array(list(bias)), np.array(list(bias.values()))) if bias else None
        allowed = new.params.allowed_token_ids
        self._allowed_ids = None if allowed is None else np.unique(allowed)
        self._constraint: RowConstraint | None = None
        self._greedy = GREEDY  # takes the largest logit that the constraint allows
        if new.params.structured_outputs is not None:
            assert constraints is not None, "the engine refuses what it cannot constrain"
            self._constraint = RowConstraint(
                constraints, new.params, self.token_ids, new.num_prompt, masks_early=masks_early
            )
            self._greedy = RowControls(allowed=self._constraint)
        self._is_greedy = new.params.temperature == 0 and not _has_edits(new)
        """Whether it takes the largest logit, perhaps of those that a constraint allows."""
        self.is_plain = self._is_greedy and self._constraint is None
        self._end_ids = frozenset(new.banned_ids)
        self._uniforms = Uniforms(*new.draw_key)

    @property
    def reads_tokens(self) -> bool:
        """Whether the choice of a token depends on the tokens before it, beside the logits."""
        params = self.params
        counts_tokens = params.presence_penalty or params.frequency_penalty
        has_penalty = bool(counts_tokens) or params.repetition_penalty != 1.0
        return self._constraint is not None or has_penalty or self._bad_words.read_tokens

    @property
    def may_run_ahead(self) -> bool:
        """Whether its next step can be launched before this step's token is known."""
        return self.params.logprobs is None and not self.reads_tokens

    def controls(self, choice: int, num_pending: int = 0) -> RowControls:
        """Return the controls of a future token of the row, or of a choice that forks from it.

        ``num_pending`` tokens between the row's last token and that one are not known yet.
        """
        if self.is_plain:
            return GREEDY
        params = self.params
        num_tokens = len(self.token_ids) + num_pending
        num_generated = num_tokens - self.num_prompt
        traced = params.trace_decode_token_ids or ()
        seen_ids = output_ids = output_counts = None
        if params.repetition_penalty != 1.0:
            seen_ids = np.unique(self.token_ids)
        if num_generated and (params.presence_penalty or params.frequency_penalty):
            generated = self.token_ids[self.num_prompt :]
            output_ids, output_counts = np.unique(generated, return_counts=True)
        banned_ids = self._banned_ids(num_generated)
        allowed, constraint = None, self._constraint
        if constraint is not None and num_generated >= len(traced):
            if (token_id := constraint.forced_token(banned_ids)) is not None:
                return RowControls(forced_id=token_id)
            allowed = constraint.allowed(banned_ids)
            if self._is_greedy and allowed is constraint:
                return self._greedy
        return RowControls(
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            min_p=params.min_p,
            uniform=self._uniforms.at(choice, num_tokens) if params.temperature > 0 else 0.0,
            bias=self._bias,
            allowed_ids=self._allowed_ids if allowed is None else None,
            allowed=allowed,
            banned_ids=np.array(banned_ids) if banned_ids and allowed is None else None,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seen_ids=seen_ids,
            output_ids=output_ids,
            output_counts=output_counts,
            forced_id=traced[num_generated] if num_generated < len(traced) else None,
        )

    def num_top(self, position: int) -> int:
        """Return how many log-probabilities the token at a position of the row gets."""
        is_prompt = position < self.num_prompt
        return (self.params.prompt_logprobs if is_prompt else self.params.logprobs) or 0

    def take_forced(self, limit: int) -> tuple[int, ...]:
        """Append the tokens that must follow in a structured output, and return them.

        There are at most ``limit``, and none after the end of the output. Log-probabilities come in
        the step that computes the tokens before. If they are wanted, the end is left to that step.
        """
        if self._constraint is None:
            return ()
        run: list[int] = []
        while len(run) < limit and not self._is_end(self.token_ids[-1], len(self.token_ids)):
            num_generated = len(self.token_ids) - self.num_prompt
            if num_generated < len(self.params.trace_decode_token_ids or ()):
                break
            token_id = self._constraint.forced_token(self._banned_ids(num_generated))
            if token_id is None:
                break
            is_end = self._is_end(token_id, len(self.token_ids) + 1)
            if is_end and self.params.logprobs is not None:
                break
            self.token_ids.append(token_id)
            run.append(token_id)
        return tuple(run)

    def _is_end(self, token_id: int, num_tokens: int) -> bool:
        return token_id in self._end_ids or num_tokens >= self._new.max_tokens

    def _banned_ids(self, num_generated: int) -> list[int]:
        banned_ids = self._bad_words.completing(self.token_ids, num_generated)
        if num_generated < self.params.min_tokens:
            banned_ids += self._new.banned_ids
        return banned_ids


def take_forced(
    rows: Mapping[int, Row], sampled: Iterable[int], limit: int
) -> dict[int, tuple[int, ...]]:
    """Append the tokens that must follow a row's new token, and return them by row.

    Choices that fork in this step have no rows yet.
    """
    forced = {}
    for row in sampled:
        try:
            run = rows[row].take_forced(limit)
        except Exception as error:
            raise RowFault(row, error) from error
        if run:
            forced[row] = run
    return forced


def _has_edits(new: NewRow) -> bool:
    """Whether anything but a structured output may edit the logits or choose a token."""
    params = new.params
    return bool(
        params.repetition_penalty != 1
        or (params.presence_penalty or params.frequency_penalty)
        or (params.logit_bias or params.allowed_token_ids or params.bad_words_token_ids)
        or (params.trace_decode_token_ids or (params.min_tokens and new.banned_ids))
    )
