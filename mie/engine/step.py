"""Define what a step of the engine returns."""

from dataclasses import dataclass

from mie.sched.result import TokenLogprobs
from mie.sched.sequence import FinishReason
from mie.stats.request import RequestMetrics
from mie.stats.step import StepStats


@dataclass(slots=True)
class SequenceOutput:
    """The new tokens of one choice."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics
    """The request's own object, which keeps changing."""


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The choices with new tokens, the prompt log-probabilities by request, and the numbers."""

    outputs: tuple[SequenceOutput, ...]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    failed: tuple[str, ...] = ()
    """The requests that failed because of an error of their own (`Request.error`)."""
    stats: StepStats
