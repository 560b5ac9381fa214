"""What one step yielded, as plain data: the answer to its plan."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position, before any edit of the logits or temperature."""

    token_ids: list[int]
    """The chosen token first, then the most likely ones."""
    logprobs: list[float]
    rank: int
    """Of the chosen token; the most likely has rank 1."""


@dataclass(frozen=True, kw_only=True)
class ChunkResult:
    """What one chunk of the plan yielded."""

    token_ids: list[int]
    """One for each of the chunk's choices."""
    logprobs: list[TokenLogprobs | None]
    """As many; None where the request did not ask for them."""
    prompt_logprobs: list[TokenLogprobs]
    """One for each of the chunk's scored prompt positions."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step yielded, in the order of its plan."""

    token_ids: list[int]
    """One for each decode."""
    logprobs: list[TokenLogprobs | None]
    """As many; None where the request did not ask for them."""
    chunks: list[ChunkResult]
