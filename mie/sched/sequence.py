"""Define a request and its sequences, one for each of its n choices."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import KW_ONLY, InitVar, dataclass, field, replace
from typing import Literal

from mie.base.stats.request import RequestMetrics
from mie.config.params.sampling import SamplingParams
from mie.memory.table import BlockTable, HostTable
from mie.sched.plan import Chunk, NewRow, SeqId
from mie.sched.result import TokenLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]

LOGPROBS_PER_TOKEN = 16
"""Number of log-probabilities that cost as much as a token of a prompt.

Each is chosen from the vocabulary, kept, and written to the answer.
"""


@dataclass(eq=False, repr=False)
class Request:
    """A prompt in an engine, its parameters, and its n sequences."""

    request_id: str
    """Names it in the engine."""
    token_ids: list[int]
    """The prompt."""
    params: SamplingParams
    _: KW_ONLY
    number: int
    """Order of arrival: 0 for the engine's first request."""
    eos_token_ids: Items[int] = ()
    """The end-of-text tokens of the model. ``params`` may ignore some."""
    draw_seed: InitVar[int] = 0
    """The seed of the random numbers of a request that has no seed of its own."""
    priority: int = 0
    """Lower values run first under the "priority" policy."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached blocks."""
    client: str | None = None
    """The sender. Under the "fair" policy, each client gets a share."""
    prediction: Items[int] = ()
    """Tokens that its output may contain, for drafts. They change no token."""
    adapter: int = 0
    """The slot of its adapter, or 0."""
    constraint: object = None
    """An object that keeps the grammar of its output compiled, or None."""
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    error: Exception | None = None
    """The exception that made it fail, or None."""

    def __post_init__(self, draw_seed: int) -> None:
        params = self.params
        self.num_prompt = len(self.token_ids)
        self.end_token_ids = params.end_token_ids(self.eos_token_ids)
        self.eos_token_ids = params.eos_in_effect(self.eos_token_ids)
        self.draw_key = (draw_seed, self.number + 1) if params.seed is None else (params.seed, 0)
        """The (seed, stream) of its random numbers. A user's seed always has stream 0."""
        self.rank = 0
        """The first part of its sequences' keys. The scheduler sets it before they are queued."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Log-probabilities of the prompt's positions, from the first to the last computed one.

        Empty unless they were requested. Each is computed once, even after a preemption.
        """
        self.notes: dict[str, list[int]] = {}
        """Notes of the memory's parts. They outlast the block tables of its sequences."""
        self.sequences = [Sequence(self, i, [*self.token_ids]) for i in range(params.n)]

    def limit(self, longest: int) -> None:
        """Limit each choice to ``longest`` tokens, the prompt's included."""
        if self.params.max_tokens is not None:
            longest = min(longest, self.num_prompt + self.params.max_tokens)
        for seq in self.sequences:
            seq.max_tokens = longest

    def restore(self) -> list[Sequence]:
        """Reset all sequences to their tokens alone, and return the sequences that must wait."""
        for seq in self.sequences:
            seq.restore()
        first = self.prefill_choice
        live = [seq for seq in self.sequences if seq.finish_reason is None]
        return live if first is None else [first]

    @property
    def prefill_choice(self) -> Sequence | None:
        """The first unfinished choice. It computes the prompt for all choices.

        None once a choice has a token, because the choices have diverged.
        """
        if any(seq.num_generated for seq in self.sequences):
            return None
        return next((seq for seq in self.sequences if seq.finish_reason is None), None)

    @property
    def num_prompt_to_score(self) -> int:
        """The number of positions with a log-probability for the next prompt token."""
        return 0 if self.params.prompt_logprobs is None else self.num_prompt - 1

    @property
    def num_logprobs(self) -> int:
        """The number of log-probabilities that it holds, of the prompt and of all choices."""
        rows = [self.prompt_logprobs, *(seq.logprobs for seq in self.sequences)]
        return sum(len(each[0].token_ids) * len(each) for each in rows if each)

    @property
    def is_finished(self) -> bool:
        """Whether all choices have ended."""
        return all(seq.finish_reason for seq in self.sequences)


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """The tokens of one choice, and how many of them are computed.

    The tokens, ``logprobs`` and ``finish_reason`` are the truth about it. The rest can be rebuilt
    from them (`Scheduler.rebuild`).

    There is no prefill phase and no decode phase. Steps compute tokens, and ``num_computed`` counts
    them. The step that computes the last token samples the next token. The state of a sequence is
    the queue that holds it (waiting, running, finished). A swapped-out sequence is waiting and has
    a ``host`` table.
    """

    request: Request
    index: int
    token_ids: list[int]
    seq_id: SeqId = field(init=False)
    """(the request's number, index). It orders sequences by arrival."""
    end_token_ids: frozenset[int] = field(init=False)
    max_tokens: int = 0
    """Maximum number of tokens, including the prompt's. The scheduler sets it."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One for each generated token, if they were requested."""
    table: BlockTable | None = None
    host: HostTable | None = None
    is_prefilling: bool = False
    """Whether it is running with more to compute than the last sampled token."""
    was_admitted: bool = False
    running_since: tuple[int, int] = (0, 0)
    """The step in which it got its row, and the number of tokens that it had then."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    last_token_time: float | None = None
    """When its latest token was sampled. The engine sets it."""
    num_lost: int = 0
    """Number of computed tokens that its last preemption discarded."""

    def __post_init__(self) -> None:
        self.seq_id = (self.request.number, self.index)
        self.end_token_ids = self.request.end_token_ids

    @property
    def key(self) -> tuple[int, int, int]:
        """Orders the queues: (the policy's rank, number, index)."""
        return self.request.rank, *self.seq_id

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and the output."""
        return len(self.token_ids)

    @property
    def num_final(self) -> int:
        """The number of output tokens with all requested results.

        Forced tokens get their log-probabilities when the tokens before them are computed.
        """
        return self.num_generated if self.request.params.logprobs is None else len(self.logprobs)

    @property
    def to_score(self) -> tuple[int, int]:
        """The positions (first, end) with known next tokens that lack log-probabilities."""
        if self.num_generated:
            return self.request.num_prompt + self.num_final - 1, self.num_tokens - 1
        return len(self.request.prompt_logprobs), self.request.num_prompt_to_score

    @property
    def may_read_cache(self) -> bool:
        """Whether prefix hits are used. They are not if log-probabilities are missing."""
        first, end = self.to_score
        return first >= end and not self.request.params.skip_reading_prefix_cache

    @property
    def num_computed(self) -> int:
        """The number of tokens with keys and values on the device."""
        return self.table.num_tokens if self.table is not None else 0

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the table, also of layers with a window; 0 while it waits."""
        return self.table.num_held if self.table is not None else 0

    @property
    def may_continue(self) -> bool:
        """Whether the token that is being computed can be followed by another."""
        return len(self.token_ids) + 1 < self.max_tokens

    @property
    def output_ids(self) -> list[int]:
        """A copy of the output tokens."""
        return self.token_ids[self.request.num_prompt :]

    @property
    def num_generated(self) -> int:
        """The number of output tokens."""
        return len(self.token_ids) - self.request.num_prompt

    @property
    def num_missing(self) -> int:
        """The number of tokens to compute before the next one is sampled, 1 for a decode."""
        return len(self.token_ids) - self.num_computed

    def chunk(self, count: int, choices: tuple[int, ...]) -> Chunk:
        """Return the next ``count`` tokens to compute and the choices that sample at their end."""
        assert self.table is not None
        start = self.num_computed
        end = start + count
        first, last = self.to_score
        scored = (max(start, first), min(end, last))
        return Chunk(
            seq_id=self.seq_id,
            row=self.table.row,
            start=start,
            token_ids=tuple(self.token_ids[start:end]),
            choices=choices,
            scored=scored if scored[0] < scored[1] else (0, 0),
        )

    def with_drafts(self, drafts: Items[int]) -> Chunk:
        """Return the last token and guesses of the next ones, to compute in place of a decode."""
        chunk = self.chunk(1, (self.index,))
        return replace(chunk, token_ids=(*chunk.token_ids, *drafts), num_drafts=len(drafts))

    def new_row(self) -> NewRow:
        """Return its row for the runner."""
        assert self.table is not None
        return NewRow(
            row=self.table.row,
            choice=self.index,
            token_ids=tuple(self.token_ids),
            num_computed=self.num_computed,
            num_prompt=self.request.num_prompt,
            max_tokens=self.max_tokens,
            params=self.request.params,
            banned_ids=tuple(sorted(self.end_token_ids)),
            draw_key=self.request.draw_key,
            adapter=self.request.adapter,
        )

    @property
    def ending(self) -> tuple[FinishReason, int | None] | None:
        """Return the finish and stop reason if its last token ends it."""
        request, token_id = self.request, self.token_ids[-1]
        # A token of the prompt or of ``trace_decode_token_ids`` never ends the sequence.
        is_traced = self.num_generated <= len(request.params.trace_decode_token_ids or ())
        if token_id in self.end_token_ids and not is_traced:
            return "stop", None if token_id in request.eos_token_ids else token_id
        return ("length", None) if self.num_tokens >= self.max_tokens else None

    def restore(self) -> None:
        """Reset to the tokens alone: in no queue, and with none of them computed.

        If the last token ends the sequence, it is finished.
        """
        self.table = self.host = None
        self.is_prefilling = False
        self.num_lost = self.num_tokens - 1 if self.num_generated else 0
        del self.logprobs[self.num_generated :]  # a log-probability is added before its token
        if self.finish_reason is None:
            reason, self.stop_reason = self.ending or (None, None)
            self.finish_reason = reason

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id}/{self.index}: {self.num_tokens} tokens>"
