"""What one step does, as plain data: it pickles, and holds no sequence."""

from dataclasses import dataclass

from mie.sched.params import SamplingParams

SeqId = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class NewRow:
    """What the runner must know of a sequence that gets a row: at admission, resumption or fork."""

    token_ids: tuple[int, ...]
    num_prompt: int
    params: SamplingParams
    banned_ids: tuple[int, ...]
    """Not to be drawn before ``params.min_tokens`` tokens."""
    draw_key: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The tokens of one sequence that a step computes."""

    seq_id: SeqId
    row: int
    start: int
    """Position of the first token."""
    token_ids: tuple[int, ...]
    block_updates: tuple[tuple[int, int], ...]
    """(index, block id): entries of the row's block table that are new or replaced."""
    copies: tuple[tuple[int, int], ...]
    """(source, destination): blocks to copy before anything is written."""
    choices: tuple[int, ...]
    """Choices that sample from the last token's logits; none while the prompt is incomplete."""
    scored: tuple[int, int]
    """The prompt positions (start, stop) whose logits give prompt log-probabilities."""
    new_row: NewRow | None

    @property
    def end(self) -> int:
        """One past the position of the last token: the tokens in the cache after the step."""
        return self.start + len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        """Whether it computes just the one token that was sampled last."""
        return len(self.token_ids) == 1 and bool(self.choices)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step: the chunks that are computed together, and who lost their blocks for it."""

    step: int
    chunks: tuple[Chunk, ...]
    preempted: tuple[SeqId, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)
