"""The engine: requests of token ids in, tokens out, one step at a time. It never sees text."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

from mie.config import EngineConfig
from mie.errors import RequestError
from mie.interrupts import interrupts_deferred
from mie.outputs import RequestMetrics
from mie.runner import ChunkResult, ModelRunner, TokenLogprobs
from mie.sched.params import SamplingParams
from mie.sched.plan import StepPlan
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import FinishReason, Request
from mie.sched.sequence import Sequence as RunningSequence


@dataclass(frozen=True, kw_only=True)
class SequenceOutput:
    """What one choice got in a step."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    num_cached_tokens: int
    metrics: RequestMetrics


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One step in numbers; for observers."""

    step: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preempted: int
    num_blocks_used: int
    """Blocks that stand in a sequence's table."""
    num_blocks_cached: int
    """Blocks that only the prefix cache holds."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step gave: choices with new tokens, and prompt log-probabilities by request."""

    outputs: tuple[SequenceOutput, ...]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    stats: StepStats


@dataclass
class EngineStats:
    """Running totals of an engine."""

    num_steps: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    peak_blocks: int = 0

    def add(self, stats: StepStats, num_generated: int) -> None:
        self.num_steps += 1
        self.num_generated_tokens += num_generated
        self.num_preemptions += stats.num_preempted
        self.peak_blocks = max(self.peak_blocks, stats.num_blocks_used)


class Engine:
    """Runs requests to their ends. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: ModelRunner,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.config = config
        self.scheduler = scheduler
        self.stats = EngineStats()
        self.observers: list[Callable[[StepStats], None]] = []
        self._runner = runner
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._by_number: dict[int, Request] = {}
        self._num_requests = 0

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.scheduler.max_model_len

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(
        self, token_ids: Sequence[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        """Queue a prompt of token ids: its request id (by default its number).

        Raises:
            RequestError: the request could never be served; nothing was added.
        """
        request_id = str(self._num_requests) if request_id is None else request_id
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        self._check_token_ids(token_ids, params)
        request = Request(
            request_id,
            self._num_requests,
            token_ids,
            params,
            self._eos_token_ids,
            self.config.seed,
        )
        _check_something_allowed(request)
        request.arrival_time = time.perf_counter()
        with interrupts_deferred():
            self.scheduler.add(request)
            self._requests[request_id] = request
            self._by_number[request.number] = request
            self._num_requests += 1
        return request_id

    def _check_token_ids(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        if not token_ids:
            raise RequestError("prompt is empty; it needs at least one token")
        last = self._vocab_size - 1
        for what, ids in (("prompt", token_ids), *params.named_token_ids.items()):
            for token_id in ids:
                if not _is_integer(token_id) or not 0 <= token_id <= last:
                    raise RequestError(
                        f"{what} has token id {token_id!r}; the vocabulary has ids 0 … {last}"
                    )

    def abort(self, request_id: str) -> None:
        """End a request in any state and give its blocks back; unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is not None:
            with interrupts_deferred():
                self.scheduler.abort(request)
                self._forget(request)

    def finish(
        self, request_id: str, index: int, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        """End one choice of a request; its siblings go on."""
        request = self._requests.get(request_id)
        if request is not None:
            with interrupts_deferred():
                self.scheduler.finish(request.sequences[index], reason, stop_reason)
                if request.is_finished:
                    self._forget(request)

    def step(self) -> StepOutput:
        """Compute one step. Whatever ends it early, Ctrl-C included, leaks no block: the sequences
        that were running wait again, with the tokens they had."""
        start = time.perf_counter()
        try:
            with interrupts_deferred():
                plan = self.scheduler.schedule()
            num_blocks_used = self.scheduler.manager.num_used
            results = self._runner.run(plan) if plan.chunks else []
            with interrupts_deferred():
                sampled = self.scheduler.update(plan, [result.token_ids for result in results])
        except BaseException:
            # What the step had written is unknown: every sequence is computed again.
            with interrupts_deferred():
                self.scheduler.preempt_all()
            raise
        now = time.perf_counter()
        self._stamp(plan, sampled, start, now)
        stats = self._step_stats(plan, num_blocks_used, now - start)
        output = StepOutput(
            outputs=tuple(self._outputs(sampled, results)),
            prompt_logprobs=self._prompt_logprobs(plan, results),
            stats=stats,
        )
        for seq in sampled:
            if seq.request.is_finished:
                self._forget(seq.request)
        self.stats.add(stats, len(sampled))
        for observer in self.observers:
            observer(stats)
        return output

    def _outputs(
        self, sampled: Sequence[RunningSequence], results: Sequence[ChunkResult]
    ) -> Iterator[SequenceOutput]:
        logprobs = (
            result.logprobs[i : i + 1] for result in results for i in range(len(result.token_ids))
        )
        for seq, row in zip(sampled, logprobs, strict=True):
            yield SequenceOutput(
                request_id=seq.request.request_id,
                index=seq.index,
                token_ids=(seq.token_ids[-1],),
                logprobs=tuple(row),
                finish_reason=seq.finish_reason,
                stop_reason=seq.stop_reason,
                num_cached_tokens=seq.num_cached_tokens or 0,
                metrics=self._metrics(seq.request),
            )

    def _prompt_logprobs(
        self, plan: StepPlan, results: Sequence[ChunkResult]
    ) -> dict[str, list[TokenLogprobs]]:
        return {
            self._by_number[chunk.seq_id[0]].request_id: result.prompt_logprobs
            for chunk, result in zip(plan.chunks, results, strict=True)
            if result.prompt_logprobs
        }

    def _stamp(
        self, plan: StepPlan, sampled: Sequence[RunningSequence], start: float, now: float
    ) -> None:
        for chunk in plan.chunks:
            request = self._by_number[chunk.seq_id[0]]
            if request.first_step_time is None:
                request.first_step_time = start
        for seq in sampled:
            if seq.request.first_token_time is None:
                seq.request.first_token_time = now
            seq.request.last_token_time = now

    def _metrics(self, request: Request) -> RequestMetrics:
        assert request.first_step_time is not None
        assert request.first_token_time is not None
        assert request.last_token_time is not None
        return RequestMetrics(
            queue_time=request.first_step_time - request.arrival_time,
            time_to_first_token=request.first_token_time - request.arrival_time,
            total_time=request.last_token_time - request.arrival_time,
            num_preemptions=sum(seq.num_preemptions for seq in request.sequences),
            num_recomputed_tokens=sum(seq.num_recomputed for seq in request.sequences),
        )

    def _step_stats(self, plan: StepPlan, num_blocks_used: int, seconds: float) -> StepStats:
        num_decodes = sum(chunk.is_decode for chunk in plan.chunks)
        scheduler = self.scheduler
        return StepStats(
            step=plan.step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_prefill_tokens=plan.num_tokens - num_decodes,
            num_decode_tokens=num_decodes,
            num_preempted=len(plan.preempted),
            num_blocks_used=num_blocks_used,
            num_blocks_cached=scheduler.manager.num_cached,
            seconds=seconds,
        )

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        self._by_number.pop(request.number, None)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral)


def _check_something_allowed(request: Request) -> None:
    """While ``min_tokens`` bans the tokens that end a sequence, others must be allowed."""
    params = request.params
    banned = request.eos_token_ids | request.stop_token_ids
    if (
        params.min_tokens
        and params.allowed_token_ids
        and banned.issuperset(params.allowed_token_ids)
    ):
        raise RequestError(
            f"allowed_token_ids {list(params.allowed_token_ids)} all end the sequence, which "
            f"min_tokens={params.min_tokens} forbids; allow another token, or set min_tokens to 0"
        )
