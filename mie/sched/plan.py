"""Describe one step as plain data that pickles and holds no sequences."""

from dataclasses import dataclass

from mie.config.params.sampling import SamplingParams
from mie.memory.table import Moves

SeqId = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class NewRow:
    """A sequence that gets a row of the runner (admission, resumption or fork)."""

    row: int
    choice: int
    """Index among the request's n choices."""
    token_ids: tuple[int, ...]
    num_computed: int
    """Number of the sequence's tokens with stored keys and values."""
    num_prompt: int
    max_tokens: int
    """Maximum number of its tokens, including the prompt's."""
    params: SamplingParams
    banned_ids: tuple[int, ...]
    """Banned until ``params.min_tokens`` tokens are generated."""
    draw_key: tuple[int, int]
    adapter: int = 0
    """The slot of its adapter, or 0."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens of one sequence to compute: of its prompt, lost in a preemption, forced, or drafts."""

    seq_id: SeqId
    row: int
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    choices: tuple[int, ...]
    """Choices that sample from the last token's logits. Empty while the prompt is incomplete."""
    num_drafts: int = 0
    """Number of tokens at the end that are guesses. Each is kept if the model draws it too."""
    scored: tuple[int, int]
    """The positions (start, stop) with logits for the log-probabilities of known tokens.

    The next tokens are all in the prompt, or all forced.
    """

    @property
    def drafts(self) -> tuple[int, ...]:
        """The tokens that are guesses."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def end(self) -> int:
        """The position after the last token, or the number of cached tokens after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: moves of blocks, tokens to compute, and preempted sequences."""

    step: int
    new_rows: tuple[NewRow, ...]
    moves: Moves
    decodes: tuple[int, ...]
    """Rows, ascending, that compute their last token and sample the next one.

    The runner has the rest, so a decode costs almost nothing to plan.
    """
    chunks: tuple[Chunk, ...]
    preempted: tuple[SeqId, ...]

    @property
    def num_prefill_tokens(self) -> int:
        """The number of tokens in the chunks without drafts."""
        return sum([len(chunk.token_ids) for chunk in self.chunks if not chunk.num_drafts])

    @property
    def num_tokens(self) -> int:
        """The number of tokens to compute, including one for each decode."""
        return len(self.decodes) + sum([len(chunk.token_ids) for chunk in self.chunks])

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed. There may still be moves."""
        return not self.decodes and not self.chunks
