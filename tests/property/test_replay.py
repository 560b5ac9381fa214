"""Check that a replayed event log gives the exact queues and blocks after every step.

The scheduler is the real one, under random settings and requests, and the model answers at once.
Replaying shares no code with it.
"""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import cycle

from audit import check_scheduler
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rare import check_until_seen
from scripted_runner import answer_to

from mie.config.engine import POLICIES, EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.watch.snapshot import scheduler_snapshot
from mie.events import FIELDS, SUMMARY_FIELDS, EventLog, read_log
from mie.events.replay import State, at
from mie.load.engine import new_scheduler
from mie.memory.layers.window import Window
from mie.sched.sequence import Request

MAX_MODEL_LEN, EOS = 24, 1

seen: Counter[str] = Counter()


@st.composite
def configs(draw):
    swaps = draw(st.sampled_from([True, True, False]))
    chunked = draw(st.booleans())
    caches = draw(st.booleans())
    policy = draw(st.sampled_from([*POLICIES, "fair"]))
    return EngineConfig(
        block_size=draw(st.integers(1, 4)),
        max_num_seqs=draw(st.sampled_from([3, 4, 5, 2, 1])),
        max_num_batched_tokens=draw(st.sampled_from([1, 3, 8])) if chunked else MAX_MODEL_LEN,
        max_prefill_chunk=draw(st.sampled_from([None, 2])) if chunked else None,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caches,
        partial_block_sharing=draw(st.booleans()),
        max_cached_blocks=draw(st.sampled_from([None, 1, 4])) if caches else None,
        scheduling_policy=policy,
        fair_turn=draw(st.sampled_from([1, 3])) if policy == "fair" else None,
        batching=draw(st.sampled_from(["continuous", "continuous", "static"])),
        watermark=draw(st.sampled_from([0.0, 0.1])),
        preemption_mode="swap" if swaps else "recompute",
        async_scheduling=draw(st.booleans()),
    )


@st.composite
def requests(draw):
    """Draw (arrival step, prompt, max_tokens, n, priority, salt) with few different tokens."""
    return [
        (
            draw(st.integers(0, 8)),
            draw(st.lists(st.integers(0, 1), min_size=1, max_size=10)),
            draw(st.integers(1, 8)),
            draw(st.sampled_from([1, 1, 2, 1, 4])),
            draw(st.integers(-1, 1)),
            draw(st.sampled_from([None, None, "tenant"])),
        )
        for _ in range(draw(st.integers(1, 6)))
    ]


class Run:
    """A scheduler and its log. `step` returns the records of one step and the state after it."""

    def __init__(self, config, num_blocks, num_host_blocks, file, window=None):
        self.config = config
        self.log = EventLog(1 << 20, file)
        swaps = config.preemption_mode == "swap"
        # Half of the runs without windows have states.
        num_states = (config.max_num_seqs + num_blocks % 4, 1 if swaps else 0)
        self.scheduler = new_scheduler(
            config,
            num_blocks,
            MAX_MODEL_LEN,
            self.log,
            num_host_blocks=num_host_blocks if swaps else 0,
            num_states=num_states if num_blocks % 2 and window is None else (0, 0),
            window=window,
        )
        self.requests = []

    def add(self, prompt, max_tokens, n, priority, salt):
        number = len(self.requests)
        params = SamplingParams(max_tokens=max_tokens, n=n)
        if self.config.scheduling_policy != "priority":
            priority = 0
        is_fair = self.config.scheduling_policy == "fair"
        client = (salt, "a", "b")[number % 3] if is_fair else None
        labels = {"priority": priority, "cache_salt": salt, "client": client}
        self.requests.append(
            Request(str(number), prompt, params, **labels, number=number, eos_token_ids=[EOS])
        )
        self.scheduler.add(self.requests[-1])

    def forced(self, plan, result):
        """Return tokens that must follow those of some decodes."""
        rows = zip(plan.decodes, result.token_ids, strict=True)
        seqs = {row: self.scheduler.by_row[row] for row, token in rows if token == 2}
        left = {row: seq.max_tokens - seq.num_tokens - 1 for row, seq in seqs.items()}
        return {row: (0, 2)[:count] for row, count in left.items() if count > 0 == plan.step % 5}

    def step(self, number, draw_token, breaks):
        plan = self.scheduler.schedule()
        if breaks and number % 4:
            self.scheduler.preempt_all()
        elif breaks:
            self.scheduler.rebuild(self.requests)
            self.log.rebuilt()
        else:
            result = answer_to(plan, draw_token)
            self.scheduler.update(plan, replace(result, forced=self.forced(plan, result)))
        check_scheduler(self.scheduler)
        self.log.end_step({**dict.fromkeys(SUMMARY_FIELDS, 0), "step": number})
        return self.log.segments()[-1].steps[-1]

    def drive(self, arrivals, tokens, aborted, broken):
        """Yield the records of each step, until all requests have ended.

        ``aborted`` maps steps to requests.
        """
        waiting, number, answers = list(arrivals), 0, cycle([*tokens[1:], tokens[0]])
        while waiting or self.scheduler.running or self.scheduler.waiting:
            for arrival in [each for each in waiting if each[0] <= number]:
                waiting.remove(arrival)
                prompt, max_tokens, n, *labels = arrival[1:]
                self.add(prompt, max_tokens, n, *labels)
            victim = aborted.get(number)
            if victim is not None and victim < len(self.requests):
                # Prefer a swapped-out sequence, which is rare.
                swapped = [seq.request for seq in self.scheduler.waiting if seq.host]
                self.scheduler.abort([*swapped, self.requests[victim]][0])
            number += 1
            yield self.step(number, partial(next, answers), number in broken)
            assert number < 1000


