"""Test that attention which helper processes share gives the bits of one thread."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from shared_steps import share_always
from test_ops_cpu_attention_reuse import HEAD_DIM, Load

from mie.ops.arrays import Floats
from mie.ops.backend import StepBatch
from mie.ops_cpu.allocator import CachingAllocator, shared_zeros
from mie.ops_cpu.attention import geometry as attention_geometry
from mie.ops_cpu.attention import shared as shared_attention
from mie.ops_cpu.attention.attention import Attention, Plan
from mie.ops_cpu.attention.shared import SharedAttention
from mie.ops_cpu.crew import MAX_TOKENS, Crew
from mie.ops_cpu.linear.tiled import TiledPlan
from mie.ops_cpu.processes import helpers as helpers_module
from mie.ops_cpu.threads.gains import Gains
from mie.ops_cpu.threads.workers import Workers

pytestmark = pytest.mark.skipif(
    not helpers_module.IS_AVAILABLE, reason="helper processes need Linux's eventfd and pidfd"
)
MOST_QUERIES = 4 * MAX_TOKENS


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Share any attention. Count the layers that were shared, and those with combined parts."""
    share_always(monkeypatch)
    # Each tile is a split.
    monkeypatch.setattr(attention_geometry, "SPLIT_SCORES", 1)
    calls: Counter[str] = Counter()
    run = SharedAttention.run

    def counted(shared: SharedAttention, plan: Plan, q: Floats, layer: int) -> Floats:
        if shared._helpers._is_together:
            calls["shared"] += 1
            calls["parts"] += plan.has_parts
        return run(shared, plan, q, layer)

    monkeypatch.setattr(SharedAttention, "run", counted)
    return calls


class Crewed:
    """A forward pass that is only attention, and a crew that runs it."""

    def __init__(
        self,
        load: Load,
        num_processes: int,
        windows: Sequence[int | None] = (None,),
        *,
        is_batch_invariant: bool = True,
    ) -> None:
        self._load, self._windows, self._is_invariant = load, windows, is_batch_invariant
        self._workers = Workers(num_processes)
        self._attention = Attention(self._workers)
        plan = TiledPlan(np.dtype("float32"), self._workers)
        # Helpers start only if there are weights.
        self._matrix = plan.load((8, 8), [np.zeros((8, 8), np.float32)])
        self.crew = Crew(self._workers, plan, self._attention, CachingAllocator())
        self.crew.may_share_tokens = False  # only a whole forward pass can compute some of them
        self._queries = shared_zeros((MOST_QUERIES, load.heads[0], HEAD_DIM), np.float32)

    def step(self, counts: Sequence[int]) -> tuple[Floats, Floats]:
        """Return what the crew computes for so many tokens of each sequence, and one thread."""
        q, batch = self._load.step(counts)
        tokens = np.zeros(len(q), np.int64)
        batch = replace(batch, token_ids=tokens, positions=tokens, slot_mapping=tokens)
        self._queries[: len(q)] = q
        return self.crew.run(self._forward, batch), self._attend(Attention(Workers(1)), q, batch)

    def check(self, counts: Sequence[int]) -> None:
        """Compare both bit for bit."""
        got, wanted = self.step(counts)
        np.testing.assert_array_equal(got, wanted)

    def close(self) -> None:
        self.crew.close()
        self._workers.close()

    def _forward(self, batch: StepBatch) -> Floats:
        return self._attend(self._attention, self._queries[: len(batch.token_ids)], batch)

    def _attend(self, attention: Attention, q: Floats, batch: StepBatch) -> Floats:
        # A result lasts until the next layer, in which other processes may overwrite it.
        results = [
            attention(
                q, self._load.cache, layer, batch, window, is_batch_invariant=self._is_invariant
            ).copy()
            for window in self._windows
            for layer in (0, 1)
        ]
        return np.stack(results)


@pytest.fixture
def new_crewed() -> Iterator[Callable[..., Crewed]]:
    made: list[Crewed] = []

    def new(*arguments: Any, **settings: Any) -> Crewed:
        made.append(Crewed(*arguments, **settings))
        return made[-1]

    yield new
    for each in made:
        each.close()


def assert_helpers_live(crewed: Crewed) -> None:
    team = crewed.crew._team
    assert team is not None
    assert team.helpers.are_usable
    assert not team.helpers.have_failed


