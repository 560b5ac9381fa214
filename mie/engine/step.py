"""Define what a step of the engine returns."""

from collections.abc import Iterable
from dataclasses import dataclass

from mie.sched.result import TokenLogprobs
from mie.sched.sequence import FinishReason, Sequence
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


def outputs_of(sampled: Iterable[Sequence]) -> tuple[SequenceOutput, ...]:
    """Return what each sequence got since its last output."""
    outputs = []
    for seq in sampled:
        first, seq.num_given = seq.num_given, seq.num_final
        start = seq.request.num_prompt
        output = SequenceOutput(
            seq.request.request_id,
            seq.index,
            tuple(seq.token_ids[start + first : start + seq.num_given]),
            tuple(seq.logprobs[first:]),
            seq.finish_reason,
            seq.stop_reason,
            seq.request.metrics,
        )
        outputs.append(output)
    return tuple(outputs)