def runs(last_abort, most_aborts):
    """Draw the settings, the requests and the accidents of a run, as keywords."""
    return {
        "config": configs(),
        "arrivals": requests(),
        "spare": st.integers(0, 5),
        "num_host_blocks": st.integers(1, 9),
        "tokens": st.lists(st.sampled_from([0, 2, 2, 2, EOS]), min_size=1, max_size=7),
        "aborted": st.dictionaries(
            st.integers(0, last_abort), st.integers(0, 5), max_size=most_aborts
        ),
        "broken": st.sets(st.integers(3, 30), max_size=1),
        "window": st.none() | st.tuples(st.integers(1, 6), st.integers(1, 2)),
    }


def new_run(file, config, arrivals, spare, num_host_blocks, window):
    """Return a run whose pool is not much larger than its longest prompt."""
    longest = max(len(prompt) for _, prompt, *_ in arrivals)
    num_blocks = -(-longest // config.block_size)
    if window:
        size, num_groups = window
        window = Window(
            size=size,
            num_groups=num_groups,
            block_size=config.block_size,
            max_chunk=max(3, config.max_num_batched_tokens),
        )
        num_blocks = window.blocks_needed(longest)
    return Run(config, num_blocks + spare, num_host_blocks, file, window)


SWAPPED_AND_ABORTED = {
    "config": EngineConfig(
        block_size=1,
        max_num_seqs=3,
        max_num_batched_tokens=8,
        preemption_mode="swap",
        watermark=0.0,
        async_scheduling=False,
    ),
    "arrivals": [(0, [0, 1, 0], 8, 1, 0, None)] * 5,
    "spare": 6,
    "num_host_blocks": 9,
    "tokens": [0],
    "aborted": {7: 0, 12: 0},
    "broken": (),
    "window": None,
}
"""A run that aborts sequences with states while they are swapped out, which is rare."""


ELSEWHERE = {"verify", "trim", "revert", "read", "depart"}
"""Kinds of whole engines: test_speculation_equals_none.py and test_disk_cache.py replay them."""


@given(**runs(24, 8))
@example(**SWAPPED_AND_ABORTED)
@settings(max_examples=max(60, settings().max_examples))
def check_run(path, config, arrivals, spare, num_host_blocks, window, **accidents):
    with path.open("w") as file:
        run = new_run(file, config, arrivals, spare, num_host_blocks, window)
        state, snapshots = State.from_snapshot(scheduler_snapshot(run.scheduler)), []
        for records in run.drive(arrivals, **accidents):
            seen.update(kind for kind, *_ in records)
            state.apply_step(records)
            snapshots.append(scheduler_snapshot(run.scheduler))
            assert state.snapshot() == snapshots[-1]
        run.log.close()
    segments = list(read_log(path))
    for step in {1, len(snapshots) // 2 + 1, len(snapshots)} - {len(snapshots) + 1}:
        assert at(segments, step).snapshot() == snapshots[step - 1]
        assert at(run.log.segments(), step).snapshot() == snapshots[step - 1]


def test_a_replayed_log_gives_the_states_of_the_run(tmp_path):
    path = tmp_path / "trace.jsonl"
    wanted = dict.fromkeys(FIELDS.keys() - ELSEWHERE, 2)
    check_until_seen(lambda check: check(path), check_run, seen, wanted)
