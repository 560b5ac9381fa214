"""Turn requests of token ids into tokens, one step at a time. The engine never sees text."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, Protocol

from mie.base.stats.metric import Metric
from mie.base.stats.step import EngineStats, QueueState, StepStats
from mie.base.threads import is_of_the_request
from mie.config.engine import EngineConfig
from mie.config.params.checks import (
    automatic_id,
    check_labels,
    check_logprobs,
    check_something_allowed,
    check_token_ids,
)
from mie.config.params.sampling import SamplingParams
from mie.engine.constraint import Constraints, check_constraint
from mie.engine.rows import RowFault
from mie.engine.step import StepMeter, StepOutput, outputs_of
from mie.engine.watch.metrics import EngineMetrics, Snapshot
from mie.engine.watch.snapshot import scheduler_snapshot
from mie.errors import RequestError
from mie.events import EventLog
from mie.sched.plan import StepPlan
from mie.sched.result import StepResult
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import LOGPROBS_PER_TOKEN, FinishReason, Request

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """Computes steps: `ModelRunner`, one that overlaps, or the simulator's."""

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is already launched, so that no sequence can be admitted to it."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run the plan and sample."""


class Engine:
    """Runs requests until they finish. Only one thread at a time may call it.

    The truth about a request is its tokens, and blocks are a cache of them. So an exception at any
    line, for example from a signal handler, costs time and no output: the next call repairs.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        log: EventLog,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        constraints: Constraints | None = None,
        backend: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create an engine. ``clock`` returns monotonic seconds, real or simulated.

        ``constraints`` are those of the runner, which need a tokenizer.
        """
        self.config = config
        self.scheduler = scheduler
        self.log = log
        self.log_error: Exception | None = None
        """Why the event log ended early, or None. The requests continue."""
        self.stats = EngineStats(scheduler.manager.stats)
        self.metrics = EngineMetrics(scheduler.max_model_len)
        self.observers: list[Callable[[StepStats], None]] = []
        self._runner = runner
        self.vocab_size = vocab_size
        """Number of token ids that the model knows."""
        self.backend = backend
        """Name of the backend that computes."""
        self.max_model_len = scheduler.longest
        """Maximum number of tokens of a prompt and its answer that the KV cache holds."""
        self.eos_token_ids = tuple(eos_token_ids)
        self._constraints = constraints
        self._requests: dict[str, Request] = {}
        self._num_requests = 0
        # The work that an exception may have interrupted. "changing": the queues and the blocks.
        # "computing": a step, so its blocks are undefined. "finishing": the list of requests.
        self._state: Literal["idle", "changing", "computing", "finishing"] = "idle"
        self._clock = clock
        self._meter = StepMeter(scheduler, began=clock())
        log.start(lambda: scheduler_snapshot(scheduler))

    def __repr__(self) -> str:
        manager, scheduler = self.scheduler.manager, self.scheduler
        return (
            f"Engine({manager.num_blocks} blocks of {manager.block_size} tokens,"
            f" max_model_len={self.max_model_len}, {len(scheduler.running)} running,"
            f" {len(scheduler.waiting)} waiting)"
        )

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    @property
    def requests(self) -> list[Request]:
        """The unfinished requests in the order of arrival."""
        return list(self._requests.values())

    def request(self, request_id: str) -> Request | None:
        """Return an unfinished request, or None if there is none with this id."""
        return self._requests.get(request_id)

    def add_request(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str | None = None,
    ) -> str:
        """Check and queue a prompt of token ids, and return its request id.

        Under the priority policy a lower ``priority`` goes first. Under the fair policy each
        ``client`` gets an equal share. Only requests with the same ``cache_salt`` share cached
        blocks. Ids such as "auto-7" are reserved for the engine.

        Raises:
            ConfigError: a field of ``params`` has a value that is not allowed.
            RequestError: the request can never be served. Nothing was added.
        """
        check_labels(request_id, priority, cache_salt, client)
        params = params.verified()
        self.check(token_ids, params)
        request = Request(
            request_id or "",
            [*token_ids],
            params,
            priority=int(priority),
            cache_salt=cache_salt,
            client=client,
            constraint=check_constraint(params, self._constraints),
        )
        self.add(request)
        return request.request_id

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise `RequestError` if verified parameters do not fit the model. Any thread may call."""
        check_token_ids(token_ids, params, self.vocab_size)
        check_logprobs(params, self.config.max_logprobs)
        check_something_allowed(params, self.eos_token_ids, self.vocab_size)

    def add(self, request: Request) -> None:
        """Queue a request whose labels and parameters were checked, and name it if it has no id.

        Its constraint is the result of `check_constraint`.

        Raises:
            RequestError: the id is in use, or the request does not fit. Nothing was added.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is in use; choose another")
        number = self._num_requests
        request.request_id = request.request_id or automatic_id(number)
        request.enter(number, self.eos_token_ids, self.config.seed)
        self.scheduler.check(request)
        request.metrics.arrival_time = self._clock()
        with self._changing():
            self._num_requests = number + 1
            self.scheduler.add(request)
            self._requests[request.request_id] = request

    def abort(self, request_id: str) -> None:
        """End a request in any state and free its blocks. An unknown id is ignored."""
        with self._changing(request_id) as request:
            if request is not None:
                self.scheduler.abort(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request that caused an error. The other requests continue.

        A request that has ended already is only marked.
        """
        with self._changing(request.request_id) as unfinished:
            what = f"{type(error).__name__}: {error}"
            logger.error("request %s failed: %s", request.request_id, what)
            request.error = error
            if unfinished is request:
                self.scheduler.abort(request, "error")

    def finish(
        self, request_id: str, index: int, reason: FinishReason, stop_reason: int | str | None
    ) -> None:
        """End one choice of a request. Its siblings continue."""
        with self._changing(request_id) as request:
            if request is not None:
                self.scheduler.finish(request.sequences[index], reason, stop_reason)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks. Return False, unchanged, if a request holds blocks."""
        with self._changing():
            return self.scheduler.manager.reset_prefix_cache()

    @contextmanager
    def _changing(self, request_id: str | None = None) -> Iterator[Request | None]:
        """Repair the scheduler if necessary, and mark it as changing until the block is done.

        The block gets the request, if it is unfinished, and may finish it.
        """
        self.recover()
        self._state = "changing"
        request = None if request_id is None else self._requests.get(request_id)
        yield request
        self._forget_finished([request] if request else [])
        self._state = "idle"

    def get_metrics(self, model_name: str) -> list[Metric]:
        """Return the counters, gauges and histograms under vLLM's names."""
        return self.metrics_snapshot().read(model_name)

    def metrics_snapshot(self) -> Snapshot:
        """Return the numbers that `get_metrics` reads, for another thread to read."""
        self.recover()
        requests = self._requests.values()
        return self.metrics.snapshot(self.config, self.scheduler, self.stats, requests)

    def queue(self, client: str | None = None) -> QueueState:
        """Return how many requests of a client wait. Any thread may call it.

        Clients differ under the fair policy only; under others, all requests have the client None.
        """
        waiting = [seq for seq in [*self.scheduler.waiting] if seq.request.client == client]
        arrivals = [seq.request.metrics.arrival_time for seq in waiting]
        num_logprobs = sum(map(self.most_logprobs, {seq.request for seq in waiting}))
        return QueueState(
            num_requests=len(waiting),
            num_tokens=sum(seq.num_tokens for seq in waiting) + num_logprobs // LOGPROBS_PER_TOKEN,
            num_free_seats=self.config.max_num_seqs - len(self.scheduler.running),
            longest_wait=self._clock() - min(arrivals) if arrivals else 0.0,
        )

    def most_logprobs(self, request: Request) -> int:
        """Return how many log-probabilities a request's answer may have. Any thread may call it."""
        return request.most_logprobs(self.vocab_size, self.max_model_len)

    def step(self) -> StepOutput:
        """Compute one step.

        If a request's own sampling or log-probabilities raise, it fails alone (`Request.error`),
        and the step is planned again without it. Any other exception reaches the caller, and the
        running sequences wait again with the tokens they had.
        """
        failed: list[str] = []
        try:
            while True:
                self.recover()
                times = [self._clock()]
                is_launched = self._runner.is_ahead and bool(self.scheduler.running)
                self._state = "changing"
                plan = self.scheduler.schedule(may_admit=not is_launched)
                assert not (plan.is_empty and self.has_work), "the engine has work and does nothing"
                owners = [self.scheduler.owner_of(chunk.row) for chunk in plan.chunks]
                self._meter.count_blocks(plan)
                self._state = "computing"
                times.append(self._clock())
                try:
                    result = self._runner.run(plan)
                except RowFault as fault:
                    failed.append(self._fail_owner(fault))
                    continue
                times.append(self._clock())
                return self._finish_step(plan, result, owners, times, failed)
        finally:
            self.recover()

    def _fail_owner(self, fault: RowFault) -> str:
        """Fail the request that made a row raise, and return its id, or raise the error."""
        owner = self.scheduler.owner_of(fault.row)
        if owner is None or not is_of_the_request(fault.error):
            raise fault.error from None
        self.fail(owner, fault.error)
        return owner.request_id

    def _finish_step(
        self,
        plan: StepPlan,
        result: StepResult,
        owners: Sequence[Request | None],
        times: list[float],
        failed: Sequence[str],
    ) -> StepOutput:
        """Apply the results of a step. ``owners`` are the requests of its chunks."""
        self._state = "changing"
        sampled = self.scheduler.update(plan, result)
        self._state = "finishing"
        times.append(self._clock())
        last_times = [seq.last_token_time for seq in sampled]
        for owner in owners:
            if owner and owner.metrics.first_step_time is None:
                owner.metrics.first_step_time = times[0]
        for seq in sampled:
            metrics = seq.request.metrics
            metrics.last_token_time = seq.last_token_time = times[-1]
            if metrics.first_token_time is None:
                metrics.first_token_time = times[-1]
        num_finished = self._forget_finished([seq.request for seq in sampled if seq.finish_reason])
        output = StepOutput(
            outputs=outputs_of(sampled),
            prompt_logprobs={
                owner.request_id: yielded.scored
                for owner, chunk, yielded in zip(owners, plan.chunks, result.chunks, strict=True)
                if owner and yielded.scored and chunk.scored[0] < owner.num_prompt
            },
            failed=tuple(failed),
            stats=self._meter.stats(plan, times, num_finished),
        )
        self._state = "idle"
        self.stats.add(output.stats, len(sampled) + sum(map(len, result.forced.values())))
        self.metrics.add_step(output.stats, [times[-1] - last for last in last_times if last])
        self._report(output.stats)
        return output

    def recover(self) -> None:
        """Repair the state that an exception left behind, if one did."""
        if self._state == "idle":
            return
        if self._state == "computing":
            self._state = "changing"
            self.scheduler.preempt_all()
        elif self._state == "changing":
            self.scheduler.rebuild(self._requests.values())
            self.log.emit(("rebuild", scheduler_snapshot(self.scheduler)))
        self._state = "finishing"
        self._forget_finished(self._requests.values())
        self._state = "idle"

    def drop_all(self) -> None:
        """Drop every request and the trace's file, in a forked child whose parent keeps them."""
        self.log.leave_file()
        self._requests.clear()
        self._state = "changing"
        self.recover()

    def _report(self, stats: StepStats) -> None:
        """Notify the log and the observers. An observer that raises is removed."""
        try:
            self.log.end_step(vars(stats))
        except Exception as error:  # a full disk must not cost the step's tokens
            self.log_error = error
            logger.error("the event log ends at step %d: %s", stats.step, error)
        for observer in self.observers[:]:
            try:
                observer(stats)
            except Exception:
                self.observers.remove(observer)
                logger.exception("an observer of the engine raised, and is removed: %r", observer)

    def _forget_finished(self, requests: Iterable[Request]) -> int:
        """Remove those of the requests that have ended, and return their number."""
        finished = {each.request_id: each for each in requests if each.is_finished}
        for request_id, request in finished.items():
            request.metrics.finished_time = self._clock()
            self.metrics.end(request)
            self._requests.pop(request_id, None)
        return len(finished)
