"""What a user gets back, spelled as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mie.errors import RequestFailedError
from mie.frontend.outputs_json import as_dict, from_dict
from mie.reprs import short_repr
from mie.sched.sequence import FinishReason
from mie.stats.request import RequestMetrics


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """One token's log-probability at a position, before temperature and any edit of the logits."""

    logprob: float
    rank: int | None
    """1 for the most likely token of the position."""
    decoded_token: str | None
    """The token's text, or None if the request is not detokenized."""


LogprobRow = dict[int, Logprob]
"""token id -> Logprob: the chosen token first, then the most likely ones."""


@dataclass(kw_only=True, slots=True)
class CompletionOutput:
    """One of a request's n choices."""

    index: int
    text: str = ""
    """All of the text so far; under ``output_kind`` DELTA only what is new."""
    new_text: str = ""
    """What this output adds to the text of the one before it."""
    token_ids: list[int] = field(default_factory=list)
    """All generated tokens so far; under ``output_kind`` DELTA only the new ones."""
    cumulative_logprob: float | None = None
    """Sum of all chosen tokens' log-probabilities, if ``logprobs`` were asked for."""
    logprobs: list[LogprobRow] | None = None
    """One entry for each of ``token_ids``, if ``logprobs`` were asked for."""
    finish_reason: FinishReason | None = None
    """"stop", "length", "abort" or "error"; None while it runs."""
    stop_reason: int | str | None = None
    """The stop string or the id from ``stop_token_ids``; None for EOS and for other endings."""

    __repr__ = short_repr

    def finished(self) -> bool:
        """Return whether this choice has ended."""
        return self.finish_reason is not None


@dataclass(kw_only=True, slots=True)
class RequestOutput:
    """A request and its choices at one moment."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobRow | None] | None = None
    """One entry for each prompt token that is computed so far; None for the first token, which
    nothing predicts."""
    outputs: list[CompletionOutput]
    """All choices; under ``output_kind`` DELTA those with news."""
    finished: bool = False
    """Whether every choice has ended. Each request gives exactly one such output, its last."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that were found in the prefix cache."""
    metrics: RequestMetrics | None = None
    """The request's own, which goes on growing while it runs."""
    error: str | None = None
    """Why the request failed, if its ``finish_reason`` is "error"."""

    __repr__ = short_repr

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values. `from_dict` makes an equal output of them."""
        return as_dict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RequestOutput:
        """Return the output that `as_dict` wrote.

        Raises:
            ConfigError: a field is unknown or missing, or its value is of another type.
        """
        return from_dict(cls, values)


def raise_failed(outputs: list[RequestOutput]) -> None:
    """Raise `RequestFailedError` if a request among these failed."""
    failed = [output for output in outputs if output.error is not None]
    if failed:
        first = failed[0]
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise RequestFailedError(
            f"request {first.request_id} failed: {first.error}{more}; the others are in `outputs`",
            outputs,
        )
