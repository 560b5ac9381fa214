"""Check a scheduler by the batches that it makes: exercises 5 and 9."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mie.learn.checks.blocks import check_tokens
from mie.learn.probe import Broken, Probe, audit, text_of

MAX_STEPS = 120

Key = Callable[[Any], Any]


class Driver:
    """Runs an engine of a learner on a probe, and checks each batch before it is computed."""

    def __init__(
        self, engine_class: Any, pool: Any, probe: Probe, budget: int, is_shared: bool = False
    ) -> None:
        class Watched(engine_class):  # type: ignore[misc]  # a learner's class
            def schedule(self) -> Any:
                batch = super().schedule()
                driver.see(batch)
                return batch

        driver = self
        self.probe, self.pool, self.is_shared = probe, pool, is_shared
        self.engine = Watched(probe, pool, budget)
        self.seqs: list[Any] = []
        self.arrivals: dict[str, int] = {}
        """The number of steps before each arrival."""
        self.key: Key = lambda seq: self.seqs.index(seq)
        """The order of the sequences: the smallest is served first."""
        self.has_policy = False
        """Whether the order is not that of arrival."""
        self.num_steps = 0
        self._running: list[Any] = []
        self._waiting: list[Any] = []
        self._texts: dict[str, list[int]] = {}

    def add(self, seq: Any) -> None:
        """Let a sequence arrive."""
        self.seqs.append(seq)
        self.arrivals[seq.name] = self.num_steps
        self.engine.add(seq)

    def run(self, arrivals: Mapping[int, Sequence[Any]]) -> None:
        """Run until all sequences are done. ``arrivals`` has those that arrive before a step."""
        last = max(arrivals, default=0)
        while self.num_steps <= last or self.engine.waiting or self.engine.running:
            for seq in arrivals.get(self.num_steps, ()):
                self.add(seq)
            if self.num_steps > MAX_STEPS:
                raise Broken(
                    "no end",
                    f"After {MAX_STEPS} steps {self._names(self.engine.waiting)} still waits.",
                    "The oldest sequence is never preempted, so it makes progress until it is "
                    "done.",
                )
            self.step()
        audit(self.pool, self.seqs, self.is_shared)

    def step(self) -> Any:
        """Compute one batch, and check the tokens."""
        self._running, self._waiting = list(self.engine.running), list(self.engine.waiting)
        self._texts = {seq.name: list(seq.tokens) for seq in self.seqs}
        batch = self.engine.step()
        self.num_steps += 1
        check_tokens(self.probe.texts, self.seqs)
        return batch

    @staticmethod
    def _names(seqs: Sequence[Any]) -> str:
        return ", ".join(seq.name for seq in seqs)

    @property
    def _now(self) -> str:
        return f"In step {self.num_steps + 1}"

    def see(self, batch: Any) -> None:
        """Check a batch, and the queues after it was made.

        Raises:
            Broken: a rule of the scheduler is broken.
        """
        if not isinstance(batch, list) or not all(
            isinstance(each, tuple) and len(each) == 2 for each in batch
        ):
            raise Broken(
                "shape of the batch",
                f"{self._now}, schedule returned {type(batch).__name__}: {str(batch)[:60]}.",
                "It returns a list of (sequence, count).",
            )
        shown = ", ".join(f"({seq.name}, {count})" for seq, count in batch)
        if not batch and (self._running or self._waiting):
            raise Broken(
                "no progress",
                f"{self._now} the batch is empty, although "
                f"{self._names([*self._running, *self._waiting])} could compute.",
                "A step always computes something while a sequence is not done.",
            )
        total = sum(count for _, count in batch)
        if total > self.engine.budget:
            raise Broken(
                "budget exceeded",
                f"{self._now} the batch [{shown}] has {total} tokens, with a budget of "
                f"{self.engine.budget}.",
                "The counts of a step are at most the budget together: subtract each count, and "
                "cut the next one.",
            )
        self._see_queues()
        self._see_preempted(batch)
        audit(self.pool, self.seqs, self.is_shared)
        self._see_counts(batch, shown, total)
        self._see_admissions(batch, total)

    def _see_queues(self) -> None:
        running, waiting = self.engine.running, self.engine.waiting
        for seq in self.seqs:
            places = running.count(seq) + waiting.count(seq)
            if places > 1:
                raise Broken(
                    "in two queues",
                    f"{self._now} {seq.name} is {running.count(seq)} times in running and "
                    f"{waiting.count(seq)} times in waiting.",
                    "A sequence waits or runs. Who moves to one list leaves the other.",
                )
            if seq in [*self._running, *self._waiting] and not places:
                raise Broken(
                    "sequence lost",
                    f"{self._now} {seq.name} is neither running nor waiting, and not done.",
                    "A victim goes to the head of the waiting queue, and an admitted sequence to "
                    "the running ones.",
                )
            if seq.tokens != self._texts[seq.name]:
                raise Broken(
                    "tokens lost",
                    f"{self._now} schedule has changed the tokens of {seq.name}.",
                    "A victim keeps its tokens, those that were generated too. Only the keys are "
                    "computed again.",
                )
            if seq in waiting and seq.table:
                raise Broken(
                    "victim keeps blocks",
                    f"{self._now} {seq.name} waits, and still has the blocks {seq.table}.",
                    "A victim gives all its blocks back, and others take them.",
                )

    def _see_preempted(self, batch: Any) -> None:
        running, waiting = self.engine.running, self.engine.waiting
        victims = [seq for seq in self._running if seq not in running]
        stayed = [seq for seq in self._running if seq in running]
        computing = [seq for seq, _ in batch]
        new = [seq for seq in running if seq not in self._running]
        for victim in victims:
            older = [seq for seq in stayed if self.key(seq) > self.key(victim)]
            if older:
                raise Broken(
                    "wrong victim",
                    f"{self._now} {victim.name} was preempted, and {older[0].name} stayed.",
                    "Preempt the youngest first (with a policy: the largest rank). Then the oldest "
                    "is never preempted, and every sequence finishes.",
                )
        for victim in victims:
            if victim in computing:
                raise Broken(
                    "victim computes",
                    f"{self._now} {victim.name} was preempted, and the batch computes it.",
                    "A sequence that was preempted has no blocks, and computes nothing in the "
                    "step.",
                )
        if victims and new:
            raise Broken(
                "admits after a preemption",
                f"{self._now} {victims[0].name} was preempted, and {new[0].name} was admitted.",
                "A step that preempts admits none. Otherwise a newcomer takes the blocks that were "
                "just made free.",
            )
        # A policy may sort its queue later: then victims stand at the head until the next step.
        queue = [seq for seq in waiting if seq not in victims]
        heads = waiting[: len(victims)]
        if sorted(queue, key=self.key) != queue or any(v not in heads for v in victims):
            seen = f"{self._now} the queue is {self._names(waiting)}."
            if self.has_policy:
                raise Broken(
                    "queue not sorted",
                    f"{seen} By rank it is {self._names(sorted(waiting, key=self.key))}.",
                    "Before each step, sort waiting and running by rank. An arrival goes to the "
                    "end, "
                    "and a victim to the head, and neither must stay there.",
                )
            raise Broken(
                "order of the queue",
                seen,
                "A victim goes to the head of the queue, because it is older than all that wait "
                "there.",
            )

    def _see_counts(self, batch: Any, shown: str, total: int) -> None:
        counts = {seq.name: count for seq, count in batch}
        for seq, count in batch:
            missing = len(seq.tokens) - seq.num_computed
            if not 1 <= count <= missing or len([x for x, _ in batch if x is seq]) > 1:
                raise Broken(
                    "count of a sequence",
                    f"{self._now} the batch is [{shown}], and {seq.name} misses {missing} tokens.",
                    "A sequence is in the batch once, with 1 to len(tokens) - num_computed tokens.",
                )
            if len(seq.table) * self.pool.block_size < seq.num_computed + count:
                raise Broken(
                    "no room for the tokens",
                    f"{self._now} {seq.name} computes {count} tokens after {seq.num_computed}, and "
                    f"its table has {len(seq.table)} blocks of {self.pool.block_size}.",
                    "make_room or admit finds blocks before a sequence joins the batch.",
                )
        new = [seq for seq, _ in batch if seq not in self._running]
        for seq in self._running:
            if seq not in self.engine.running:
                continue
            left = len(seq.tokens) - seq.num_computed - counts.get(seq.name, 0)
            if left and new:
                raise Broken(
                    "newcomers first",
                    f"{self._now} {new[0].name} was admitted, and the running {seq.name} got "
                    f"{counts.get(seq.name, 0)} of its {left + counts.get(seq.name, 0)} tokens.",
                    "Running sequences come first. Newcomers get the rest of the budget.",
                )
            if left and total < self.engine.budget:
                raise Broken(
                    "running sequence skipped",
                    f"{self._now} {seq.name} got {counts.get(seq.name, 0)} tokens, misses {left} "
                    f"more, and {self.engine.budget - total} tokens of the budget are left.",
                    "Each running sequence computes all tokens that it misses, while there is "
                    "budget.",
                )

    def _see_admissions(self, batch: Any, total: int) -> None:
        new = [seq for seq in self.engine.running if seq not in self._running]
        order = sorted(self._waiting, key=self.key)
        if new != order[: len(new)]:
            raise Broken(
                "overtaken",
                f"{self._now} schedule admitted {self._names(new)}, and the queue was "
                f"{self._names(order)}.",
                "The head of the queue is admitted first. If it does not fit, nobody is admitted.",
            )
        for seq in new:
            if len(seq.table) * self.pool.block_size < len(seq.tokens):
                raise Broken(
                    "admitted without blocks",
                    f"{self._now} {seq.name} was admitted with {len(seq.table)} blocks for "
                    f"{len(seq.tokens)} tokens.",
                    "self.admit(seq) reserves blocks for all tokens, so that a prompt, once "
                    "started, never stops for lack of memory.",
                )
        preempts = any(seq not in self.engine.running for seq in self._running)
        if order[len(new) :] and not preempts and total < self.engine.budget and not self.is_shared:
            head = order[len(new)]
            if -(-len(head.tokens) // self.pool.block_size) <= len(self.pool.free):
                raise Broken(
                    "not admitted",
                    f"{self._now} {head.name} waits, although {len(self.pool.free)} blocks are "
                    f"free "
                    f"and {self.engine.budget - total} tokens of the budget are left.",
                    "Sequences are admitted while there are budget and blocks.",
                )


def sequences(sequence_class: Any, **lengths: tuple[int, int]) -> dict[str, Any]:
    """Return sequences by name. A length is that of the prompt and of the answer."""
    return {
        name: sequence_class(name, text_of(name, prompt), count)
        for name, (prompt, count) in lengths.items()
    }


def check_5(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check `schedule` and `make_room` of step 5."""
    texts = {name: text_of(name, 30) for name in "ABCD"}
    for num_blocks, budget, lengths, times in (
        (20, 6, {"A": (8, 4), "B": (7, 3), "C": (5, 3)}, "000"),
        (8, 12, {"A": (8, 9), "B": (6, 9), "C": (6, 9)}, "000"),
        (6, 16, {"A": (7, 10), "B": (6, 8), "C": (3, 6), "D": (2, 3)}, "0134"),
    ):
        seqs = sequences(solutions[3].Sequence, **lengths)
        pool = solutions[3].Pool(probe := Probe(texts), num_blocks, 4)
        driver = Driver(step.Engine, pool, probe, budget)
        arrivals: dict[int, list[Any]] = {}
        for time, seq in zip(times, seqs.values(), strict=True):
            arrivals.setdefault(int(time), []).append(seq)
        driver.run(arrivals)
    _admission(step, solutions)


