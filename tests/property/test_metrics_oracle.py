"""Compare all times and counts with a plain model of requests' lives.

The model reads the event log, the outputs of steps and an injected clock, and none of the numbers
that the engine keeps. The clock advances by known seconds while a step is planned and while it
runs, and by a millionth of a second each time that it is read.
"""

import random
from collections import Counter, defaultdict

import pytest
from scripted_runner import scripted_engine

from mie.config.engine import EngineConfig
from mie.config.params.sampling import SamplingParams
from mie.engine.watch.metrics import snapshot_of
from mie.engine.watch.queue import queue_of

CLOSE = 1e-3
"""Seconds that all readings of the clock in a step take together, at most."""


class Clock:
    """A clock that advances by known seconds."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 1e-6
        return self.now


class Life:
    """The life of one request."""

    def __init__(self, arrival):
        self.arrival = arrival
        self.first_step = self.first_token = self.last_token = self.finished = None
        self.counts = Counter()
        self.tokens = Counter()  # by choice
        self.was_admitted = False


class Account:
    """The lives of all requests, and the numbers of steps, from the log's records alone."""

    def __init__(self):
        self.lives = []
        self.names = {}
        self.waiting = set()  # (number, choice)
        self.rows = {}
        self.stored, self.computed = {}, Counter()  # tokens by sequence, at present and ever
        self.last_times = {}  # by sequence
        self.gaps = []
        self.reasons = defaultdict(set)

    def add(self, name, now):
        self.names[name] = len(self.lives)
        self.waiting.add((len(self.lives), 0))
        self.lives.append(Life(now))

    def abort(self, name, now):
        number = self.names[name]
        self.waiting = {seq for seq in self.waiting if seq[0] != number}
        self.lives[number].finished = now
        self.reasons[number].add("abort")

    def read(self, records, began):
        """Follow the records of a step that began at a time. Return its numbers."""
        step = Counter()
        for kind, *rest in records:
            if kind in ("admit", "resume"):
                seq, row, _, num_computed = rest[:4]
                self.begin(seq, row, num_computed)
                life = self.lives[seq[0]]
                if kind == "admit" and not life.was_admitted:
                    life.counts["num_cached_tokens"] = num_computed
                life.was_admitted = True
            elif kind == "fork":
                twin, parent, row = rest
                self.begin(twin, row, self.stored[parent])
                self.computed[twin] = self.computed[parent]
            elif kind == "wait":
                self.waiting.add(rest[0])
            elif kind == "preempt":
                seq, _, mode = rest[:3]
                self.waiting.add(seq)
                self.lives[seq[0]].counts["num_preemptions"] += 1
                self.lives[seq[0]].counts["num_swaps"] += mode == "swap"
                step["num_preempted"] += 1
            elif kind == "prefill":
                seq, start, count = rest[:3]
                assert start == self.stored[seq]
                self.compute(seq, count)
                step["num_prefill_tokens"] += count
                if self.lives[seq[0]].first_step is None:
                    self.lives[seq[0]].first_step = began
            elif kind == "decode":
                for row in rest[0]:
                    self.compute(self.rows[row], 1)
                step["num_decode_tokens"] += len(rest[0])
            elif kind == "force":
                self.lives[rest[0][0]].counts["num_forced_tokens"] += rest[1]
            elif kind == "copy":
                self.lives[rest[2][0]].counts["num_copied_blocks"] += 1
                step["num_copies"] += 1
            elif kind == "evict":
                step["num_evicted"] += 1
            elif kind in ("export", "import"):
                step[f"num_{kind}ed"] += len(rest[1])
            elif kind == "finish":
                self.waiting.discard(rest[0])
                self.reasons[rest[0][0]].add(rest[1])
        return step

    def begin(self, seq, row, num_computed):
        self.waiting.discard(seq)
        self.rows[row], self.stored[seq] = seq, num_computed
        self.computed.setdefault(seq, num_computed)

    def compute(self, seq, count):
        """Store the next tokens of a sequence. Some may have been computed before."""
        start = self.stored[seq]
        again = max(0, min(self.computed[seq], start + count) - start)
        self.lives[seq[0]].counts["num_recomputed_tokens"] += again
        self.stored[seq] = start + count
        self.computed[seq] = max(self.computed[seq], start + count)

    def get(self, name, index, num_tokens, now):
        """Take in the new tokens of a choice, which has ``num_tokens`` now."""
        number = self.names[name]
        life, seq = self.lives[number], (number, index)
        if num_tokens == life.tokens[index]:
            return
        life.tokens[index] = num_tokens
        life.first_token = now if life.first_token is None else life.first_token
        life.last_token = now
        if seq in self.last_times:
            self.gaps.append(now - self.last_times[seq])
        self.last_times[seq] = now


