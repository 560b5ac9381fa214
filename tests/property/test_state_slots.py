"""Check the slots of recurrent states with a runner that knows which tokens each slot has seen.

Conversations go on, are edited, forked, aborted, preempted, swapped and broken off, in engines
with few slots. Every slot that is read must have seen exactly the tokens before it.
"""

import random
from collections import Counter

from audit import check_scheduler
from hypothesis import settings
from scripted_runner import EOS, expected_tokens, scripted_engine

from mie import EngineConfig, SamplingParams
from mie.memory.layers.states import States
from mie.sched.sequence import Request

NUM_SCENARIOS = 15 if settings().max_examples < 1000 else 1000
LIMIT = 60
OFTEN = (
    *("hits", "snapshots", "snapshots evicted", "preempted", "imported", "forks", "aborted"),
    *("broken off", "edited", "continued", "shared snapshots"),
)

seen: Counter[str] = Counter()


class Scenario:
    """Random requests on a random engine. Some continue a conversation, or edit its past."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        swaps, num_seqs = rng.random() < 0.5, rng.randint(1, 5)
        block_size = rng.choice([1, 2, 3, 4, 8])
        is_cached = rng.random() < 0.9
        self.config = EngineConfig(
            block_size=block_size,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=rng.choice([1, 2, 3, 5, 8, 64]),
            max_prefill_chunk=rng.choice([None, None, 1, 3]),
            scheduling_policy=rng.choice(["fcfs", "fcfs", "priority", "sjf", "fair"]),
            batching=rng.choice(["continuous"] * 4 + ["static"]),
            preemption_mode="swap" if swaps else "recompute",
            enable_prefix_caching=is_cached,
            state_snapshot_distance=rng.choice([1, 2, 5]) if is_cached else 16,
            watermark=rng.choice([0.0, 0.01, 0.3]),
            max_forced_run=rng.choice([0, 2, 32]),
            async_scheduling=False,
        )
        num_blocks = -(-LIMIT // block_size) + rng.choice([0, 2, 8, 99])
        self.num_states = num_seqs + rng.choice([0, 1, 2, 4, 20])
        self.engine = scripted_engine(
            self.config,
            num_blocks,
            LIMIT,
            rng.choice([4, 40]) if swaps else 0,
            (self.num_states, rng.choice([1, 3])),
        )
        self.conversations: list[list[int]] = []
        self.expected: dict[str, list[tuple[list[int], str]]] = {}
        self.requests: dict[str, Request] = {}

    def run(self) -> None:
        rng = self.rng
        for _ in range(rng.randint(20, 60)):
            if rng.random() < 0.4:
                self.add()
            if rng.random() < 0.04 and self.engine.requests:
                self.engine.abort(rng.choice(self.engine.requests).request_id)
                seen["aborted"] += 1
            if rng.random() < 0.02:
                self.break_off()
            self.step()
        while self.engine.has_work:
            self.step()
        manager = self.engine.scheduler.manager
        assert manager.num_used == 0
        uses = manager.part(States).slots_by_use
        assert uses["running"] == 0
        assert sum(uses.values()) == self.num_states
        seen["snapshots"] += manager.stats.num_snapshots
        seen["snapshots evicted"] += manager.stats.num_snapshot_evictions
        seen["hits"] += manager.stats.num_hit_tokens > 0
        for step in self.engine.log.segments()[-1].steps:
            seen["forks"] += any(kind == "fork" for kind, *_ in step)
        seen["imported"] += manager.stats.num_imported > 0

    def add(self) -> None:
        rng, limit = self.rng, LIMIT - 2
        prompt = [4 + rng.randrange(3) for _ in range(rng.randint(1, 24))]
        if self.conversations and rng.random() < 0.8:
            past = rng.choice(self.conversations)
            is_edited = rng.random() < 0.4
            seen["edited" if is_edited else "continued"] += 1
            cut = rng.randint(0, len(past)) if is_edited else len(past)
            prompt = [*past[:cut], *prompt[:4]]
        prompt = prompt[:limit]
        params = SamplingParams(
            n=rng.choice([1, 1, 1, 2, 4]),
            max_tokens=rng.choice([1, 3, 9, 20]),
            ignore_eos=rng.random() < 0.7,
            prompt_logprobs=rng.choice([None] * 7 + [0]),
        )
        labels = {"priority": rng.randint(-1, 1)} if self.policy == "priority" else {}
        request = self.engine.add_request(prompt, params, **labels)
        self.requests[request.request_id] = request
        self.expected[request.request_id] = [
            expected_tokens(prompt, params, choice=choice, limit=LIMIT, eos=(EOS,))
            for choice in range(params.n)
        ]
        self.conversations.append([*prompt, *self.expected[request.request_id][-1][0]])

    @property
    def policy(self) -> str:
        return self.config.scheduling_policy

    def step(self) -> None:
        output = self.engine.step()
        for request_id in output.request_ids:
            for seq in self.requests[request_id].sequences:
                tokens, reason = self.expected[request_id][seq.index]
                if seq.finish_reason not in (None, "abort"):
                    assert (seq.output_ids, seq.finish_reason) == (tokens, reason)
                assert seq.output_ids == tokens[: seq.num_generated]
        seen["preempted"] += output.stats.num_preempted
        scheduler = self.engine.scheduler
        check_scheduler(scheduler)
        states = scheduler.manager.part(States).states.values()
        latest = [each.latest for each in states if each.latest]
        seen["shared snapshots"] += len(latest) > len({*latest})

    def break_off(self) -> None:
        """Raise before, within or after the moves of a step."""
        scheduler, runner = self.engine.scheduler, self.engine.runner
        plan = scheduler.schedule()
        if self.rng.random() < 0.6:
            runner.prepare(plan)
        elif self.rng.random() < 0.5:
            runner.run(plan)
        scheduler.preempt_all()
        seen["broken off"] += 1


def run(seeds):
    for seed in seeds:
        Scenario(seed).run()


def test_every_slot_has_seen_the_tokens_that_it_is_read_for():
    seen.clear()
    run(range(NUM_SCENARIOS))
    for number in range(NUM_SCENARIOS, 12 * NUM_SCENARIOS):  # a few, if they lack a rare case
        if min(seen[what] for what in OFTEN) >= 3:
            return
        run([number])
    raise AssertionError(f"too rare: {seen}")
