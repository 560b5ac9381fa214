"""What the scheduler runs: a request and its sequences, one for each of its n choices."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Literal

from mie.memory.table import BlockTable, HostTable
from mie.sched.metrics import RequestMetrics
from mie.sched.params import SamplingParams
from mie.sched.plan import Chunk, NewRow
from mie.sched.result import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class Beam:
    """A request of one token whose blocks are kept when it ends, for requests that continue it."""

    parent_id: str | None = None
    """The finished request that it continues: the prompt is that one's tokens and one more."""


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
        beam: Beam | None = None,
    ) -> None:
        self.request_id = request_id
        self.number = number
        """Arrival: 0 for the first request of the engine."""
        self.params = params
        self.priority = priority
        """Lower runs first, under the policy of that name."""
        self.cache_salt = cache_salt
        """Only requests with the same salt share cached blocks."""
        self.beam = beam
        self.num_prompt = len(prompt_token_ids)
        self.eos_token_ids = frozenset(() if params.ignore_eos else eos_token_ids)
        self.stop_token_ids = frozenset(params.stop_token_ids or ())
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids
        self.draw_key = (params.seed, 0) if params.seed is not None else (draw_seed, number + 1)
        """(seed, stream) of the random numbers: a user's seed has stream 0 to itself."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Of the prompt's positions from the first on, as far as they are computed, if asked for.
        Each is computed once, whatever happens to the sequences."""
        self.metrics = RequestMetrics()
        self.error: Exception | None = None
        """Why it failed, if it did."""
        self.sequences = [Sequence(self, index, prompt_token_ids) for index in range(params.n)]

    def enter(self, rank: int, longest: int) -> None:
        """Take a place in the order of the queues; no choice may get more than ``longest`` tokens,
        the prompt's included."""
        if self.params.max_tokens is not None:
            longest = min(longest, self.num_prompt + self.params.max_tokens)
        for seq in self.sequences:
            seq.key = (rank, *seq.seq_id)
            seq.max_tokens = longest

    def restore(self) -> list[Sequence]:
        """Keep the truth about the sequences only: those that are to wait."""
        for seq in self.sequences:
            seq.restore()
        leader = self.leader
        live = [seq for seq in self.sequences if seq.finish_reason is None]
        return live if leader is None else [leader]

    @property
    def is_forked(self) -> bool:
        """Whether the prompt is computed, so that each choice goes its own way. The tokens tell."""
        return any(seq.num_generated for seq in self.sequences)

    @property
    def leader(self) -> Sequence | None:
        """The first choice that goes on: it computes the prompt for all. None after the fork."""
        if self.is_forked:
            return None
        return next((seq for seq in self.sequences if seq.finish_reason is None), None)

    @property
    def was_admitted(self) -> bool:
        """Whether one of its choices has run."""
        return any(seq.was_admitted for seq in self.sequences)

    @property
    def is_scored(self) -> bool:
        """Whether all log-probabilities of the prompt that were asked for are there."""
        return len(self.prompt_logprobs) >= self.num_prompt_to_score

    @property
    def may_read_cache(self) -> bool:
        """Whether prefix hits are used. A prompt that is to be scored has to be computed."""
        return self.is_scored and not self.params.skip_reading_prefix_cache

    @property
    def num_prompt_to_score(self) -> int:
        """Positions that have a next prompt token to give a log-probability to."""
        return 0 if self.params.prompt_logprobs is None else self.num_prompt - 1

    @property
    def is_finished(self) -> bool:
        return all(seq.finish_reason for seq in self.sequences)


class Sequence:
    """The tokens of one choice, and how many of them are computed.

    The tokens, with ``logprobs`` and ``finish_reason``, are the truth about it. All the rest can be
    made again from them (`Scheduler.rebuild`).

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
        self.logprobs: list[TokenLogprobs] = []
        """One for each generated token, if they were asked for."""
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

    def chunk(self, count: int, choices: tuple[int, ...]) -> Chunk:
        """The next ``count`` tokens to compute, and the choices that sample at their end."""
        assert self.row is not None
        request, start = self.request, self.num_computed
        end = start + count
        scored = (max(start, len(request.prompt_logprobs)), min(end, request.num_prompt_to_score))
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

    @property
    def ending(self) -> tuple[FinishReason, int | None] | None:
        """The finish and stop reason, if its last token ends it."""
        request, token_id = self.request, self.token_ids[-1]
        # The prompt's tokens and the forced ones end nothing.
        is_forced = self.num_generated <= len(request.params.trace_decode_token_ids or ())
        if token_id in request.eos_token_ids and not is_forced:
            return "stop", None
        if token_id in request.stop_token_ids and not is_forced:
            return "stop", token_id
        return ("length", None) if self.num_tokens >= self.max_tokens else None

    def restore(self) -> None:
        """Keep the truth only: it stands nowhere, none of its tokens is computed, and if the last
        one ends it, it has ended."""
        self.table = self.row = self.host = None
        self.is_prefilling = False
        self.num_lost = self.num_tokens - 1 if self.num_generated else 0
        del self.logprobs[self.num_generated :]  # a log-probability comes before its token
        if self.finish_reason is None:
            reason, self.stop_reason = self.ending or (None, None)
            self.finish_reason = reason

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id}/{self.index}: {self.num_tokens} tokens>"
