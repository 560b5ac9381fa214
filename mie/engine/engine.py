"""Turn requests of token ids into tokens, one step at a time. The engine handles no text."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeAlias

from mie.base.stats.step import EngineStats, StepStats
from mie.base.threads import is_of_the_request
from mie.config.engine import DEFAULT_LIMITS, EngineConfig, RequestLimits
from mie.config.params.checks import (
    automatic_id,
    check_labels,
    check_logprobs,
    check_something_allowed,
    check_token_ids,
)
from mie.config.params.sampling import SamplingParams
from mie.engine.constraints.constraint import Constraints, new_constraint
from mie.engine.rows import RowFault
from mie.engine.step import StepMeter, StepOutput
from mie.errors import RequestError
from mie.sched.plan import StepPlan
from mie.sched.result import StepResult
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import FinishReason, Request, Sequence

logger = logging.getLogger(__name__)

Work: TypeAlias = Literal["idle", "changing", "computing", "finishing"]
"""The work that an exception may interrupt.

"changing" changes the queues and the blocks. "computing" is a step, so its blocks are undefined.
"finishing" changes the list of requests.
"""


class Runner(Protocol):
    """Computes steps: `ModelRunner`, an overlapping runner, or the simulator's."""

    @property
    def is_ahead(self) -> bool:
        """Whether the next step is already launched, so that no sequence can be admitted to it."""

    def run(self, plan: StepPlan) -> StepResult:
        """Run the plan and sample."""


class Log(Protocol):
    """The event log. The scheduler and the memory emit records to it."""

    def end_step(self, summary: Mapping[str, Any], /) -> None:
        """End a step with its numbers."""

    def rebuilt(self) -> None:
        """Emit a record of the whole state as rebuilt from the tokens."""

    def leave_file(self) -> None:
        """Stop writing to the file, because another process continues it."""

    def close(self) -> None:
        """Write the records since the last step, and stop writing."""


class Metrics(Protocol):
    """Counts the steps, and the requests that have ended."""

    def add_step(self, stats: StepStats, gaps: Iterable[float], /) -> None:
        """Count a step, and the seconds between the last two tokens of each choice."""

    def end(self, request: Request, /) -> None:
        """Record that a request has ended. Recording it again changes nothing."""


