"""What the scheduler runs: a request and its sequences, one for each of its n choices."""

from collections.abc import Sequence as Items
from typing import Literal

from mie.memory.table import BlockTable
from mie.sched.params import SamplingParams

FinishReason = Literal["stop", "length", "abort"]


class Request:
    """A prompt, what to do with it, and its n sequences."""

    def __init__(
        self,
        request_id: str,
        number: int,
        prompt_token_ids: Items[int],
        params: SamplingParams,
        eos_token_ids: Items[int] = (),
        draw_seed: int = 0,
    ) -> None:
        self.request_id = request_id
        self.number = number
        """Arrival: 0 for the first request of the engine."""
        self.params = params
        self.num_prompt = len(prompt_token_ids)
        self.eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.draw_key = (params.seed, 0) if params.seed is not None else (draw_seed, number + 1)
        """(seed, stream) of the random numbers: a user's seed has stream 0 to itself."""
        self.num_prompt_scored = 0
        """Prompt positions whose log-probabilities were returned: each is returned once."""
        self.arrival_time = 0.0
        """Seconds, stamped by the engine as the next three: this room reads no clock."""
        self.first_step_time: float | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.sequences = [Sequence(self, index, prompt_token_ids) for index in range(params.n)]
        self.is_forked = params.n == 1
        """Whether all choices have tables of their own; before, only the first runs."""

    @property
    def num_prompt_to_score(self) -> int:
        """Positions that have a next prompt token to give a log-probability to."""
        return 0 if self.params.prompt_logprobs is None else self.num_prompt - 1

    @property
    def is_finished(self) -> bool:
        return all(seq.finish_reason for seq in self.sequences)


class Sequence:
    """The tokens of one choice, and how many of them are computed.

    There is no prefill phase and no decode phase: every step lets ``num_computed`` catch up with
    ``num_tokens``. Where the sequence stands (waiting, running, finished) is told by the queue that
    holds it.
    """

    def __init__(self, request: Request, index: int, prompt_token_ids: Items[int]) -> None:
        self.request = request
        self.index = index
        self.token_ids = list(prompt_token_ids)
        self.num_computed = 0
        self.table: BlockTable | None = None
        self.row: int | None = None
        self.is_new_row = False
        """Whether the runner has yet to hear of this row."""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission."""
        self.num_preemptions = 0
        self.num_lost = 0
        """Tokens that were computed when it was last preempted."""
        self.num_recomputed = 0

    @property
    def seq_id(self) -> tuple[int, int]:
        """(request number, choice): orders by arrival."""
        return self.request.number, self.index

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.request.num_prompt

    @property
    def num_missing(self) -> int:
        """Tokens to compute before the next one can be sampled: 1 for a decode."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_seats(self) -> int:
        """Places among the running that it takes: its unforked siblings wait in it."""
        return 1 if self.request.is_forked else len(self.request.sequences)

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id}/{self.index}: {self.num_tokens} tokens>"
