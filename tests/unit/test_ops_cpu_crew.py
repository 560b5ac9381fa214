"""Test which steps helper processes share, and that these have the bits of steps without them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mie.ops.arrays import Floats
from mie.ops.backend import StepBatch
from mie.ops_cpu import crew as crew_module
from mie.ops_cpu.allocator import CachingAllocator, shared_zeros
from mie.ops_cpu.attention.attention import Attention
from mie.ops_cpu.crew import MAX_TOKENS, Crew
from mie.ops_cpu.linear import shared as shared_products
from mie.ops_cpu.linear.tiled import TiledMatrix, TiledPlan
from mie.ops_cpu.processes import helpers as helpers_module
from mie.ops_cpu.processes.helpers import HelperProcesses
from mie.ops_cpu.threads.blas import Blas
from mie.ops_cpu.threads.counts import Trials
from mie.ops_cpu.threads.gains import Gains
from mie.ops_cpu.threads.workers import Workers

pytestmark = pytest.mark.skipif(
    not helpers_module.IS_AVAILABLE, reason="helper processes need Linux's eventfd and pidfd"
)
PATIENCE = 120.0
NUM_IDS = 100
PID = os.getpid()


def children() -> set[int]:
    """Return the process ids of this process's children."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {int(pid) for task in tasks for pid in task.read_text().split()}


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Share any work. Count the calls that share work with usable helpers. Leave no process."""
    before = children()
    monkeypatch.setattr(crew_module, "START_BYTES", 0)
    monkeypatch.setattr(crew_module, "_new_trials", lambda: Trials((True,)))
    monkeypatch.setattr(crew_module, "available_cpus", lambda: 64)
    monkeypatch.setattr(shared_products, "LEAST_BYTES", 0)
    monkeypatch.setattr(Gains, "are_paused", lambda self, now: False)
    monkeypatch.setattr(helpers_module, "PATIENCE", PATIENCE)
    calls: Counter[str] = Counter()
    share = HelperProcesses.share

    def counted(helpers: HelperProcesses, tasks: Any) -> None:
        calls["shared" if helpers._is_together else "alone"] += 1
        share(helpers, tasks)

    monkeypatch.setattr(HelperProcesses, "share", counted)
    yield calls
    assert children() <= before


class Model:
    """A crew, and matrices for the forward passes that it runs."""

    def __init__(
        self, num_threads: int, dtype: str = "float32", weight_dtype: str = "auto"
    ) -> None:
        self.workers = Workers(num_threads)
        self.plan = TiledPlan(np.dtype(dtype), self.workers, weight_dtype)
        self.attention = Attention(self.workers)
        self.crew = Crew(self.workers, self.plan, self.attention, CachingAllocator())
        self._weight_dtype = dtype if weight_dtype == "auto" else weight_dtype
        self._rng = np.random.default_rng(0)

    def values(self, *shape: int) -> Floats:
        """Return the same random numbers in each model."""
        return self._rng.standard_normal(shape).astype(self.plan.dtype)

    def load(self, num_inputs: int, num_outputs: int, *, has_bias: bool = False) -> TiledMatrix:
        weight = self.values(num_outputs, num_inputs) / num_inputs**0.5
        weight = weight.astype(self._weight_dtype)
        bias = self.values(num_outputs) if has_bias else None
        return self.plan.load(weight.shape, [weight], bias)

    def run(self, forward: Callable[[StepBatch], Floats], batch: StepBatch) -> Floats:
        with Blas().threads(1):  # as in a step
            return self.crew.run(forward, batch)

    def close(self) -> None:
        self.crew.close()
        self.workers.close()


@pytest.fixture
def new_model() -> Iterator[Callable[..., Model]]:
    made: list[Model] = []

    def new(*arguments: Any) -> Model:
        made.append(Model(*arguments))
        return made[-1]

    yield new
    for model in made:
        model.close()


def step_of(num_tokens: int, first: int = 0) -> StepBatch:
    """Return a batch of one sequence with these tokens."""
    token_ids = np.arange(first, first + num_tokens) % NUM_IDS
    return StepBatch(
        token_ids=token_ids,
        positions=token_ids,
        slot_mapping=token_ids,
        cu_seqlens_q=np.array([0, num_tokens]),
        seq_lens=np.array([num_tokens]),
        block_tables=np.zeros((1, 1), np.int64),
        logits_rows=np.zeros(0, np.int64),
    )


def start_helpers(model: Model, forward: Callable[[StepBatch], Floats]) -> None:
    """Run the steps after which those of any kind are shared."""
    for _ in range(3):
        model.run(forward, step_of(1))
    team = model.crew._team
    assert team is not None
    assert not team.is_resting


# Products.


class Products:
    """A forward pass of products with and without a bias and a residual."""

    def __init__(self, model: Model, num_inputs: int, num_outputs: int) -> None:
        self._matrices = [
            model.load(num_inputs, num_outputs, has_bias=has_bias) for has_bias in (False, True)
        ]
        self._x = model.values(NUM_IDS, num_inputs)
        self._residual = model.values(NUM_IDS, num_outputs)

    def forward(self, batch: StepBatch) -> Floats:
        x = self._x[batch.token_ids]
        wide = np.repeat(x, 2, axis=1)
        wide[:, 1::2] = np.nan
        results = [
            matrix.apply(each, residual, is_brief=is_brief).copy()
            for matrix in self._matrices
            for residual in (None, self._residual[batch.token_ids])
            for each in (x, wide[:, ::2])
            for is_brief in (False, True)
        ]
        return np.concatenate(results, axis=1)


NUM_PRODUCTS = 16


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype"),
    [
        ((100, 300), "float32", "auto"),
        ((100, 256), "float64", "auto"),
        ((300, 330), "float32", "bfloat16"),
        ((2100, 130), "float32", "auto"),
        ((2100, 130), "float32", "float16"),
    ],
)
def test_shared_products_have_the_bits_of_those_alone(
    num_processes: int,
    shape: tuple[int, int],
    dtype: str,
    weight_dtype: str,
    new_model: Callable[..., Model],
    calls: Counter[str],
) -> None:
    both = [new_model(number, dtype, weight_dtype) for number in (num_processes, 1)]
    model, alone = both
    shared, wanted = (Products(each, *shape) for each in both)
    start_helpers(model, shared.forward)
    for num_rows in (1, 2, 3, 5, 8, 24, 63, MAX_TOKENS):
        calls.clear()
        batch = step_of(num_rows, num_rows)
        got, expected = model.run(shared.forward, batch), alone.run(wanted.forward, batch)
        np.testing.assert_array_equal(got, expected)
        assert got.dtype == expected.dtype == dtype
        assert np.isfinite(got).all()
        assert calls == {"shared": NUM_PRODUCTS}
    assert alone.crew._team is None
    assert not model.crew._team.helpers.have_failed


def test_larger_steps_are_not_shared(new_model: Callable[..., Model], calls: Counter[str]) -> None:
    both = [new_model(number) for number in (2, 1)]
    shared, wanted = (Products(each, 100, 300) for each in both)
    start_helpers(both[0], shared.forward)
    for num_rows in (MAX_TOKENS, MAX_TOKENS + 1, MAX_TOKENS, MAX_TOKENS):
        calls.clear()
        got = both[0].run(shared.forward, step_of(num_rows))
        np.testing.assert_array_equal(got, both[1].run(wanted.forward, step_of(num_rows)))
        assert (not calls) == (num_rows > MAX_TOKENS)


class Chain:
    """A forward pass in which each product needs the brief result of the one before."""

    def __init__(self, model: Model, is_slow: Callable[[], bool] = lambda: False) -> None:
        self._matrices = [model.load(192, 192) for _ in range(3)]
        self._x = model.values(NUM_IDS, 192)
        self._is_slow = is_slow

    def forward(self, batch: StepBatch) -> Floats:
        rng = np.random.default_rng(int(batch.token_ids[0]))
        x = self._x[batch.token_ids]
        total = np.zeros_like(x)
        for number in range(24):
            x = self._matrices[number % 3].apply(x, None, is_brief=True)
            if self._is_slow() and rng.random() < 0.3:
                time.sleep(3e-3)
            total += x * np.float32(number + 1)
            if self._is_slow() and rng.random() < 0.3:
                time.sleep(3e-3)
        return total


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("slow", ["caller", "helpers"])
def test_no_result_is_overwritten_while_a_slower_process_reads_it(
    num_processes: int, slow: str, new_model: Callable[..., Model], calls: Counter[str]
) -> None:
    both = [new_model(number) for number in (num_processes, 1)]
    is_slow = {
        "caller": lambda: os.getpid() == PID,
        "helpers": lambda: os.getpid() != PID,
    }
    shared, wanted = Chain(both[0], is_slow[slow]), Chain(both[1])
    start_helpers(both[0], shared.forward)
    calls.clear()
    for first in range(6):
        batch = step_of(1 + first, first)
        expected = both[1].run(wanted.forward, batch)
        np.testing.assert_array_equal(both[0].run(shared.forward, batch), expected)
    assert calls == {"shared": 6 * 24}
    assert not both[0].crew._team.helpers.have_failed


@pytest.mark.parametrize("num_processes", [2, 3])
def test_shares_may_be_unequal_and_change_from_step_to_step(
    num_processes: int, new_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tiles = 5
    counts = shared_zeros((num_processes,), np.int64)
    task_of = shared_products._task

    def counted(plan: TiledPlan, matrix: TiledMatrix, groups: Any, out: Any, which: slice) -> Any:
        task = task_of(plan, matrix, groups, out, which)

        def count_and_do() -> None:
            assert plan.shared is not None
            counts[plan.shared.helpers.rank] += which.stop - which.start
            task()

        return count_and_do

    monkeypatch.setattr(shared_products, "_task", counted)
    both = [new_model(number) for number in (num_processes, 1)]
    shared, wanted = (Products(each, 100, 64 * num_tiles) for each in both)
    start_helpers(both[0], shared.forward)
    helpers, rng = both[0].crew._team.helpers, np.random.default_rng(0)
    borders = [[0, 0], [64, 64], [0, 64], [1, 63], [32, 32]]
    borders += [sorted(rng.integers(0, 65, 2).tolist()) for _ in range(20)]
    for number, border in enumerate(borders):
        helpers._balance.ends = helpers.ends = [0, *border[: num_processes - 1], 64]
        counts[:] = 0
        widths = np.diff(np.floor(np.array(helpers.ends) * num_tiles / 64 + 0.5)).astype(int)
        batch = step_of(1 + number % 7, number)
        got, expected = both[0].run(shared.forward, batch), both[1].run(wanted.forward, batch)
        np.testing.assert_array_equal(got, expected)
        assert counts.tolist() == (NUM_PRODUCTS * widths).tolist()
