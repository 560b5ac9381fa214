"""The engine: requests of token ids in, tokens out, one step at a time. It never sees text."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from typing import Protocol

from mie.config import EngineConfig
from mie.errors import RequestError
from mie.events import EventLog
from mie.interrupts import interrupts_deferred
from mie.memory.stats import MemoryStats
from mie.sched.metrics import RequestMetrics
from mie.sched.params import SamplingParams
from mie.sched.plan import StepPlan
from mie.sched.result import ChunkResult, StepResult, TokenLogprobs
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import FinishReason, Request
from mie.sched.sequence import Sequence as RunningSequence


@dataclass(slots=True)
class SequenceOutput:
    """What one choice got in a step."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    metrics: RequestMetrics
    """The request's own, which goes on growing."""


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One step in numbers, for observers and the event log. Blocks are counted while it computes,
    slots when its tokens are stored, queues at its end; times are in seconds."""

    step: int
    num_running: int
    num_waiting: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_preempted: int
    num_finished: int
    num_blocks_used: int
    """Blocks that stand in a sequence's table, or are being copied from."""
    num_blocks_cached: int
    """Blocks that only the prefix cache holds."""
    num_blocks_saved: int
    """Entries of tables minus blocks in tables: what sharing saves."""
    num_slots_empty: int
    """Slots of used blocks without a token: internal fragmentation."""
    num_copies: int
    num_evicted: int
    num_exported: int
    """Blocks swapped out; and"""
    num_imported: int
    """swapped in."""
    start: float
    """Since the engine was made."""
    schedule_seconds: float
    run_seconds: float
    update_seconds: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step gave: choices with new tokens, and prompt log-probabilities by request."""

    outputs: tuple[SequenceOutput, ...]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    stats: StepStats


class EngineStats:
    """Running totals of an engine."""

    def __init__(self, memory: MemoryStats) -> None:
        self.memory = memory
        """Prefix hits, copies, evictions, swaps."""
        self.num_steps = 0
        self.num_generated_tokens = 0
        self.num_preemptions = 0
        self.peak_blocks = 0

    def add(self, stats: StepStats, num_generated: int) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_generated_tokens += num_generated
        self.num_preemptions += stats.num_preempted
        self.peak_blocks = max(self.peak_blocks, stats.num_blocks_used)


class Runner(Protocol):
    """What computes a step: `mie.runner.ModelRunner`, one that overlaps, or the simulator's."""

    @property
    def is_ahead(self) -> bool:
        """Whether the next step was begun already, so that nobody can be admitted to it."""

    def run(self, plan: StepPlan) -> StepResult:
        """Do what the plan says, and sample."""


