"""What the scheduler runs: a request and its sequences, one for each of its n choices."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any, Literal

from mie.memory.table import BlockTable, HostTable
from mie.sched.metrics import RequestMetrics
from mie.sched.params import SamplingParams
from mie.sched.plan import Chunk, NewRow

FinishReason = Literal["stop", "length", "abort", "error"]


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
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.number = number
        """Arrival: 0 for the first request of the engine."""
        self.params = params
        self.priority = priority
        """Lower runs first, under the policy of that name."""
        self.cache_salt = cache_salt
        """Only requests with the same salt share cached blocks."""
        self.num_prompt = len(prompt_token_ids)
        self.eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids
        self.draw_key = (params.seed, 0) if params.seed is not None else (draw_seed, number + 1)
        """(seed, stream) of the random numbers: a user's seed has stream 0 to itself."""
        self.num_prompt_scored = 0
        """Prompt positions whose log-probabilities were returned: each is returned once."""
        self.prompt_logprobs: list[Any] = []
        self.metrics = RequestMetrics()
        self.error: Exception | None = None
        """Why it failed, if it did."""
        self.sequences = [Sequence(self, index, prompt_token_ids) for index in range(params.n)]
        self.is_forked = params.n == 1
        """Whether all choices have tables of their own; before, only the first runs."""

    def enter(self, rank: int, longest: int) -> None:
        """Take a place in the order of the queues; no choice may get more than ``longest`` tokens,
        the prompt's included."""
        if self.params.max_tokens is not None:
            longest = min(longest, self.num_prompt + self.params.max_tokens)
        for seq in self.sequences:
            seq.key = (rank, *seq.seq_id)
            seq.max_tokens = longest

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
    holds it; swapped out is waiting with a ``host`` table.
    """

    __slots__ = (
        "end_token_ids",
        "finish_reason",
        "host",
        "index",
        "is_prefilling",
        "key",
        "logprobs",
        "max_tokens",
        "num_lost",
        "request",
        "row",
        "seq_id",
        "stop_reason",
        "table",
        "token_ids",
        "was_admitted",
    )

    def __init__(self, request: Request, index: int, prompt_token_ids: Items[int]) -> None:
        self.request = request
        self.index = index
        self.seq_id = (request.number, index)
        """Orders by arrival."""
        self.key = (0, request.number, index)
        """Orders the queues: (the policy's rank, number, index). The scheduler sets the rank."""
        self.token_ids = list(prompt_token_ids)
        self.end_token_ids = request.end_token_ids
        self.max_tokens = 0
        """Tokens, the prompt's included, at which it ends; set by the scheduler."""
        self.table: BlockTable | None = None
        self.row: int | None = None
        self.host: HostTable | None = None
        self.is_prefilling = False
        """Whether it runs and has more to compute than the token that was sampled last."""
        self.was_admitted = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.logprobs: list[Any] = []
        self.num_lost = 0
        """Tokens that were computed when it was last preempted, and not swapped out."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are on the device."""
        return self.table.num_tokens if self.table is not None else 0

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

    def chunk(self, count: int) -> Chunk:
        """The next ``count`` tokens to compute."""
        assert self.row is not None
        request, start = self.request, self.num_computed
        end = start + count
        choices: tuple[int, ...] = ()
        if end == self.num_tokens:
            choices = (self.index,) if request.is_forked else tuple(range(request.params.n))
        scored = (max(start, request.num_prompt_scored), min(end, request.num_prompt_to_score))
        return Chunk(
            seq_id=self.seq_id,
            row=self.row,
            start=start,
            token_ids=tuple(self.token_ids[start:end]),
            choices=choices,
            scored=scored if scored[0] < scored[1] else (0, 0),
        )

    def new_row(self) -> NewRow:
        """What the runner must know of it."""
        assert self.row is not None
        return NewRow(
            row=self.row,
            choice=self.index,
            token_ids=tuple(self.token_ids),
            num_computed=self.num_computed,
            num_prompt=self.request.num_prompt,
            params=self.request.params,
            banned_ids=tuple(sorted(self.end_token_ids)),
            draw_key=self.request.draw_key,
        )

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id}/{self.index}: {self.num_tokens} tokens>"