def between(start, end):
    return None if start is None or end is None else end - start


def scenario(rng):
    """Return the settings of an engine and the requests of a run, each with its time and fate."""
    mode = rng.choice(["recompute", "swap"])
    settings = {
        "block_size": rng.choice([2, 3, 4]),
        "max_num_seqs": rng.randint(1, 5),
        "max_num_batched_tokens": rng.randint(6, 32),
        "preemption_mode": mode,
        "enable_prefix_caching": rng.random() < 0.7,
        "async_scheduling": rng.random() < 0.3,
        "max_forced_run": rng.choice([0, 4]),
        "scheduling_policy": rng.choice(["fcfs", "fcfs", "sjf", "fair"]),
        "watermark": 0.0,
        "fair_turn": None,
    }
    if settings["async_scheduling"]:
        settings["max_forced_run"] = 0
    start = [rng.randint(4, 40) for _ in range(12)]
    requests = [
        {
            "prompt": start[: rng.randint(0, 12)]
            + [rng.randint(4, 40) for _ in range(rng.randint(1, 9))],
            "at": rng.randint(0, 12),
            "abort": rng.choice([None] * 5 + [rng.randint(1, 20)]),
            "client": rng.choice("ab") if settings["scheduling_policy"] == "fair" else None,
            "params": SamplingParams(
                n=rng.choice([1, 1, 2, 3]),
                max_tokens=rng.randint(1, 18),
                ignore_eos=rng.random() < 0.5,
            ),
        }
        for _ in range(rng.randint(2, 10))
    ]
    return settings, rng.randint(12, 24), 30 if mode == "swap" else 0, requests


def run(seed):
    """Run a scenario, compare after each step, and return (engine, account, requests, sums)."""
    rng = random.Random(seed)
    settings, num_blocks, num_host_blocks, requests = scenario(rng)
    clock, account, sums = Clock(), Account(), Counter()
    durations = {}

    def advance(name):
        durations[name] = rng.choice([0.25, 0.5, 2.0])
        clock.now += durations[name]

    engine = scripted_engine(
        EngineConfig(**settings),
        num_blocks,
        40,
        num_host_blocks,
        clock=clock,
        on_schedule=lambda: advance("schedule"),
        on_run=lambda: advance("run"),
    )
    created = clock.now
    found = {}
    step = 0
    while engine.has_work or any(each["at"] >= step for each in requests):
        for each in [each for each in requests if each["at"] == step]:
            clock.now += rng.choice([0.0, 1.0])
            request = engine.add_request(each["prompt"], each["params"], client=each["client"])
            name = each["name"] = request.request_id
            account.add(name, clock.now)
            found[name] = request
        for each in requests:
            is_due = each["abort"] is not None and each["at"] + each["abort"] == step
            if is_due and engine.request(each["name"]) is not None:
                clock.now += 1.0
                engine.abort(each["name"])
                account.abort(each["name"], clock.now)
        check_queues(engine, account, clock, found)
        step += 1
        if not engine.has_work:
            continue
        number, began = engine.stats.num_steps, clock.now
        unfinished = {name for name in found if engine.request(name) is not None}
        output = engine.step()
        [records] = engine.log.since(number)
        numbers = account.read(records[:-1], began)
        for name in output.request_ids:
            for seq in found[name].sequences:
                account.get(name, seq.index, seq.num_generated, clock.now)
        ended = [name for name in unfinished if engine.request(name) is None]
        for name in ended:
            account.lives[account.names[name]].finished = clock.now
        stats = vars(output.stats)
        for name in (*numbers, "num_preempted", "num_prefill_tokens", "num_decode_tokens"):
            assert stats[name] == numbers[name], name
        assert stats["num_finished"] == len(ended)
        assert stats["num_waiting"] == len(account.waiting)
        assert stats["start"] == pytest.approx(began - created, abs=CLOSE)
        for name in ("schedule", "run"):
            assert stats[f"{name}_seconds"] == pytest.approx(durations[name], abs=CLOSE)
            sums[name] += durations[name]
        assert stats["update_seconds"] == pytest.approx(0, abs=CLOSE)
        assert stats["seconds"] == pytest.approx(sum(durations.values()), abs=CLOSE)
        sums["tokens"] += numbers["num_prefill_tokens"] + numbers["num_decode_tokens"]
        check_queues(engine, account, clock, found)
        assert step < 2000
    return engine, account, found, sums