class Engine:
    """Runs requests to their ends. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        log: EventLog,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``clock`` gives seconds that never run backwards: the wall's, or a simulator's."""
        self.config = config
        self.scheduler = scheduler
        self.log = log
        self.log_error: OSError | None = None
        """Why the file of the event log is incomplete, if it is; the requests go on."""
        self.stats = EngineStats(scheduler.manager.stats)
        self.observers: list[Callable[[StepStats], None]] = []
        self._runner = runner
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._by_number: dict[int, Request] = {}
        self._num_requests = 0
        self._moved = (0, 0, 0, 0)  # copies, evictions, exports, imports up to the last step
        self._clock = clock
        self._began = clock()
        log.start(scheduler.snapshot)

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return self.scheduler.max_model_len

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add_request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a prompt of token ids: its request id (by default its number).

        Under the priority policy a lower ``priority`` goes first. Only requests with the same
        ``cache_salt`` share cached blocks.

        Raises:
            RequestError: the request could never be served; nothing was added.
        """
        request_id = str(self._num_requests) if request_id is None else request_id
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        self._check_token_ids(token_ids, params)
        _check_labels(priority, cache_salt)
        request = Request(
            request_id,
            self._num_requests,
            token_ids,
            params,
            self._eos_token_ids,
            self.config.seed,
            priority=int(priority),
            cache_salt=cache_salt,
        )
        _check_something_allowed(request)
        request.metrics.arrival_time = self._clock()
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
            if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= last):
                continue
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

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False, and nothing done, while a request holds blocks."""
        with interrupts_deferred():
            return self.scheduler.manager.reset_prefix_cache()

    def step(self) -> StepOutput:
        """Compute one step. Whatever ends it early, Ctrl-C included, leaks no block: the sequences
        that were running wait again, with the tokens they had."""
        times = [self._clock()]
        try:
            is_foretold = self._runner.is_ahead and bool(self.scheduler.running)
            with interrupts_deferred():
                plan = self.scheduler.schedule(may_admit=not is_foretold)
            assert not (plan.is_empty and self.has_work), "the engine has work and does nothing"
            blocks = self._block_counts(plan)
            times.append(self._clock())
            result = self._runner.run(plan)
            times.append(self._clock())
            with interrupts_deferred():
                sampled = self.scheduler.update(plan, result)
        except BaseException:
            # What the step had written is unknown: every sequence is computed again.
            with interrupts_deferred():
                self.scheduler.preempt_all()
            raise
        times.append(self._clock())
        self._stamp(plan, sampled, times[0], times[-1])
        output = StepOutput(
            outputs=tuple(self._outputs(sampled, result)),
            prompt_logprobs=self._prompt_logprobs(plan, result.chunks),
            stats=self._step_stats(plan, blocks, times, self._forget_finished(sampled)),
        )
        self.stats.add(output.stats, len(sampled))
        self._log_step(output.stats)
        for observer in self.observers:
            observer(output.stats)
        return output

    def _log_step(self, stats: StepStats) -> None:
        try:
            self.log.end_step(vars(stats))
        except OSError as error:  # a full disk must not cost the step's tokens
            self.log_error = error
            warnings.warn(f"the event log ends at step {stats.step}: {error}", stacklevel=3)

    def _outputs(
        self, sampled: Sequence[RunningSequence], result: StepResult
    ) -> Iterator[SequenceOutput]:
        logprobs = chain(result.logprobs, *(chunk.logprobs for chunk in result.chunks))
        for seq, row in zip(sampled, logprobs, strict=True):
            yield SequenceOutput(
                seq.request.request_id,
                seq.index,
                (seq.token_ids[-1],),
                () if row is None else (row,),
                seq.finish_reason,
                seq.stop_reason,
                seq.request.metrics,
            )

    def _forget_finished(self, sampled: Sequence[RunningSequence]) -> int:
        """Forget the requests that ended; how many."""
        num_before = len(self._requests)
        for seq in sampled:
            if seq.finish_reason is not None and seq.request.is_finished:
                self._forget(seq.request)
        return num_before - len(self._requests)

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
            metrics = self._by_number[chunk.seq_id[0]].metrics
            if metrics.first_step_time is None:
                metrics.first_step_time = start
        for seq in sampled:
            metrics = seq.request.metrics
            metrics.last_token_time = now
            if metrics.first_token_time is None:
                metrics.first_token_time = now

    def _block_counts(self, plan: StepPlan) -> dict[str, int]:
        manager = self.scheduler.manager
        return {
            "num_blocks_used": manager.num_used,
            "num_blocks_cached": manager.num_cached,
            "num_blocks_saved": manager.num_saved,
            "num_slots_empty": manager.num_slots_empty - plan.num_tokens,
        }

    def _step_stats(
        self, plan: StepPlan, blocks: dict[str, int], times: Sequence[float], num_finished: int
    ) -> StepStats:
        memory, scheduler = self.stats.memory, self.scheduler
        before = self._moved
        self._moved = now = (
            memory.num_copies,
            memory.num_evictions,
            memory.num_exported,
            memory.num_imported,
        )
        start, planned, ran, end = times
        return StepStats(
            step=plan.step,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_prefill_tokens=plan.num_prefill_tokens,
            num_decode_tokens=len(plan.decodes),
            num_preempted=len(plan.preempted),
            num_finished=num_finished,
            **blocks,
            num_copies=now[0] - before[0],
            num_evicted=now[1] - before[1],
            num_exported=now[2] - before[2],
            num_imported=now[3] - before[3],
            start=start - self._began,
            schedule_seconds=planned - start,
            run_seconds=ran - planned,
            update_seconds=end - ran,
            seconds=end - start,
        )

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        self._by_number.pop(request.number, None)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral)


def _check_labels(priority: object, cache_salt: object) -> None:
    if not _is_integer(priority) or isinstance(priority, bool):
        raise RequestError(f"priority must be an integer; got {priority!r}")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise RequestError(f"cache_salt must be a string that is not empty; got {cache_salt!r}")


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
