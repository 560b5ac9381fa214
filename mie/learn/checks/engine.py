"""Check a scheduler by the batches that it makes: exercises 5 and 9."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

from mie.base.reprs import count
from mie.learn.checks.blocks import check_tokens
from mie.learn.probe import Broken, Probe, audit, counted, text_of

MAX_STEPS = 120

Key = Callable[[Any], tuple[int, ...]]


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

            def make_room(self, seq: Any, count: int) -> Any:
                return driver.see_room(seq, count, super().make_room)

        driver = self
        self.probe, self.pool, self.is_shared = probe, pool, is_shared
        self.engine = Watched(probe, pool, budget)
        self.seqs: list[Any] = []
        self.arrivals: dict[str, int] = {}
        """The number of steps before each arrival."""
        self.key: Key = lambda seq: (self.seqs.index(seq),)
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
                seen = f"After {MAX_STEPS} steps {self._names(self.engine.waiting)} still waits."
                raise Broken("waits for ever", seen)
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

    def _broken(self, rule: str, seen: str) -> Broken:
        return Broken(rule, f"In step {self.num_steps + 1} {seen}")

    def see_room(self, seq: Any, num: int, make_room: Callable[[Any, int], Any]) -> Any:
        """Return the result of make_room, and check it.

        Raises:
            Broken: the result is not whether the sequence has its blocks, or the sequence was
                preempted earlier in this step.
        """
        was_running = seq in self.engine.running
        if seq in self._running and not was_running:
            seen = f"{seq.name} was preempted, and schedule calls make_room for it all the same."
            raise self._broken("victim computes", seen)
        result = make_room(seq, num)
        is_running, end = seq in self.engine.running, seq.num_computed + num
        if result is None:
            seen = f"make_room for {seq.name} returned None."
            raise self._broken("make_room returns nothing", seen)
        seen = f"make_room for {seq.name} returned {bool(result)}"
        if result and was_running and not is_running:
            raise self._broken("result of make_room", f"{seen}, and preempted {seq.name} itself.")
        if result and not self.is_shared and len(seq.table) * self.pool.block_size < end:
            seen += f", and {end} tokens need more than {count(len(seq.table), 'block')} of "
            raise self._broken("result of make_room", f"{seen}{self.pool.block_size} tokens.")
        if not result and is_running and seq not in self.engine.waiting:
            seen += f", and {seq.name} still runs: it was not preempted."
            raise self._broken("result of make_room", seen)
        return result

    def see(self, batch: Any) -> None:
        """Check a batch, and the queues after it was made.

        Raises:
            Broken: a rule of the scheduler is broken.
        """
        if not isinstance(batch, list) or not all(
            isinstance(each, tuple) and len(each) == 2 for each in batch
        ):
            raise self._broken("shape of the batch", f"schedule returned {str(batch)[:60]}.")
        shown = ", ".join(f"({seq.name}, {num})" for seq, num in batch)
        for seq in self.seqs if self.has_policy else ():
            noted, right = self.engine.ranks.get(seq.name), self.key(seq)[0]
            if noted != right:
                seen = f"the rank of {seq.name} is {noted}, and was {right} at arrival."
                raise self._broken("rank changed", seen)
        if not batch and (self._running or self._waiting):
            seen = "the batch is empty, although "
            seen += f"{self._names([*self._running, *self._waiting])} could compute."
            raise self._broken("no progress", seen)
        total = sum(num for _, num in batch)
        if total > self.engine.budget:
            seen = f"the batch [{shown}] has {total} tokens, with a budget of {self.engine.budget}."
            raise self._broken("budget exceeded", seen)
        self._see_queues(batch)
        self._see_preempted(batch)
        audit(self.pool, self.seqs, self.is_shared)
        self._see_counts(batch, shown, total)
        self._see_admissions(batch, total)

    def _see_queues(self, batch: Any) -> None:
        running, waiting = self.engine.running, self.engine.waiting
        for seq in self.seqs:
            places = running.count(seq) + waiting.count(seq)
            if places > 1:
                names = ["running"] * running.count(seq) + ["waiting"] * waiting.count(seq)
                seen = f"{seq.name} is in {places} places: {', '.join(names)}."
                raise self._broken("in two queues", seen)
            if seq in [*self._running, *self._waiting] and not places:
                seen = f"{seq.name} is neither running nor waiting, and not done."
                raise self._broken("sequence lost", seen)
            if seq.tokens != self._texts[seq.name]:
                raise self._broken("tokens lost", f"schedule has changed the tokens of {seq.name}.")
            if seq in waiting and seq.table:
                seen = f"{seq.name} waits, and still has the blocks {seq.table}"
                if seq in [each for each, _ in batch]:
                    raise self._broken("victim computes", f"{seen}, and the batch computes it.")
                raise self._broken("victim keeps blocks", f"{seen}.")

    def _see_preempted(self, batch: Any) -> None:
        running, waiting = self.engine.running, self.engine.waiting
        victims = [seq for seq in self._running if seq not in running]
        stayed = [seq for seq in self._running if seq in running]
        new = [seq for seq in running if seq not in self._running]
        for victim in victims:
            older = [seq for seq in stayed if self.key(seq) > self.key(victim)]
            if older:
                two = (victim, older[0])
                ranks = [f" (rank {self.key(seq)[0]})" * self.has_policy for seq in two]
                seen = f"{victim.name}{ranks[0]} was preempted, and {two[1].name}{ranks[1]} stayed."
                raise self._broken("wrong victim", seen)
        for seq, _ in batch:
            if seq in victims:
                seen = f"{seq.name} was preempted, and the batch computes it."
                raise self._broken("victim computes", seen)
        if victims and new:
            seen = f"{victims[0].name} was preempted, and {new[0].name} was admitted."
            raise self._broken("admits after a preemption", seen)
        # A policy may sort its queue later: then victims stand at the head until the next step.
        right = sorted(waiting, key=self.key)
        rest = [seq for seq in right if seq not in victims]
        victims_first = all(seq in victims for seq in waiting[: len(victims)])
        if waiting != right and not (victims_first and waiting[len(victims) :] == rest):
            rule = "queue not sorted" if self.has_policy else "order of the queue"
            by_rank = f" By rank it is {self._names(right)}." * self.has_policy
            raise self._broken(rule, f"the queue is {self._names(waiting)}.{by_rank}")

    def _see_counts(self, batch: Any, shown: str, total: int) -> None:
        counts = {seq.name: num for seq, num in batch}
        for seq, num in batch:
            missing = len(seq.tokens) - seq.num_computed
            if not 1 <= num <= missing or len([x for x, _ in batch if x is seq]) > 1:
                seen = f"the batch is [{shown}], and {seq.name} misses {count(missing, 'token')}."
                raise self._broken("count of a sequence", seen)
            if len(seq.table) * self.pool.block_size < seq.num_computed + num:
                seen = f"{seq.name} computes {count(num, 'token')} after {seq.num_computed}, and "
                seen += f"its table has {count(len(seq.table), 'block')} of {self.pool.block_size}."
                raise self._broken("no room for the tokens", seen)
        old = [seq for seq in self._running if seq in self.engine.running]
        budget = self.engine.budget
        for seq in sorted(old, key=self.key):
            num, missing = counts.get(seq.name, 0), len(seq.tokens) - seq.num_computed
            if num < min(missing, budget):
                num_old = sum(each.name in counts for each in old)
                newer = [each.name for each, _ in batch[:num_old] if each not in old]
                later = [x.name for x in old if self.key(x) > self.key(seq) and x.name in counts]
                seen = f"{seq.name} runs, and got {num} of its {count(missing, 'token')}"
                if newer:
                    raise self._broken("newcomers first", f"{seen} after {newer[0]} was admitted.")
                if later and total == self.engine.budget:
                    raise self._broken("oldest first", f"{seen}; the younger {later[0]} got more.")
                seen += f", with {count(budget, 'token')} of the budget left for it."
                raise self._broken("running sequence skipped", seen)
            budget -= num

    def _see_admissions(self, batch: Any, total: int) -> None:
        new = [seq for seq in self.engine.running if seq not in self._running]
        order = sorted(self._waiting, key=self.key)
        if new != order[: len(new)]:
            ranks = [self.key(seq)[:-1] for seq in new] if self.has_policy else []
            is_tie = ranks and ranks == [self.key(seq)[:-1] for seq in order[: len(new)]]
            seen = f"schedule admitted {self._names(new)}, and the queue was {self._names(order)}"
            seen += f"{' by rank' if self.has_policy else ''}."
            raise self._broken("equal ranks" if is_tie else "overtaken", seen)
        for seq in new:
            if len(seq.table) * self.pool.block_size < len(seq.tokens):
                seen = f"{seq.name} was admitted with {count(len(seq.table), 'block')} for "
                seen += f"{len(seq.tokens)} tokens."
                raise self._broken("admitted without blocks", seen)
        preempts = any(seq not in self.engine.running for seq in self._running)
        if order[len(new) :] and not preempts and total < self.engine.budget and not self.is_shared:
            head = order[len(new)]
            if -(-len(head.tokens) // self.pool.block_size) <= len(self.pool.free):
                seen = f"{head.name} waits, although {len(self.pool.free)} blocks are free, with "
                seen += f"{count(self.engine.budget - total, 'token')} of the budget left."
                raise self._broken("not admitted", seen)


def sequences(sequence_class: Any, **lengths: tuple[int, int]) -> dict[str, Any]:
    """Return sequences by name. A length is that of the prompt and of the answer."""
    return {
        name: sequence_class(name, text_of(name, prompt), answer)
        for name, (prompt, answer) in lengths.items()
    }


def check_5(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check `schedule` and `make_room` of step 5."""
    texts = {name: text_of(name, 30) for name in "ABCDE"}
    for num_blocks, budget, lengths, times in (
        (20, 6, {"A": (8, 4), "B": (7, 3), "C": (5, 3)}, "000"),
        (8, 12, {"A": (8, 9), "B": (6, 9), "C": (6, 9)}, "000"),
        (6, 16, {"A": (7, 10), "B": (6, 8), "C": (3, 6), "D": (2, 3)}, "0134"),
        (24, 6, {"E": (8, 4), "B": (16, 3), "D": (2, 6), "A": (2, 6), "C": (2, 6)}, "00000"),
        (6, 16, {"D": (7, 10), "B": (6, 8), "A": (3, 6), "C": (2, 3)}, "0134"),
    ):
        seqs = sequences(solutions[3].Sequence, **lengths)
        pool = counted(solutions[3].Pool)(probe := Probe(texts), num_blocks, 4)
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
        counts = {seq.name: num for seq, num in engine.schedule()}
        if budget == 1 and counts != {"A": 1}:
            seen = f"A and B run with a budget of 1, and the counts are {counts}."
            raise Broken("count of a sequence", seen)
        if num_blocks == 3 and len(engine.running) > 1:
            seen = f"schedule preempted B and then admitted {engine.running[1].name}. (A prefix of "
            raise Broken("admits after a preemption", f"{seen}C was known, as in step 6.)")
        if (num_blocks, budget) == (8, 20) and counts.get("C") != 5:
            seen = "With a known prefix, as in step 6, 4 of 9 tokens of C were computed when it "
            seen += f"was admitted, and it got the count {counts.get('C')}; 5 is right."
            raise Broken("count of a sequence", seen)


