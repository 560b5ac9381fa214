"""Hold the results of one step as plain data, in reply to its plan."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, before temperature and any edits of the logits."""

    token_ids: list[int]
    """The chosen token first, then the most likely ones."""
    logprobs: list[float]
    rank: int
    """Rank of the chosen token. The most likely token has rank 1."""


@dataclass(frozen=True, kw_only=True)
class ChunkResult:
    """The result of one chunk of the plan."""

    token_ids: list[int]
    """One for each of the chunk's choices. With drafts: the drafts that are kept, and one more."""
    logprobs: list[TokenLogprobs | None]
    """Log-probabilities for each of ``token_ids``, or None without ``logprobs``."""
    scored: list[TokenLogprobs]
    """One for each of the chunk's scored positions."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a step, in the order of its plan."""

    token_ids: list[int]
    """One for each decode."""
    logprobs: list[TokenLogprobs | None]
    """Log-probabilities for each decode, or None without ``logprobs``."""
    chunks: list[ChunkResult]
    forced: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """By row, tokens that must follow the row's new one. Only the last may end its sequence."""

    @property
    def num_tokens(self) -> int:
        """The number of new tokens."""
        more = [*[chunk.token_ids for chunk in self.chunks], *self.forced.values()]
        return len(self.token_ids) + sum(map(len, more))