class Engine:
    """Runs requests until they finish. Only one thread at a time may call it::

        request = engine.add_request([5, 6, 7], SamplingParams(max_tokens=16))
        while engine.has_work:
            engine.step()
        print(request.sequences[0].output_ids)

    The state of a request is its tokens, and blocks are a cache of them. So an exception at any
    line, for example from a signal handler, costs time and no output: the next call repairs the
    state.
    """

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        runner: Runner,
        log: Log,
        metrics: Metrics,
        *,
        vocab_size: int,
        eos_token_ids: Items[int],
        constraints: Constraints | None = None,
        backend: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create an engine. ``clock`` returns monotonic seconds, real or simulated.

        ``constraints`` are the runner's. They need a tokenizer.
        """
        self.config = config
        self.scheduler = scheduler
        self.runner = runner
        self.log = log
        self.log_error: Exception | None = None
        """Why the event log ended early, or None. The requests continue."""
        self.metrics = metrics
        self.stats = EngineStats(scheduler.manager.stats)
        self.observers: list[Callable[[StepStats], None]] = []
        """Functions that get the numbers of each step."""
        self.before_step: list[Callable[[], None]] = []
        """Functions that may give blocks on the host to waiting sequences, before each step."""
        self.vocab_size = vocab_size
        """Number of token ids of the model."""
        self.backend = backend
        """Name of the backend that computes."""
        self.max_model_len = scheduler.longest
        """Maximum number of tokens of a prompt and its answer that the KV cache holds."""
        self.eos_token_ids = tuple(eos_token_ids)
        self.clock = clock
        self.adapters: Any = None
        """The loaded adapters (`mie.load.adapters`), or None without ``enable_lora``."""
        self.constraints = constraints
        self._requests: dict[str, Request] = {}
        self._num_requests = 0
        self._work: Work = "idle"
        self._meter = StepMeter(scheduler, clock)

    def __repr__(self) -> str:
        manager, scheduler = self.scheduler.manager, self.scheduler
        return (
            f"Engine({manager.num_blocks} blocks of {manager.block_size} tokens,"
            f" max_model_len={self.max_model_len}, {len(scheduler.running)} running,"
            f" {len(scheduler.waiting)} waiting)"
        )

    # One step.

    def step(self) -> StepOutput:
        """Compute one step.

        If a request's own sampling or log-probabilities raise, it fails alone (`Request.error`),
        and the step is planned again without it. Any other exception reaches the caller, and the
        running sequences wait again with the tokens they had.
        """
        failed: list[str] = []
        self.recover()
        while True:
            try:
                return self._step(failed)
            except RowFault as fault:
                failed.append(self._fail_owner(fault))
            finally:
                self.recover()

    def _step(self, failed: Items[str]) -> StepOutput:
        self._begin("changing")
        for prepare in self.before_step:
            prepare()
        plan = self.scheduler.schedule(may_admit=not self._is_launched)
        self._meter.count_blocks()
        self._begin("computing")
        result = self.runner.run(plan)
        self._begin("changing")
        sequences = self.scheduler.update(plan, result)
        self._begin("finishing")
        return self._finish_step(plan, result, sequences, failed)

    def _finish_step(
        self, plan: StepPlan, result: StepResult, sequences: Items[Sequence], failed: Items[str]
    ) -> StepOutput:
        """Remove the requests that have ended, and count the step."""
        assert not (plan.is_empty and self.has_work), "the engine has work and does nothing"
        gaps = self._meter.stamp(plan, sequences)
        ended = [seq.request for seq in sequences if seq.finish_reason]
        stats = self._meter.stats(plan, self._forget_finished(ended))
        self._work = "idle"
        self.stats.add(stats, result.num_tokens)
        self.metrics.add_step(stats, gaps)
        self._report(stats)
        request_ids = dict.fromkeys([seq.request.request_id for seq in sequences])
        return StepOutput(request_ids=tuple(request_ids), failed=tuple(failed), stats=stats)

    @property
    def _is_launched(self) -> bool:
        """Whether the next step is launched already and still needed."""
        return self.runner.is_ahead and bool(self.scheduler.running)

    def _begin(self, work: Work) -> None:
        """Note the work that begins, for `recover`, and its time."""
        self._work = work
        self._meter.lap()

    def _fail_owner(self, fault: RowFault) -> str:
        """Fail the request that made a row raise, and return its id, or raise the error."""
        owner = self.scheduler.owner_of(fault.row)
        if owner is None or not is_of_the_request(fault.error):
            raise fault.error from None
        self.fail(owner, fault.error)
        return owner.request_id

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

    # Requests.

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
        token_ids: Items[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        client: str | None = None,
    ) -> Request:
        """Check and queue a prompt of token ids, and return the request.

        The sequences of the request get the tokens. Under the priority policy a lower ``priority``
        goes first. Under the fair policy each ``client`` gets an equal share. Only requests with
        the same ``cache_salt`` share cached blocks. Ids such as "auto-7" are the engine's own.

        Raises:
            ConfigError: a field of ``params`` has a value that is not allowed.
            RequestError: the request can never be served. Nothing was added.
        """
        params = params.verified()
        self.check(token_ids, params, request_id, priority, cache_salt, client)
        return self.add(
            [*token_ids],
            params,
            request_id,
            priority=int(priority),
            cache_salt=cache_salt,
            client=client,
            constraint=new_constraint(params, self.constraints),
        )

    def check(
        self,
        token_ids: Items[int],
        params: SamplingParams,
        request_id: object,
        priority: object,
        cache_salt: object,
        client: object,
        limits: RequestLimits = DEFAULT_LIMITS,
    ) -> None:
        """Raise `RequestError` if a request does not fit the model. Any thread may call.

        ``params`` must come from `SamplingParams.verified`.
        """
        check_labels(request_id, priority, cache_salt, client, limits)
        check_token_ids(token_ids, params, self.vocab_size)
        check_logprobs(params, self.config.max_logprobs)
        check_something_allowed(params, self.eos_token_ids, self.vocab_size)

    def add(
        self,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str | None,
        *,
        priority: int,
        cache_salt: str | None,
        client: str | None,
        constraint: object,
        prediction: Items[int] = (),
        adapter: int = 0,
    ) -> Request:
        """Queue a request that `check` accepted, and return it. It gets an id if it has none.

        ``constraint`` is the result of `new_constraint`. ``prediction`` has tokens that the output
        may contain, for drafts. ``adapter`` is the slot of its adapter, or 0.

        Raises:
            RequestError: the id is in use, or the request does not fit. Nothing was added.
        """
        number = self._num_requests
        if request_id in self._requests:
            raise RequestError(f"request id {request_id!r} is in use; choose another")
        request = Request(
            request_id or automatic_id(number),
            token_ids,
            params,
            number=number,
            eos_token_ids=self.eos_token_ids,
            draw_seed=self.config.seed,
            priority=priority,
            cache_salt=cache_salt,
            client=client,
            prediction=prediction,
            constraint=constraint,
            adapter=adapter,
        )
        self.scheduler.check(request)
        request.metrics.arrival_time = self.clock()
        with self._changing():
            self._num_requests = number + 1
            self.scheduler.add(request)
            self._requests[request.request_id] = request
        return request

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
        """End one choice of a request. The other choices continue."""
        with self._changing(request_id) as request:
            if request is not None:
                self.scheduler.finish(request.sequences[index], reason, stop_reason)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached blocks. Return False, unchanged, if a request holds blocks."""
        with self._changing():
            is_reset = self.scheduler.manager.reset_prefix_cache()
            if is_reset and self.scheduler.speculation:
                self.scheduler.speculation.drafter.forget()
            return is_reset

    # Recovery.

    @contextmanager
    def _changing(self, request_id: str | None = None) -> Iterator[Request | None]:
        """Repair the scheduler if necessary, and mark it as changing until the block is done.

        The block gets the request, if it is unfinished, and may finish it.
        """
        self.recover()
        self._work = "changing"
        request = None if request_id is None else self._requests.get(request_id)
        yield request
        self._forget_finished([request] if request else [])
        self._work = "idle"

    def recover(self) -> None:
        """Repair the state that an exception left behind, if one did."""
        if self._work == "idle":
            return
        if self._work == "computing":
            self._work = "changing"
            self.scheduler.preempt_all()
        elif self._work == "changing":
            self.scheduler.rebuild(self._requests.values())
            self.log.rebuilt()
        self._work = "finishing"
        self._forget_finished(self._requests.values())
        self._work = "idle"

    def drop_all(self) -> None:
        """Drop every request and the trace's file in a forked child. The parent keeps them."""
        self.log.leave_file()
        self._requests.clear()
        self._work = "changing"
        self.recover()

    def _forget_finished(self, requests: Iterable[Request]) -> int:
        """Remove the requests that have ended, and return their number."""
        finished = {each.request_id: each for each in requests if each.is_finished}
        for request_id, request in finished.items():
            request.metrics.finished_time = self.clock()
            self.metrics.end(request)
            self._requests.pop(request_id, None)
        return len(finished)