def check_9(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check the policy of step 9."""
    texts = {name: text_of(name, 30) for name in "ABCDEFGH"}

    def engine(ageing: int) -> Any:
        return step.ShortestFirst(Probe(texts), solutions[3].Pool(Probe(texts), 6, 4), 16, ageing)

    _rank(engine)
    given = sequences(solutions[3].Sequence, A=(7, 10), B=(20, 10))
    _added(engine(2), given["A"])
    try:
        engine(2).add(given["B"])
    except ValueError:
        pass
    else:
        raise Broken("not refused", "add accepted 30 tokens for a pool of 6 blocks of 4.")
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
    _ties(step, solutions)


def _aged(driver: Driver, ageing: int, seq: Any) -> tuple[int, int]:
    """Return the rank of a sequence, and its place among equal ranks."""
    return seq.max_tokens + ageing * driver.arrivals[seq.name], driver.seqs.index(seq)


def _ties(step: Any, solutions: Mapping[int, Any]) -> None:
    """Check that schedule sorts queues that nothing has sorted before, and keeps equal ranks."""
    probe = Probe({})
    pool = solutions[3].Pool(probe, 12, 4)
    engine = step.ShortestFirst(probe, pool, 8, 1)
    seqs = sequences(solutions[3].Sequence, C=(4, 9), D=(4, 2), B=(4, 2), A=(4, 2))
    for seq in seqs.values():
        engine.add(seq)
    order = [seq.name for seq in engine.waiting]
    if order != [*seqs]:
        raise Broken("sorted in add", f"C, D, B, A arrived, and after add the queue is {order}.")
    engine.waiting = [seqs[name] for name in "CDBA"]
    names = [seq.name for seq, _ in engine.schedule()]
    if names != ["D", "B"]:
        rule = "equal ranks" if "C" not in names else "overtaken"
        raise Broken(rule, f"D, B and A have equal ranks, and schedule admitted {names}.")


def _added(engine: Any, seq: Any) -> None:
    engine.num_steps = 3
    engine.add(seq)
    if seq not in engine.waiting:
        raise Broken("not queued", "After add, the sequence does not wait.")
    noted = engine.ranks.get(seq.name)
    if noted != seq.max_tokens + 6:
        seen = "7 tokens of a prompt and 10 of an answer arrived after 3 steps, with ageing 2: the "
        seen += f"rank is {noted}; {seq.max_tokens + 6} is right."
        raise Broken("rank at arrival", seen)


def _rank(engine: Callable[[int], Any]) -> None:
    short, long = engine(2).rank(5, 3), engine(2).rank(9, 3)
    if not isinstance(short, Real):
        raise Broken("rank is a number", f"rank(5, 3) is {short!r}.")
    if short >= long:
        raise Broken("longest job first", f"rank(5, 3) is {short}, and rank(9, 3) is {long}.")
    early, late = engine(2).rank(5, 0), engine(2).rank(5, 10)
    if late <= early:
        seen = f"With ageing 2, rank(5, 0) is {early}, and rank(5, 10) is {late}."
        raise Broken("no ageing" if late == early else "ageing backwards", seen)
    if late - early != 20 or long - short != 4:
        seen = f"With ageing 2, 10 steps change the rank by {late - early}, and 4 tokens by "
        seen += f"{long - short}."
        raise Broken("amount of ageing", seen)