def check_queues(engine, account, clock, found):
    """Compare the waiting requests of each client."""
    requests = list(found.values())
    for client in {each.client for each in requests} | {None}:
        waiting = [seq for seq in account.waiting if requests[seq[0]].client == client]
        queue = queue_of(engine, client)
        assert queue.num_requests == len(waiting)
        arrivals = [account.lives[number].arrival for number, _ in waiting]
        longest = clock.now - min(arrivals) if arrivals else 0.0
        assert queue.longest_wait == pytest.approx(longest, abs=CLOSE)
        tokens = [
            len(requests[number].token_ids) + account.lives[number].tokens[choice]
            for number, choice in waiting
        ]
        assert queue.num_tokens == sum(tokens)
        num_running = len({*account.rows.values()} & running_of(engine))
        assert queue.num_free_seats == engine.config.max_num_seqs - num_running


def running_of(engine):
    return {seq.seq_id for seq in engine.scheduler.running}


NAMES = {
    "first_step_time": "first_step",
    "first_token_time": "first_token",
    "last_token_time": "last_token",
    "finished_time": "finished",
}
COUNTS = (
    *("num_preemptions", "num_swaps", "num_cached_tokens", "num_forced_tokens"),
    *("num_copied_blocks", "num_recomputed_tokens"),
)


def check_lives(account, found):
    """Compare the metrics of each request."""
    for life, request in zip(account.lives, found.values(), strict=True):
        metrics = request.metrics
        assert metrics.arrival_time == pytest.approx(life.arrival, abs=CLOSE)
        for name, own in NAMES.items():
            wanted = getattr(life, own)
            found_time = getattr(metrics, name)
            assert (found_time is None) == (wanted is None), name
            assert wanted is None or found_time == pytest.approx(wanted, abs=CLOSE), name
        durations = {
            "queue_time": (life.arrival, life.first_step),
            "prefill_time": (life.first_step, life.first_token),
            "decode_time": (life.first_token, life.last_token),
            "time_to_first_token": (life.arrival, life.first_token),
            "total_time": (life.arrival, life.last_token),
        }
        for name, ends in durations.items():
            wanted = between(*ends)
            assert getattr(metrics, name) == (wanted and pytest.approx(wanted, abs=CLOSE)), name
        reasons = account.reasons[request.number]
        for name in COUNTS:
            # The tokens that an aborted request would have computed again are counted ahead.
            if name != "num_recomputed_tokens" or "abort" not in reasons:
                assert getattr(metrics, name) == life.counts[name], name


