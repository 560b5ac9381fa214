"""Check that the tokens suffice to continue after an exception at any line of sched or memory.

A trace function raises at a line or between two bytecodes of an operation. Then the scheduler
rebuilds itself, which may also be interrupted, and the run must end as the oracle says.
"""

import random
import sys
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from audit import check_scheduler
from hypothesis import settings
from scripted_runner import EOS, ScriptedRunner, expected_tokens, salt_seed

import mie.memory
import mie.sched
from mie.config.engine import POLICIES, EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.overlap import OverlappingRunner
from mie.engine.watch.snapshot import scheduler_snapshot
from mie.events import EventLog
from mie.events.replay import walk
from mie.load.engine import new_scheduler
from mie.sched.result import TokenLogprobs
from mie.sched.sequence import Request

VOCAB_SIZE = 8
NUM_BROKEN_OFF = min(12_000, 75 * settings().max_examples)
ROOMS = tuple(str(Path(package.__file__).parent) for package in (mie.sched, mie.memory))

OPERATIONS = ("add", "schedule", "update", "preempt_all", "abort", "finish", "rebuild")

seen: Counter[str] = Counter()
places: set[tuple[str, int]] = set()


class Injected(BaseException):
    """Stands for Ctrl-C, an alarm's exception or a MemoryError."""