def _admission(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check batches that step 6 can have: forks exceed the budget, and prefixes are known."""
    for num_blocks, budget in [(8, 1), (3, 20), (8, 20)]:
        probe = Probe({})
        pool = solutions[3].Pool(probe, num_blocks, 4)
        engine = step.Engine(probe, pool, budget)
        seqs = sequences(solutions[3].Sequence, A=(5, 9), B=(9, 9), C=(9, 9))
        a, b, c = seqs.values()
        a.table, a.num_computed, b.table, b.num_computed = [pool.take()], 4, [], 8
        b.table = [pool.take(), pool.take()]
        engine.running, engine.waiting = [a, b], [c]

        def admit(seq: Any) -> bool:
            seq.num_computed = 4
            return True

        engine.admit = admit
        counts = {seq.name: count for seq, count in engine.schedule()}
        if budget == 1 and counts != {"A": 1}:
            raise Broken(
                "count of a sequence",
                f"A and B run with a budget of 1, and the counts are {counts}.",
                "A sequence in the batch computes at least one token. Leave it out if the budget "
                "is "
                "spent.",
            )
        if num_blocks == 3 and len(engine.running) > 1:
            raise Broken(
                "admits after a preemption",
                "With a known prefix that needs no blocks, schedule preempted B and admitted "
                f"{engine.running[1].name}.",
                "A step that preempts admits none. Otherwise a newcomer takes the blocks that were "
                "just made free.",
            )
        if (num_blocks, budget) == (8, 20) and counts.get("C") != 5:
            raise Broken(
                "count of a sequence",
                "4 of 9 tokens of C were computed when it was admitted, and it got the count "
                f"{counts.get('C')}.",
                "A newcomer computes the tokens that it misses: len(tokens) - num_computed.",
            )


def check_9(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check the policy of step 9."""
    texts = {name: text_of(name, 30) for name in "ABCDEFGH"}

    def engine(ageing: int) -> Any:
        return step.ShortestFirst(Probe(texts), solutions[3].Pool(Probe(texts), 6, 4), 16, ageing)

    _rank(engine)
    _added(engine(2), sequences(solutions[3].Sequence, A=(7, 10))["A"])
    for ageing, num_blocks in [(1, 6), (3, 5)]:
        pool = solutions[3].Pool(probe := Probe(texts), num_blocks, 4)

        class Aged(step.ShortestFirst):  # type: ignore[misc]
            def __init__(self, model: Any, pool: Any, budget: int, ageing: int = ageing) -> None:
                super().__init__(model, pool, budget, ageing)

        driver = Driver(Aged, pool, probe, 16)
        driver.has_policy = True
        driver.key = partial(_aged, driver, ageing)
        seqs = sequences(
            solutions[3].Sequence, A=(7, 10), B=(6, 4), C=(5, 3), D=(3, 3), E=(3, 8), F=(2, 2)
        )
        a, b, c, d, e, f = seqs.values()
        driver.run({0: [a, b], 2: [c], 4: [d, e], 7: [f]})
        for seq in driver.seqs:
            noted, right = driver.engine.ranks.get(seq.name), driver.key(seq)[0]
            if noted != right:
                raise Broken(
                    "rank changed",
                    f"The rank of {seq.name} is {noted} in the end, and was {right} at arrival.",
                    "A rank is fixed when the sequence arrives: its whole job, and the number of "
                    "steps before.",
                )


def _aged(driver: Driver, ageing: int, seq: Any) -> tuple[int, int]:
    """Return the rank of a sequence, and its place among equal ranks."""
    return seq.max_tokens + ageing * driver.arrivals[seq.name], driver.seqs.index(seq)


def _added(engine: Any, seq: Any) -> None:
    engine.num_steps = 3
    engine.add(seq)
    if seq not in engine.waiting:
        raise Broken(
            "sequence lost",
            "After add, the sequence does not wait.",
            "super().add(seq) appends it to the queue.",
        )
    noted = engine.ranks.get(seq.name)
    if noted != seq.max_tokens + 6:
        raise Broken(
            "rank at arrival",
            f"7 tokens of a prompt and 10 of an answer arrived after 3 steps, with ageing 2: the "
            f"rank is {noted}; {seq.max_tokens + 6} is right.",
            "self.ranks[seq.name] is the rank of the whole job, seq.max_tokens, and of the number "
            "of steps so far.",
        )


def _rank(engine: Callable[[int], Any]) -> None:
    short, long = engine(2).rank(5, 3), engine(2).rank(9, 3)
    if short is None or short >= long:
        raise Broken(
            "longest job first",
            f"rank(5, 3) is {short}, and rank(9, 3) is {long}.",
            "The smallest rank is served first, so a shorter job has a smaller rank.",
        )
    early, late = engine(2).rank(5, 0), engine(2).rank(5, 10)
    if late <= early:
        raise Broken(
            "no ageing" if late == early else "ageing backwards",
            f"With ageing 2, rank(5, 0) is {early}, and rank(5, 10) is {late}.",
            "A later arrival gets a larger rank. Otherwise short jobs that keep arriving let a "
            "long one wait for ever.",
        )
    if late - early != 20 or long - short != 4:
        raise Broken(
            "amount of ageing",
            f"With ageing 2, 10 steps change the rank by {late - early}, and 4 tokens by "
            f"{long - short}.",
            "rank = job + ageing * arrival: with each step, a waiting job becomes ``ageing`` "
            "tokens "
            "shorter.",
        )
