"""What one step does, as plain data: it pickles, and holds no sequence."""

from dataclasses import dataclass

from mie.memory.moves import Moves
from mie.sched.params import SamplingParams

SeqId = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class NewRow:
    """What the runner must know of a sequence that gets a row: at admission, resumption or fork."""

    row: int
    choice: int
    """Which of the request's n choices it is."""
    token_ids: tuple[int, ...]
    num_computed: int
    """Of these, tokens whose keys and values are stored."""
    num_prompt: int
    params: SamplingParams
    banned_ids: tuple[int, ...]
    """Not to be drawn before ``params.min_tokens`` tokens."""
    draw_key: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Tokens of one sequence, from its prompt or lost in a preemption, that a step computes."""

    seq_id: SeqId
    row: int
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    choices: tuple[int, ...]
    """Choices that sample from the last token's logits; none while the prompt is incomplete."""
    scored: tuple[int, int]
    """The prompt positions (start, stop) whose logits give prompt log-probabilities."""

    @property
    def end(self) -> int:
        """One past the position of the last token: the tokens in the cache after the step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: what is moved, what is computed, and who lost their blocks for it."""

    step: int
    new_rows: tuple[NewRow, ...]
    moves: Moves
    decodes: tuple[int, ...]
    """Rows, ascending, whose last token is computed and whose next one is sampled. The runner knows
    the rest, so that a decode costs next to nothing to plan."""
    chunks: tuple[Chunk, ...]
    preempted: tuple[SeqId, ...]

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + self.num_prefill_tokens

    @property
    def is_empty(self) -> bool:
        """Whether nothing is computed; there may be moves all the same."""
        return not self.decodes and not self.chunks
