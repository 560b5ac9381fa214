"""Check the whole scheduler with a state machine, under a runner that knows each slot's contents.

Every rule of docs/scheduling.md that is visible from outside is checked at every step, and every
output is checked against an oracle that knows no schedule.
"""

import math
from collections import Counter

import pytest
from audit import check_memory, check_scheduler
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rare import check_machine
from scripted_runner import EOS, ScriptedRunner, expected_tokens, salt_seed

from mie.config.engine import POLICIES, EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.overlap import OverlappingRunner
from mie.errors import RequestError
from mie.memory.manager import KVCacheManager
from mie.sched.scheduler import Scheduler
from mie.sched.sequence import Request

MAX_REQUESTS = 8
"""Maximum number of requests that wait or run at once."""
VOCAB_SIZE = 8
"""Size of the vocabulary. It is small so that answers match too, and many end by EOS."""

QUOTAS = {"a": {"weight": 2, "max_num_seqs": 1}}

seen: Counter[str] = Counter()

numbers = st.integers(0, 11)
# A single rule chooses the operation, because hypothesis leaves rules out at random, and these
# operations reach little without each other.
OPERATIONS = st.sampled_from(
    [
        *(["step"] * 18 + ["add"] * 12 + ["abort"] * 3 + ["finish_choice"] * 2),
        *("break_off", "rebuild", "reset"),
    ]
)


@st.composite
def settings_of_engines(draw):
    """Draw keyword arguments of EngineConfig, the size of the pools, and max_model_len."""
    max_model_len = draw(st.integers(8, 30))
    is_chunked = draw(st.sampled_from([True, True, True, False]))
    budget = draw(st.sampled_from([1, 2, 3, 5, 8, 40])) if is_chunked else max_model_len
    caching = draw(st.sampled_from([True, True, True, False]))
    swaps, is_static = draw(st.booleans()), draw(st.integers(0, 4)) == 4
    config = {
        "block_size": draw(st.sampled_from([4, 1, 2, 3, 4])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": budget,
        "enable_chunked_prefill": is_chunked,
        "enable_prefix_caching": caching,
        "partial_block_sharing": draw(st.sampled_from([True, True, False])),
        "max_cached_blocks": draw(st.sampled_from([None, None, 0, 2])) if caching else None,
        "scheduling_policy": draw(st.sampled_from([*POLICIES, "fair"])),
        "batching": "static" if is_static else "continuous",
        "preemption_mode": "swap" if swaps else "recompute",
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.0, 0.01, 0.2, 0.5])),
        "admit_after_preemption": not is_static and draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
    }
    if config["scheduling_policy"] == "fair":
        config["max_num_seqs"] = draw(st.integers(1, 3))  # so that clients take turns
        config["fair_turn"] = draw(st.sampled_from([1, 2, 5]))
        config["client_quotas"] = draw(st.sampled_from([None, QUOTAS]))
    if is_chunked:
        config["max_prefill_chunk"] = draw(st.sampled_from([None, None, 1, 3]))
    return {
        "config": config,
        "max_model_len": max_model_len,
        "num_blocks": draw(st.integers(3, 12)),
        "num_host_blocks": draw(st.integers(1, 10)) if swaps else 0,
    }