class Injector:
    """Raises after a number of lines or bytecodes of the two rooms."""

    def __init__(self):
        self.left = 0
        self.by_opcode = False

    @contextmanager
    def __call__(self, operation):
        before = sys.gettrace()
        sys.settrace(self._trace_call if self.left else before)
        try:
            yield
        except Injected:
            seen[operation] += 1
            raise
        finally:
            sys.settrace(before)

    def _trace_call(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(ROOMS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = self.by_opcode, not self.by_opcode
        return self._trace

    def _trace(self, frame, event, _):
        if event in ("line", "opcode") and self.left:
            self.left -= 1
            if not self.left:
                places.add((frame.f_code.co_filename, frame.f_lineno))
                raise Injected
        return self._trace


def config_of(rng):
    is_chunked, caching = rng.random() < 0.75, rng.random() < 0.7
    swaps = rng.random() < 0.5
    policy = rng.choice([*POLICIES, "fair"])
    return EngineConfig(
        block_size=rng.choice([1, 2, 3, 4]),
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=rng.choice([2, 5, 30]) if is_chunked else 30,
        max_prefill_chunk=rng.choice([None, 3]) if is_chunked else None,
        enable_chunked_prefill=is_chunked,
        enable_prefix_caching=caching,
        max_cached_blocks=rng.choice([None, 2]) if caching else None,
        scheduling_policy=policy,
        fair_turn=rng.choice([1, 3]) if policy == "fair" else None,
        batching=rng.choice(["continuous", "continuous", "static"]),
        watermark=rng.choice([0.0, 0.1]),
        preemption_mode="swap" if swaps else "recompute",
        async_scheduling=rng.random() < 0.5,
    )


class Run:
    """A scheduler with its callers, in place of an engine.

    Every operation is either done, or interrupted and followed by a rebuild.
    """

    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.config = config = config_of(rng)
        self.inject = Injector()
        num_blocks, num_host_blocks = rng.randint(4, 10) + 6 // config.block_size, 6
        self.limit = min(30, num_blocks * config.block_size + 1)
        self.log = EventLog(1 << 20)
        swaps = config.preemption_mode == "swap"
        hosts = num_host_blocks if swaps else 0
        states = (config.max_num_seqs + seed % 3, 2) if seed % 2 else (0, 0)
        if seed % 2:  # sequences have states
            self.config = config = replace(config, async_scheduling=False)
        self.scheduler = new_scheduler(
            config, num_blocks, 30, self.log, num_host_blocks=hosts, num_states=states
        )
        self.manager, self.stats = self.scheduler.manager, self.scheduler.manager.stats
        self.runner = ScriptedRunner(
            num_blocks=num_blocks,
            block_size=config.block_size,
            num_host_blocks=hosts,
            num_states=states,
            live_rows=lambda: [seq.table.row for seq in self.scheduler.running],
            vocab_size=VOCAB_SIZE,
        )
        if config.async_scheduling:
            self.runner = OverlappingRunner(self.runner, self.scheduler.ahead)
        self.requests = {}
        self.aborted = set()
        self.cut = {}  # sequence -> tokens it had when its caller ended it
        self.num_steps = 0

    def run(self):
        rng, number = self.rng, 0
        while number < 5 or self.scheduler.running or self.scheduler.waiting:
            if not self.inject.left and rng.random() < 0.3:
                self.inject.by_opcode = rng.random() < 0.3
                self.inject.left = rng.randint(1, 900 if self.inject.by_opcode else 300)
            if number < 5 and rng.random() < 0.5:
                self.add(number)
                number += 1
            live = [request for request in self.requests.values() if not request.is_finished]
            if live and rng.random() < 0.2:
                if rng.random() < 0.7:
                    self.inject.left = rng.randint(1, 100)
                self.end_one(rng.choice(live))
            self.step()
            assert self.num_steps < 1000, "the scheduler has work and does nothing"
        self.check_outputs()

    def add(self, number):
        rng = self.rng
        salt = rng.choice([None, None, "tenant"])
        length = rng.randint(1, max(1, min(12, self.limit - 2)))
        params = SamplingParams(
            n=rng.choice([1, 1, 2, 4]),
            max_tokens=rng.randint(1, 8),
            seed=salt_seed(salt),
            prompt_logprobs=rng.choice([None, 0]),
            logprobs=0,
        )
        priority = rng.randint(-1, 1) if self.config.scheduling_policy == "priority" else 0
        prompt = [4 + rng.randrange(2) * (i % 3 == 2) for i in range(length - 1)]
        prompt.append(rng.choice([4, EOS]))
        while number not in self.requests:
            is_fair = self.config.scheduling_policy == "fair"
            client = (salt, "a", "b")[number % 3] if is_fair else None
            labels = {"priority": priority, "cache_salt": salt, "client": client}
            request = Request(
                str(number), prompt, params, **labels, number=number, eos_token_ids=[EOS]
            )
            self.attempt("add", partial(self.add_now, request))

    def add_now(self, request):
        self.scheduler.add(request)
        self.requests[request.number] = request

    def end_one(self, request):
        seq = self.rng.choice(request.sequences)
        if self.rng.random() < 0.5:
            self.aborted.add(request)
            operation = partial(self.scheduler.abort, request)
        else:
            operation = partial(self.scheduler.finish, seq, "stop", "text")
        is_done = False
        while not is_done:
            for each in request.sequences if request in self.aborted else [seq]:
                if each.finish_reason is None:
                    self.cut[each] = each.num_generated
            is_done = self.attempt(operation.func.__name__, operation)

    def step(self):
        self.num_steps += 1
        plans = []
        is_launched = self.runner.is_ahead and bool(self.scheduler.running)
        schedule = partial(self.scheduler.schedule, may_admit=not is_launched)
        if not self.attempt("schedule", lambda: plans.append(schedule())):
            return
        [plan] = plans
        if self.rng.random() < 0.05:  # the model raises
            self.forget_launched()
            self.attempt("preempt_all", self.scheduler.preempt_all)
            return
        result = self.runner.run(plan)
        rows = [_logprobs(result.token_ids), *(_logprobs(each.token_ids) for each in result.chunks)]
        chunks = [replace(c, logprobs=row) for c, row in zip(result.chunks, rows[1:], strict=True)]
        result = replace(result, logprobs=rows[0], chunks=chunks)
        if self.attempt("update", lambda: self.scheduler.update(plan, result)):
            self.log.end_step({"step": plan.step})

    def attempt(self, name, operation):
        """Return whether it was done. Else the scheduler is unchanged or its tokens are ahead."""
        is_done = False
        try:
            with self.inject(name):
                operation()
                is_done = True
        except Injected:
            self.rebuild()
        if name != "schedule" or not is_done:  # A step is planned but not applied.
            self.check()
        return is_done

    def forget_launched(self):
        if self.config.async_scheduling:
            self.runner._launched = None

    def rebuild(self):
        self.forget_launched()
        if self.rng.random() < 0.2:
            self.inject.left = self.rng.randint(1, 200)
        while True:
            try:
                with self.inject("rebuild"):
                    self.scheduler.rebuild(self.requests.values())
                    self.log.rebuilt()
            except Injected:
                continue
            return

    def check(self):
        scheduler = self.scheduler
        check_scheduler(scheduler)
        assert scheduler.manager is self.manager
        assert scheduler.manager.stats is self.stats
        queued = {*scheduler.running, *scheduler.waiting}
        wanted = {
            seq
            for request in self.requests.values()
            for seq in request.sequences
            if seq.finish_reason is None and request.prefill_choice in (None, seq)
        }
        assert queued == wanted
        for request in self.requests.values():
            for seq in request.sequences:
                generated = seq.token_ids[request.num_prompt :]
                assert [row.token_ids[0] for row in seq.logprobs] == generated[: seq.num_final]

    def check_outputs(self):
        assert self.manager.num_used == 0
        for request in self.requests.values():
            for seq in request.sequences:
                tokens, reason = expected_tokens(
                    seq.token_ids[: request.num_prompt],
                    request.params,
                    choice=seq.index,
                    limit=self.limit,
                    vocab_size=VOCAB_SIZE,
                )
                got = seq.token_ids[request.num_prompt :]
                if seq in self.cut:
                    assert got == tokens[: self.cut[seq]]
                    assert (seq.stop_reason == "text") == (seq.finish_reason == "stop")
                else:
                    assert (got, seq.finish_reason) == (tokens, reason)
                    assert len(seq.logprobs) == len(got), "a token has no log-probability"
            scored = [round(-row.logprobs[0]) for row in request.prompt_logprobs]
            assert scored == list(range(len(scored)))
            is_scored = len(scored) == request.num_prompt_to_score
            assert is_scored or any(seq in self.cut for seq in request.sequences)
        [(_, _, state)] = deque(walk(self.log.segments()), maxlen=1)
        assert state.snapshot() == scheduler_snapshot(self.scheduler)


def _logprobs(token_ids):
    return [TokenLogprobs(token_ids=[i], logprobs=[0.0], rank=1) for i in token_ids]


# From Python 3.12 on, a generator that is thrown away is traced as well, and the exception that
# strikes there cannot be raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_tokens_suffice_to_continue_after_any_interruption():
    seen.clear()
    places.clear()
    seed = 0
    while seen.total() < NUM_BROKEN_OFF or min(seen[each] for each in OPERATIONS) < 8:
        assert seen.total() < 2 * NUM_BROKEN_OFF, f"too rare: {seen}"
        try:
            Run(seed).run()
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        seed += 1
    assert len(places) >= 500
