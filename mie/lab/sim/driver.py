"""Send a workload to an engine, simulated or real, and record when its tokens came back."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from mie.base.stats.step import StepStats
from mie.config.params.sampling import SamplingParams
from mie.engine.engine import Engine
from mie.errors import RequestError
from mie.lab.metrics import RequestRecord
from mie.lab.sim.costs import SECOND, Clock
from mie.lab.workload import Answer, Workload, WorkloadRequest
from mie.sched.sequence import Request

Progress: TypeAlias = Callable[[int], object]
"""A function that is called with the number of requests that have just ended."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """An engine, its clock, and its vocabulary."""

    engine: Engine
    clock: Clock
    vocab_size: int


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """The results of a run: a record for each request of the workload, in order, and all steps."""

    records: list[RequestRecord]
    steps: list[StepStats]
    duration_ns: int
    """Time from the load's start to its last token."""

    @property
    def num_steps(self) -> int:
        """The number of steps."""
        return len(self.steps)

    @property
    def num_preempted(self) -> int:
        """The number of preemptions."""
        return sum(stats.num_preempted for stats in self.steps)

    @property
    def num_prefill_tokens(self) -> int:
        """The number of prompt tokens that were computed, including again after a preemption."""
        return sum(stats.num_prefill_tokens for stats in self.steps)

    @property
    def num_cached_tokens(self) -> int:
        """The number of prompt tokens that were found in the prefix cache."""
        return sum(record.num_cached for record in self.records)

    @property
    def peak_blocks(self) -> int:
        """The maximum number of blocks that were in tables at once."""
        return max((stats.num_blocks_used for stats in self.steps), default=0)

    @property
    def peak_running(self) -> int:
        """The maximum number of sequences that were running at the end of a step."""
        return max((stats.num_running for stats in self.steps), default=0)


def run_load(
    bench: Bench,
    workload: Workload,
    *,
    max_concurrency: int | None = None,
    progress: Progress = lambda num_ended: None,
) -> LoadResult:
    """Send every request at its time and step the engine until all have ended.

    With ``max_concurrency`` at most that many are in the engine at once. The others are sent as
    those end, and their arrival is that moment, as in vLLM's benchmark. A refused request is
    recorded with its error, and so are later requests that follow it. ``progress`` is called with
    the number of requests that have just ended.
    """
    run = _Run(bench, workload, max_concurrency, progress)
    engine = bench.engine
    engine.observers.append(run.steps.append)
    try:
        run.serve()
    finally:
        engine.observers.remove(run.steps.append)
        for request_id in run.requests:  # left by an abandoned run
            engine.abort(request_id)
    return LoadResult(
        records=[run.records[request.request_id] for request in workload.requests],
        steps=run.steps,
        duration_ns=max((record.end_ns or 0 for record in run.records.values()), default=0),
    )


class _Run:
    """One run: the future requests, the requests in the engine, and the records."""

    def __init__(
        self, bench: Bench, workload: Workload, max_concurrency: int | None, progress: Progress
    ) -> None:
        self._progress = progress
        self.steps: list[StepStats] = []
        self.records: dict[str, RequestRecord] = {}
        self.requests: dict[str, Request] = {}
        """The requests in the engine."""
        self._bench = bench
        # Requests to come, a heap by their time.
        self._coming: list[tuple[int, int, WorkloadRequest]] = []
        self._after: dict[str, list[tuple[int, WorkloadRequest]]] = {}
        self._prompts: dict[str, list[int]] = {}
        self._answers: dict[tuple[str, int], list[int]] = {}
        # The moments when seats became free, or None without a limit.
        self._seats = None if max_concurrency is None else deque([0] * max_concurrency)
        for order, request in enumerate(workload.requests):
            quoted = [part for part in request.prompt if isinstance(part, Answer)]
            self._answers.update(((part.answer_of, part.choice), []) for part in quoted)
            if not quoted:  # generating the tokens takes time that is not the engine's
                self._prompts[request.request_id] = request.token_ids(bench.vocab_size, {})
            if request.after is None:
                self._coming.append((request.arrival_ns, order, request))
            else:
                self._after.setdefault(request.after, []).append((order, request))
        heapq.heapify(self._coming)
        self._began = bench.clock.now_ns()

    def serve(self) -> None:
        engine, clock = self._bench.engine, self._bench.clock
        while True:
            self._send(self._now())
            if engine.has_work:
                request_ids = engine.step().request_ids
                now = self._now()
                for request_id in request_ids:
                    self._note(self.requests[request_id], now)
            elif self._coming:
                clock.wait_until(self._began + self._coming[0][0])
            else:
                return

    def _now(self) -> int:
        return self._bench.clock.now_ns() - self._began

    def _send(self, now: int) -> None:
        """Send the requests that are due. They arrived when due, even after a long step."""
        while self._coming and self._coming[0][0] <= now and self._seats != deque():
            due, _, request = heapq.heappop(self._coming)
            self._add(request, due if self._seats is None else max(due, self._seats.popleft()))

    def _add(self, request: WorkloadRequest, arrival_ns: int) -> None:
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None:
            prompt = request.token_ids(self._bench.vocab_size, self._answers)
        record = RequestRecord(
            request_id=request.request_id, num_prompt=len(prompt), arrival_ns=arrival_ns
        )
        self.records[request.request_id] = record
        record.token_ns = [[] for _ in range(request.n)]
        try:
            self.requests[request.request_id] = self._bench.engine.add_request(
                prompt,
                params_of(request),
                request.request_id,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
        except RequestError as error:
            self._refuse(record, str(error))
            self._free_seat(arrival_ns)

    def _refuse(self, record: RequestRecord, error: str) -> None:
        record.error = error
        self._progress(1)
        for _, request in self._after.pop(record.request_id, []):
            later = RequestRecord(
                request_id=request.request_id, num_prompt=0, arrival_ns=record.arrival_ns
            )
            self.records[request.request_id] = later
            self._refuse(later, f"it depends on {record.request_id!r}, which was refused")

    def _note(self, request: Request, now: int) -> None:
        """Record the new tokens of a request, and its end."""
        record, metrics = self.records[request.request_id], request.metrics
        if record.first_step_ns is None:
            assert metrics.first_step_time is not None
            record.first_step_ns = round(metrics.first_step_time * SECOND) - self._began
        for seq, times in zip(request.sequences, record.token_ns, strict=True):
            new = seq.token_ids[request.num_prompt + len(times) :]
            times += [now] * len(new)
            answer = self._answers.get((request.request_id, seq.index))
            if answer is not None:
                answer += new
        if request.is_finished:
            self._end(record, request, now)

    def _end(self, record: RequestRecord, request: Request, now: int) -> None:
        del self.requests[request.request_id]
        self._progress(1)
        record.num_cached = request.metrics.num_cached_tokens
        record.num_preemptions = request.metrics.num_preemptions
        self._free_seat(now)
        for order, later in self._after.pop(record.request_id, []):
            heapq.heappush(self._coming, (now + later.arrival_ns, order, later))

    def _free_seat(self, now: int) -> None:
        if self._seats is not None:
            self._seats.append(now)


def params_of(request: WorkloadRequest) -> SamplingParams:
    """Return the parameters for exactly ``max_tokens`` tokens.

    Choices of one request must differ, or they would share all blocks. So they are sampled, and a
    single choice is greedy.
    """
    return SamplingParams(
        n=request.n,
        max_tokens=request.max_tokens,
        ignore_eos=True,
        temperature=1.0 if request.n > 1 else 0.0,
        detokenize=False,
    )