@pytest.mark.parametrize("heads", [(1, 1), (8, 2), (6, 3)])
@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize(
    "windows",
    [(None, 20), (20, None, 7, 40, 3, 100)],
    ids=["few windows", "many windows"],
)
def test_shared_attention_has_the_bits_of_one_thread(
    heads: tuple[int, int],
    num_processes: int,
    windows: tuple[int | None, ...],
    new_crewed: Callable[..., Crewed],
    calls: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sequences grow, join, leave, are preempted and come back.

    Chunks of several tokens, steps that are too large to share and pauses of the helpers come
    between. In the end there is one sequence, whose keys the processes have to divide.
    """
    load = Load(seed=num_processes, heads=heads)
    rng, crewed = load.rng, new_crewed(load, num_processes, windows)
    are_paused = False
    monkeypatch.setattr(Gains, "are_paused", lambda self, now: are_paused)
    happened: Counter[str] = Counter()
    for length in (120, 31, 250):
        load.join(length)
    for number in range(40):
        happens = rng.random()
        if happens < 0.06 and len(load.lengths) < 4:
            load.join(int(rng.integers(1, 140)))
        elif (happens < 0.12 and len(load.lengths) > 1) or max(load.lengths) > 290:
            load.leave(int(np.argmax(load.lengths)))
            if not load.lengths:
                load.join(200)
        elif happens < 0.18:
            # A preempted sequence comes back with the length that it had, in other blocks.
            length = load.lengths[0]
            load.leave(0)
            load.join(length)
        while number > 34 and len(load.lengths) > 1:
            load.leave(int(np.argmin(load.lengths)))
        counts = [1] * len(load.lengths)
        if number == 20:
            counts[0] = MAX_TOKENS + 1
        elif rng.random() < 0.15:
            counts[int(rng.integers(len(counts)))] = int(rng.integers(2, 7))
        are_paused = 28 <= number < 31 or bool(rng.random() < 0.05)
        before = calls["shared"]
        crewed.check(counts)
        is_small = sum(counts) <= MAX_TOKENS and not are_paused
        happened["small" if is_small else "other"] += 1
        assert is_small or calls["shared"] == before
    assert happened["other"] >= 4
    assert calls["shared"] > 40
    if heads == (1, 1) and num_processes == 3:
        assert calls["parts"] > 0
    assert_helpers_live(crewed)


@pytest.mark.parametrize("num_processes", [2, 3])
def test_attention_that_depends_on_the_batch_is_as_exact(
    num_processes: int, new_crewed: Callable[..., Crewed], calls: Counter[str]
) -> None:
    load = Load(seed=1, heads=(8, 2))
    for length in (5, 90, 300):
        load.join(length)
    crewed = new_crewed(load, num_processes, (None, 20), is_batch_invariant=False)
    for counts in [[1, 1, 1]] * 4 + [[20, 1, 5]] * 3 + [[1, 1, 1]] * 2:
        got, wanted = crewed.step(counts)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-6)
    assert calls["shared"] > 8
    assert_helpers_live(crewed)


def test_plans_begin_anew_after_steps_that_helpers_have_not_seen(
    new_crewed: Callable[..., Crewed], calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller's own plan of a step has parts in memory that the helpers do not see."""
    load = Load(seed=2, heads=(1, 1))
    load.join(240)
    crewed = new_crewed(load, 3)
    are_paused = False
    monkeypatch.setattr(Gains, "are_paused", lambda self, now: are_paused)
    for _ in range(4):
        crewed.check([1])
    assert calls["parts"] > 0
    are_paused = True
    load.leave(0)
    load.join(256)
    before = calls["shared"]
    for _ in range(2):
        crewed.check([1])
    assert calls["shared"] == before
    are_paused = False
    # The sequence goes on in the same block, for which the caller has kept its plan.
    for _ in range(4):
        crewed.check([1])
    assert calls["shared"] >= before + 8
    assert_helpers_live(crewed)


def test_one_process_computes_what_has_too_many_parts(
    new_crewed: Callable[..., Crewed], calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load(seed=3, heads=(1, 1))
    load.join(240)
    crewed = new_crewed(load, 3)
    for _ in range(4):
        crewed.check([1])
    assert calls["parts"] > 0
    calls.clear()
    crewed.crew.close()
    monkeypatch.setattr(shared_attention, "MAX_PARTS", 0)
    for _ in range(4):
        crewed.check([1])
    assert not calls
    assert_helpers_live(crewed)