class Scheduling(RuleBasedStateMachine):
    @initialize(drawn=settings_of_engines())
    def begin(self, drawn):
        self.config = config = EngineConfig(**drawn["config"])
        self.is_fair = config.scheduling_policy == "fair"
        self.records = []
        self.manager = KVCacheManager(
            drawn["num_blocks"],
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            partial_block_sharing=config.partial_block_sharing,
            max_cached_blocks=config.max_cached_blocks,
            num_host_blocks=drawn["num_host_blocks"],
            emit=self.records.append,
        )
        self.scheduler = Scheduler(
            config, self.manager, drawn["max_model_len"], self.records.append
        )
        self.runner = self.script = ScriptedRunner(
            num_blocks=drawn["num_blocks"],
            block_size=config.block_size,
            num_host_blocks=drawn["num_host_blocks"],
            live_rows=lambda: [seq.table.row for seq in self.scheduler.running],
            vocab_size=VOCAB_SIZE,
        )
        if config.async_scheduling:
            self.runner = OverlappingRunner(self.script, self.scheduler.ahead)
        num_slots = drawn["num_blocks"] * config.block_size
        self.limit = min(drawn["max_model_len"], num_slots + 1)
        self.num_requests = 0
        self.live = {}  # number -> request
        self.ended = []
        self.expected = {}  # sequence -> (tokens, reason)
        self.got = {}  # sequence -> tokens
        self.scored = {}  # request -> prompt positions
        self.last_admitted = -1

    @rule(operation=OPERATIONS, pick=numbers, number=numbers)
    def do(self, operation, pick, number):
        seen["operations"] += 1
        if operation != "reset" and not self.live:
            operation = "add"
        if operation == "add" and len(self.live) == MAX_REQUESTS:
            operation = "step"
        getattr(self, operation)(pick, number)

    def add(self, pick, number):
        """Add a request. Many prompts begin alike, or like a sequence. There are two tenants."""
        rank = self.num_requests
        length = 1 + pick * self.limit // 14 + rank % 3
        prompt = [4 + (pick % 3 * i + (i == 2 * number)) % 4 for i in range(length)]
        if number % 3 == 1 and self.scheduler.running:
            other = self.scheduler.running[pick % len(self.scheduler.running)]
            prompt = [*other.token_ids[: self.limit - 3], 6, 6]
        salt = "tenant" if rank % 5 == 4 else None
        params = SamplingParams(
            n=[1, 1, 2, 1, 4, 3][(pick + 2 * number) % 6],
            max_tokens=[10, None, 1, 4, 7, 13][(pick + number) % 6],
            seed=salt_seed(salt),
            ignore_eos=rank % 8 > 0,
            stop_token_ids=[5] if rank % 7 == 6 else None,
            prompt_logprobs=0 if (pick * number + rank) % 6 == 5 else None,
        )
        priority = number % 4 - 1 if self.config.scheduling_policy == "priority" else 0
        client = (salt, "a", "b")[rank % 3] if self.is_fair else None
        labels = {"priority": priority, "cache_salt": salt, "client": client}
        request = Request(str(rank), prompt, params, **labels, number=rank, eos_token_ids=[EOS])
        fits = len(prompt) < self.limit or (
            # A prompt that fills the pool can still get the one token that is never stored.
            len(prompt) < self.scheduler.max_model_len
            and self.manager.blocks_for(len(prompt)) <= self.manager.num_blocks
        )
        if not fits:
            with pytest.raises(RequestError):
                self.scheduler.check(request)
            seen["refused"] += 1
            return
        self.scheduler.check(request)
        self.scheduler.add(request)
        self.num_requests += 1
        self.live[rank] = request
        self.scored[request] = []
        for seq in request.sequences:
            self.expected[seq] = expected_tokens(
                prompt, params, choice=seq.index, limit=self.limit, vocab_size=VOCAB_SIZE
            )
            self.got[seq] = []

    def abort(self, pick, number):
        requests = list(self.live.values())
        if number % 2:  # otherwise rare
            swapped = [r for r in requests if state_of(r) == "swapped out"]
            preempted = [r for r in requests if state_of(r) in PREEMPTED]
            requests = swapped or preempted or requests
        if number == 0 and self.ended:
            request = self.ended[pick % len(self.ended)]
            seen["aborted finished"] += 1
        else:
            request = requests[pick % len(requests)]
            seen[f"aborted {state_of(request)}"] += 1
        self.scheduler.abort(request)
        assert request.is_finished
        self.forget_finished()

    def finish_choice(self, pick, number):
        """End one choice, as a stop string or a caller does."""
        several = [r for r in self.live.values() if r.params.n > 1]
        if several:
            request = several[pick % len(several)]
            seq = request.sequences[number % request.params.n]
            seen[f"choices finished {state_of_choice(seq)}"] += 1
            self.scheduler.finish(seq, "stop", "text")
            self.forget_finished()

    def reset(self, *_):
        was_idle = not self.scheduler.running
        assert self.manager.reset_prefix_cache() == was_idle
        seen["resets"] += was_idle

    def rebuild(self, pick, _):
        """Raise where the queues or the blocks may be inconsistent."""
        if pick % 2:
            self.scheduler.schedule()
        if self.config.async_scheduling:
            self.runner._launched = None
        self.scheduler.running[:] = [None]
        self.manager.pool._refcounts[0] += 1
        self.scheduler.rebuild(self.live.values())
        assert not self.scheduler.running
        assert self.manager.num_available == self.manager.num_blocks
        self.last_admitted = -1
        seen["rebuilt"] += 1

    def break_off(self, pick, _):
        """Raise in the middle of a step."""
        plan = self.schedule()
        if pick % 3 == 1:
            self.script.prepare(plan)
        if pick % 3 > 1:
            self.runner.run(plan)
        self.scheduler.preempt_all()
        assert not self.scheduler.running
        assert self.manager.num_used == 0
        seen["broken off"] += 1

    # A step and its guarantees.

    def schedule(self):
        is_launched = self.runner.is_ahead and bool(self.scheduler.running)
        seen["launched"] += is_launched
        return self.scheduler.schedule(may_admit=not is_launched)

    def step(self, *_):
        scheduler = self.scheduler
        ran, waited = list(scheduler.running), list(scheduler.waiting)
        lent = self.partial_blocks(ran)
        self.records.clear()
        plan = self.schedule()
        has_work = scheduler.running or scheduler.waiting
        assert not plan.is_empty or not has_work, "work, and nothing is done"
        kept = [seq for seq in ran if seq.seq_id not in plan.preempted]
        admitted = [seq for seq in scheduler.running if seq not in kept]
        preempted = [seq for seq in ran if seq.seq_id in plan.preempted]
        self.check_limits(plan)
        self.check_victims(plan, kept, preempted, admitted)
        self.check_admissions(ran, waited, kept, preempted, admitted)
        if not preempted:
            self.check_copies(plan, lent)
        for _, node in self.manager.prefix.pinned:
            seen["partial hits, cached" if node else "partial hits, running"] += 1
        result = self.runner.run(plan)
        sampled = scheduler.update(plan, result)
        self.take_in(plan, sampled, result.chunks)
        self.count()

    def check_limits(self, plan):
        config = self.config
        assert plan.num_tokens <= config.max_num_batched_tokens
        num_forks = sum(len(chunk.choices) - 1 for chunk in plan.chunks if chunk.choices)
        assert len(self.scheduler.running) + num_forks <= config.max_num_seqs
        for chunk in plan.chunks:
            seq = self.scheduler.by_row[chunk.row]
            assert bool(chunk.choices) == (chunk.end == seq.num_tokens)
            if not seq.is_prefilling:  # it has forced tokens
                continue
            assert len(chunk.token_ids) <= (config.max_prefill_chunk or math.inf)
            assert chunk.choices or config.enable_chunked_prefill
            if len(chunk.choices) > 1:
                self.check_order(seq, self.scheduler.waiting)

    def check_victims(self, plan, kept, preempted, admitted):
        """Assert that the last sequences are preempted first, in favour of those before them."""
        assert len(preempted) == len(plan.preempted), "preempted twice"
        for victim in preempted:
            self.check_order(victim, kept, is_last=True)
            if victim not in admitted:
                assert victim in self.scheduler.waiting
                assert victim.seq_id not in {chunk.seq_id for chunk in plan.chunks}

    def check_admissions(self, ran, waited, kept, preempted, admitted):
        config, waiting = self.config, list(self.scheduler.waiting)
        assert {*admitted} <= {*waited, *preempted}
        if preempted and not config.admit_after_preemption:
            made_way = {record[2] for record in self.records if record[0] == "preempt"}
            assert {seq.seq_id for seq in admitted} <= made_way if self.is_fair else not admitted
            seen["made way"] += bool(admitted)
        if self.is_fair and config.client_quotas:
            seats = [seq for seq in self.scheduler.running if seq.request.client == "a"]
            assert len(seats) <= 1, "more than its max_num_seqs"
        if config.batching == "static" and ran:
            assert not admitted
        for seq in admitted:
            self.check_order(seq, waiting)
        if admitted and len(self.scheduler.running) > 1:
            num_spare = math.ceil(config.watermark * self.manager.num_blocks)
            assert self.manager.num_available >= num_spare, "the watermark was passed"
        if config.scheduling_policy == "fcfs":
            for seq in admitted:
                # Choices that waited for a seat come after sequences that were admitted in between.
                is_new = seq.index == 0 and not self.got[seq]
                if is_new and seq.request.metrics.num_preemptions == 0:
                    assert seq.request.number > self.last_admitted, "admitted out of order"
                    self.last_admitted = seq.request.number

    def check_order(self, seq, others, *, is_last=False):
        """Assert that the key is before those of others, or the last. Clients have own orders."""
        for other in others:
            if not self.is_fair or seq.request.client == other.request.client:
                assert (other.key < seq.key) == is_last, "overtaken"

    def partial_blocks(self, seqs):
        """Return {partly filled block that several tables hold: their number}."""
        size = self.manager.block_size
        tables = [seq.table for seq in seqs if seq.table.num_tokens % size]
        blocks = Counter(table.block_ids[table.num_tokens // size] for table in tables)
        return {block_id: count for block_id, count in blocks.items() if count > 1}

    def check_copies(self, plan, lent):
        """Assert that all writers of a forked block copy it, except the last one."""
        copies = Counter(r[1] for r in self.records if r[0] == "copy" and r[4] == "fork")
        chunks = [self.scheduler.by_row[chunk.row] for chunk in plan.chunks]
        forced = [seq.table.row for seq in chunks if not seq.is_prefilling]
        tables = [self.scheduler.by_row[row].table for row in (*plan.decodes, *forced)]
        copied = {target: source for source, target in plan.moves.copies}
        size = self.manager.block_size
        last = [table.block_ids[table.num_tokens // size] for table in tables]
        writers = Counter(copied.get(block_id, block_id) for block_id in last)
        for block_id, num_holders in lent.items():
            assert copies[block_id] == min(writers[block_id], num_holders - 1)
        assert {*copies} <= {*lent}

    def take_in(self, plan, sampled, chunk_results):
        for seq in sampled:
            start = seq.request.num_prompt + len(self.got[seq])
            self.got[seq] += seq.token_ids[start:]
            tokens, reason = self.expected[seq]
            assert self.got[seq] == tokens[: len(self.got[seq])]
            if seq.finish_reason is not None:
                assert (self.got[seq], seq.finish_reason) == (tokens, reason)
                seen["finished"] += 1
            else:
                assert len(self.got[seq]) < len(tokens), "goes on after its end"
        for chunk, result in zip(plan.chunks, chunk_results, strict=True):
            request = self.live[chunk.seq_id[0]]
            for row in result.scored:
                self.scored[request].append(round(-row.logprobs[0]))
            scored = self.scored[request]
            assert scored == list(range(len(scored))), "a position is left out or repeated"
            if chunk.choices:
                assert len(scored) == request.num_prompt_to_score
        self.forget_finished()

    def forget_finished(self):
        for request in [r for r in self.live.values() if r.is_finished]:
            del self.live[request.number]
            self.ended.append(request)

    def count(self):
        seen["steps"] += 1
        for kind, *fields in self.records:
            if kind == "preempt":
                seen[f"preempted by {fields[2]}"] += 1
            elif kind == "resume":
                seen[f"resumed by {fields[4]}"] += 1
            elif kind == "copy":
                seen[f"copies, {fields[3]}"] += 1
            elif kind in ("fork", "wait", "evict", "share", "force"):
                seen[kind] += 1

    @invariant()
    def nothing_is_lost(self):
        check_scheduler(self.scheduler)
        seqs = [seq for request in self.live.values() for seq in request.sequences]
        queued = {*self.scheduler.running, *self.scheduler.waiting}
        for seq in seqs:
            goes_on = seq.finish_reason is None
            assert (seq in queued) == (goes_on and seq.request.prefill_choice in (None, seq))
        assert queued <= {*seqs}

    def teardown(self):
        """Assert that all remaining work ends in bounded time and that every block is freed."""
        if not hasattr(self, "manager"):
            return
        seqs = [seq for request in self.live.values() for seq in request.sequences]
        num_tokens = sum(s.request.num_prompt + len(self.expected[s][0]) for s in seqs)
        for _ in range(num_tokens * (len(seqs) + 1)):
            if not (self.scheduler.running or self.scheduler.waiting):
                break
            self.step()
            self.nothing_is_lost()
        assert not self.scheduler.running, "it never ends"
        assert not self.scheduler.waiting, "it never ends"
        assert not self.live
        assert self.manager.num_used == 0
        check_memory(self.manager, [])


PREEMPTED = ("preempted", "swapped out")


def state_of(request):
    """Return the state of a live request."""
    live = [seq for seq in request.sequences if seq.finish_reason is None]
    running = [seq for seq in live if seq.table is not None]
    if any(seq.host for seq in live):
        return "swapped out"
    if not running:
        return "preempted" if live[0].was_admitted else "waiting"
    if request.prefill_choice is not None and request.params.n > 1:
        return "unforked"
    if any(not seq.was_admitted for seq in live):
        return "with choices that wait"
    return "mid-prefill" if any(seq.is_prefilling for seq in running) else "decoding"


def state_of_choice(seq):
    """Return the state of a choice."""
    if seq.finish_reason is not None:
        return "ended"
    if seq.request.prefill_choice is not None:
        return "in its prompt" if seq is seq.request.prefill_choice else "before the fork"
    return "running" if seq.table else "waiting"


OFTEN = (
    *("preempted by recompute", "preempted by recompute: host pool full", "preempted by swap"),
    *("resumed by recompute", "resumed by swap", "partial hits, cached", "copies, fork"),
    *("copies, prefix", "fork", "evict", "share", "wait", "force", "choices finished running"),
    *("broken off", "rebuilt", "finished", "launched", "refused", "made way"),
)
SOMETIMES = (
    *("partial hits, running", "aborted waiting", "aborted mid-prefill", "aborted decoding"),
    *("aborted preempted", "aborted swapped out", "aborted unforked"),
    *(
        "aborted with choices that wait",
        "choices finished in its prompt",
        "choices finished before the fork",
    ),
    *("choices finished waiting", "aborted finished", "resets"),
)


def test_scheduler_machine():
    """Run 3,000 operations, and 60 times as many in `make test-all`."""
    # The operations would prove little if these cases were rare.
    wanted = {"operations": 3000, **dict.fromkeys(OFTEN, 5), **dict.fromkeys(SOMETIMES, 1)}
    check_machine(Scheduling, seen, wanted, 60)