def check_totals(engine, account, found, sums):
    """Compare the counters and the sums of histograms."""
    metrics = defaultdict(list)
    for metric in snapshot_of(engine).read("model"):
        metrics[metric.name].append(metric)
    lives = account.lives

    def check(name, values):
        [histogram] = metrics[name]
        values = [value for value in values if value is not None]
        assert histogram.count == len(values), name
        assert histogram.sum == pytest.approx(sum(values), abs=CLOSE * (1 + len(values))), name

    check("vllm:request_queue_time_seconds", [between(e.arrival, e.first_step) for e in lives])
    check(
        "vllm:request_prefill_time_seconds", [between(e.first_step, e.first_token) for e in lives]
    )
    check("vllm:request_decode_time_seconds", [between(e.first_token, e.last_token) for e in lives])
    check("vllm:e2e_request_latency_seconds", [between(e.arrival, e.last_token) for e in lives])
    check("mie:request_latency_seconds", [between(e.arrival, e.last_token) for e in lives])
    check("vllm:time_to_first_token_seconds", [between(e.arrival, e.first_token) for e in lives])
    check(
        "vllm:request_inference_time_seconds", [between(e.first_step, e.last_token) for e in lives]
    )
    check(
        "vllm:request_time_per_output_token_seconds",
        [
            (e.last_token - e.first_token) / (max(e.tokens.values()) - 1)
            for e in lives
            if e.tokens and max(e.tokens.values()) > 1
        ],
    )
    check("vllm:inter_token_latency_seconds", account.gaps)
    check("vllm:request_num_preemptions", [e.counts["num_preemptions"] for e in lives])
    check("vllm:request_generation_tokens", [sum(e.tokens.values()) for e in lives])
    check(
        "vllm:request_max_num_generation_tokens", [max(e.tokens.values(), default=0) for e in lives]
    )
    check("vllm:request_prompt_tokens", [len(r.token_ids) for r in found.values()])
    [tokens] = metrics["vllm:iteration_tokens_total"]
    assert tokens.sum == sums["tokens"]
    for metric in metrics["mie:step_seconds"]:
        wanted = sums[metric.labels["phase"]]
        assert metric.sum == pytest.approx(wanted, abs=CLOSE * metric.count)
    order = ("error", "abort", "length", "stop")
    ended = Counter(
        next(reason for reason in order if reason in account.reasons[number])
        for number in range(len(lives))
    )
    found_ends = {m.labels["finished_reason"]: m.value for m in metrics["vllm:request_success"]}
    assert found_ends == {reason: ended[reason] for reason in order}
    for name, key in {
        "vllm:num_preemptions": "num_preemptions",
        "mie:cow_copies": "num_copied_blocks",
        "mie:tokens_forced": "num_forced_tokens",
    }.items():
        assert metrics[name][0].value == sum(e.counts[key] for e in lives), name
    assert metrics["vllm:generation_tokens"][0].value == sum(sum(e.tokens.values()) for e in lives)


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_times_and_counts_are_those_of_a_plain_model(first: int) -> None:
    for seed in range(first, first + 10):
        engine, account, found, sums = run(seed)
        check_lives(account, found)
        check_totals(engine, account, found, sums)


@pytest.mark.slow
def test_times_and_counts_are_those_of_a_plain_model_in_a_thousand_runs() -> None:
    for seed in range(60, 1060):
        engine, account, found, sums = run(seed)
        check_lives(account, found)
        check_totals(engine, account, found, sums)


def test_the_runs_have_what_they_are_about() -> None:
    """Preemptions, swaps, copies, hits, forced tokens, aborts, and choices that wait."""
    counts, wanted = Counter(), (*COUNTS, "aborts")
    for seed in range(400):
        _, account, _, _ = run(seed)
        for life in account.lives:
            counts += life.counts
        counts["aborts"] += sum("abort" in reasons for reasons in account.reasons.values())
        if seed >= 39 and min(counts[name] for name in wanted) > 5:
            return
    raise AssertionError(f"too rare: {counts}")
