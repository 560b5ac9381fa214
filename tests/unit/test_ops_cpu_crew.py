"""Test which steps helper processes share, and that these have the bits of steps without them."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from forks import children
from interrupts import KINDS, Injector
from linear_layouts import KERNEL, PACKED, layout_of, needs_kernel
from shared_steps import count_shares, share_always

from mie.diff.recording import RecordingBackend
from mie.ops.arrays import Floats
from mie.ops.backend import StepBatch
from mie.ops_cpu import crew as crew_module
from mie.ops_cpu.allocator import CachingAllocator, shared_zeros
from mie.ops_cpu.attention.attention import Attention
from mie.ops_cpu.cpu_backend import CpuBackend
from mie.ops_cpu.crew import MAX_INTS, MAX_TOKENS, Crew
from mie.ops_cpu.elementwise import silu_mul
from mie.ops_cpu.linear import ready
from mie.ops_cpu.linear.tiled import TiledMatrix, TiledPlan
from mie.ops_cpu.processes import helpers as helpers_module
from mie.ops_cpu.processes.helpers import HelperProcesses, pack, unpack
from mie.ops_cpu.threads.blas import Blas
from mie.ops_cpu.threads.workers import Workers

pytestmark = pytest.mark.skipif(
    not helpers_module.IS_AVAILABLE, reason="helper processes need Linux's eventfd and pidfd"
)
NUM_IDS = 100
PID = os.getpid()
IS_SLOW: dict[str, Callable[[], bool]] = {
    "caller": lambda: os.getpid() == PID,
    "helpers": lambda: os.getpid() != PID,
}
"""Whether this process is one that a test slows down."""
NEW_TRIALS = crew_module._new_trials


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Share any work. Count the calls that share work with usable helpers. Leave no process."""
    before = children()
    share_always(monkeypatch)
    yield count_shares(monkeypatch)
    assert children() <= before


class Model:
    """A crew, and matrices for the forward passes that it runs."""

    def __init__(
        self,
        num_threads: int,
        dtype: str = "float32",
        weight_dtype: str = "auto",
        layout: str = "tiled",
    ) -> None:
        self.workers = Workers(num_threads)
        self.plan = TiledPlan(np.dtype(dtype), self.workers, weight_dtype, kernel=KERNEL)
        self._layout = layout
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
        layout = layout_of(self.plan, self._layout, weight.shape)
        return self.plan.load(weight.shape, [weight], bias, layout)

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


def helpers_of(model: Model) -> HelperProcesses:
    team = model.crew._team
    assert team is not None
    return team.helpers


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
        self.matrices = [
            model.load(num_inputs, num_outputs, has_bias=has_bias) for has_bias in (False, True)
        ]
        self.x = model.values(NUM_IDS, num_inputs)
        self._residual = model.values(NUM_IDS, num_outputs)

    def forward(self, batch: StepBatch) -> Floats:
        x = self.x[batch.token_ids]
        wide = np.repeat(x, 2, axis=1)
        wide[:, 1::2] = np.nan
        results = [
            matrix.apply(each, residual, is_brief=is_brief).copy()
            for matrix in self.matrices
            for residual in (None, self._residual[batch.token_ids])
            for each in (x, wide[:, ::2])
            for is_brief in (False, True)
        ]
        return np.concatenate(results, axis=1)


NUM_PRODUCTS = 16
SHARED = [
    ((100, 300), "float32", "auto"),
    ((100, 2000), "float32", "auto"),
    ((300, 330), "float32", "bfloat16"),
    ((2100, 130), "float32", "auto"),
    ((2100, 130), "float32", "float16"),
]


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype", "layout"),
    [
        ((100, 256), "float64", "auto", "tiled"),
        *((*case, "tiled") for case in SHARED),
        *(
            pytest.param(*case, *each.values, marks=needs_kernel)
            for each in PACKED
            for case in SHARED
        ),
    ],
)
def test_shared_products_have_the_bits_of_those_alone(
    num_processes: int,
    shape: tuple[int, int],
    dtype: str,
    weight_dtype: str,
    layout: str,
    new_model: Callable[..., Model],
    calls: Counter[str],
) -> None:
    both = [new_model(number, dtype, weight_dtype, layout) for number in (num_processes, 1)]
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
    assert not helpers_of(model).have_failed


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


class GatedLayers:
    """A forward pass of layers with a gated activation between two products."""

    def __init__(self, model: Model, is_slow: Callable[[], bool] = lambda: False) -> None:
        self._up, self._down = model.load(96, 320), model.load(160, 96)
        self._plan, self._workers = model.plan, model.workers
        self._x = model.values(NUM_IDS, 96)
        self._is_slow = is_slow

    def forward(self, batch: StepBatch) -> Floats:
        rng = np.random.default_rng(int(batch.token_ids[0]))
        x = self._x[batch.token_ids]
        for _ in range(8):
            gate_up = self._up.apply(x, None, is_brief=True)
            shared = self._plan.shared
            y = None if shared is None else shared.silu_mul(gate_up)
            if y is None:
                y = silu_mul(gate_up, self._workers, CachingAllocator())
            if self._is_slow() and rng.random() < 0.3:
                time.sleep(3e-3)
            x = self._down.apply(y, x)
        return x


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("slow", ["caller", "helpers"])
def test_shared_activations_have_the_bits_of_those_alone(
    num_processes: int, slow: str, new_model: Callable[..., Model], calls: Counter[str]
) -> None:
    both = [new_model(number) for number in (num_processes, 1)]
    shared, wanted = GatedLayers(both[0], IS_SLOW[slow]), GatedLayers(both[1])
    start_helpers(both[0], shared.forward)
    for num_rows in (1, 2, 3, 17, MAX_TOKENS):
        calls.clear()
        batch = step_of(num_rows, num_rows)
        expected = both[1].run(wanted.forward, batch)
        np.testing.assert_array_equal(both[0].run(shared.forward, batch), expected)
        assert calls == {"shared": 8 * (3 if num_rows >= num_processes else 2)}
    assert not helpers_of(both[0]).have_failed


@pytest.mark.parametrize("num_processes", [2, 3])
@pytest.mark.parametrize("slow", ["caller", "helpers"])
def test_no_result_is_overwritten_while_a_slower_process_reads_it(
    num_processes: int, slow: str, new_model: Callable[..., Model], calls: Counter[str]
) -> None:
    both = [new_model(number) for number in (num_processes, 1)]
    shared, wanted = Chain(both[0], IS_SLOW[slow]), Chain(both[1])
    start_helpers(both[0], shared.forward)
    calls.clear()
    for first in range(6):
        batch = step_of(1 + first, first)
        expected = both[1].run(wanted.forward, batch)
        np.testing.assert_array_equal(both[0].run(shared.forward, batch), expected)
    assert calls == {"shared": 6 * 24}
    assert not helpers_of(both[0]).have_failed


@pytest.mark.parametrize("num_processes", [2, 3])
def test_shares_may_be_unequal_and_change_from_step_to_step(
    num_processes: int, new_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tiles = 5
    counts = shared_zeros((num_processes,), np.int64)
    task_of = ready._task

    def counted(matrix: TiledMatrix, groups: Any, out: Any, which: slice) -> Any:
        task = task_of(matrix, groups, out, which)
        if matrix._plan is not both[0].plan:
            return task

        def count_and_do() -> None:
            shared = both[0].plan.shared
            if shared is not None:  # otherwise the caller does it before there are helpers
                counts[shared.helpers.rank] += which.stop - which.start
            task()

        return count_and_do

    monkeypatch.setattr(ready, "_task", counted)
    both = [new_model(number) for number in (num_processes, 1)]
    shared, wanted = (Products(each, 100, 64 * num_tiles) for each in both)
    start_helpers(both[0], shared.forward)
    helpers, rng = helpers_of(both[0]), np.random.default_rng(0)
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


# Batches.


def random_batch(rng: np.random.Generator, most_blocks: int = 20) -> StepBatch:
    num_tokens, num_sequences = int(rng.integers(1, MAX_TOKENS + 1)), int(rng.integers(1, 9))

    def ints(*shape: int) -> Any:
        return rng.integers(-(2**62), 2**62, shape)

    return StepBatch(
        token_ids=rng.integers(0, NUM_IDS, num_tokens),
        positions=ints(num_tokens),
        slot_mapping=ints(num_tokens),
        cu_seqlens_q=ints(num_sequences + 1),
        seq_lens=ints(num_sequences),
        # The caller's tables may be some columns of wider ones.
        block_tables=ints(num_sequences, most_blocks + 1)[:, : rng.integers(0, most_blocks + 1)],
        logits_rows=ints(int(rng.integers(0, 9))),
        num_decodes=None if rng.random() < 0.3 else int(rng.integers(0, num_sequences + 1)),
    )


def test_a_batch_in_shared_memory_is_the_same() -> None:
    shared, rng = crew_module._SharedBatch(), np.random.default_rng(0)
    for _ in range(100):
        batch = random_batch(rng)
        for _ in range(int(rng.integers(1, 4))):  # The same shapes may come again.
            batch = replace(batch, positions=batch.positions + 1)
            header = shared.write(batch)
            assert header is not None
            # Helpers get the header as a message.
            read = shared.read(unpack(pack(0, *header))[1:6])
            for field in fields(StepBatch):
                np.testing.assert_equal(getattr(read, field.name), getattr(batch, field.name))
            assert read.num_decodes == batch.num_decodes


def test_a_batch_fits_up_to_the_last_integer() -> None:
    shared = crew_module._SharedBatch()
    small = step_of(5)
    num_others = 3 * 5 + 2 + 1
    for num_blocks in (MAX_INTS - num_others, MAX_INTS - num_others + 1):
        tables = np.arange(num_blocks).reshape(1, -1)
        header = shared.write(replace(small, block_tables=tables))
        assert (header is None) == (num_blocks > MAX_INTS - num_others)
        if header is not None:
            np.testing.assert_array_equal(shared.read(header).block_tables, tables)


def test_a_batch_that_is_too_large_is_not_shared(
    new_model: Callable[..., Model], calls: Counter[str]
) -> None:
    both = [new_model(number) for number in (2, 1)]
    shared, wanted = (Products(each, 100, 300) for each in both)
    start_helpers(both[0], shared.forward)
    for number, num_blocks in enumerate((1, MAX_INTS, 1, MAX_INTS, MAX_INTS, 3, 3)):
        calls.clear()
        tables = np.zeros((1, num_blocks), np.int64)
        batch = replace(step_of(4, number), block_tables=tables)
        got, expected = both[0].run(shared.forward, batch), both[1].run(wanted.forward, batch)
        np.testing.assert_array_equal(got, expected)
        assert calls == ({} if num_blocks == MAX_INTS else {"shared": NUM_PRODUCTS})


# Forward passes.


def pids_of(model: Model) -> list[int]:
    team = model.crew._team
    return [] if team is None else [helper._pid for helper in team.helpers._helpers]


def has_ended(pid: int) -> bool:
    return pid not in children()


def test_a_new_function_at_each_step_is_never_shared(
    new_model: Callable[..., Model], calls: Counter[str]
) -> None:
    both = [new_model(number) for number in (2, 1)]
    shared, wanted = (Products(each, 100, 300) for each in both)
    before = children()
    for number in range(6):
        batch = step_of(2, number)
        got = both[0].run(lambda batch: shared.forward(batch), batch)
        np.testing.assert_array_equal(got, both[1].run(wanted.forward, batch))
        assert both[0].crew._team is None
        assert children() == before
    assert not calls


@pytest.mark.parametrize("kind", ["method", "function"])
def test_a_forward_pass_that_comes_again_is_shared(
    kind: str, new_model: Callable[..., Model], calls: Counter[str]
) -> None:
    model = new_model(3)
    products = Products(model, 100, 300)

    def function(batch: StepBatch) -> Floats:
        return products.forward(batch)

    found = []
    for _ in range(5):
        # A bound method is a new object each time.
        model.run(function if kind == "function" else products.forward, step_of(2))
        found.append((len(pids_of(model)), calls["shared"]))
    wanted = [(0, 0), (2, 0), *((2, number * NUM_PRODUCTS) for number in (1, 2, 3))]
    assert found == wanted


def test_helpers_end_when_another_forward_pass_comes(
    new_model: Callable[..., Model], calls: Counter[str]
) -> None:
    both = [new_model(number) for number in (2, 1)]
    pairs = [[Products(each, *shape) for each in both] for shape in ((100, 300), (300, 130))]
    old: list[int] = []
    for shared, wanted in [*pairs, *pairs]:
        for number in range(4):
            calls.clear()
            got = both[0].run(shared.forward, step_of(3, number))
            np.testing.assert_array_equal(got, both[1].run(wanted.forward, step_of(3, number)))
            assert all(map(has_ended, old))
            if number != 1:  # The second step is shared if it is like the last one before.
                assert calls == ({"shared": NUM_PRODUCTS} if number else {})
        old += pids_of(both[0])
    assert len(old) == 4


def test_a_forward_pass_is_freed_while_the_crew_lives(new_model: Callable[..., Model]) -> None:
    model = new_model(2)
    products = Products(model, 100, 300)
    start_helpers(model, products.forward)
    freed = weakref.ref(products)
    gc.collect()
    gc.disable()
    try:
        del products
        assert freed() is None
    finally:
        gc.enable()
    # Another object may have the same address.
    other = Products(model, 100, 130)
    expected = other.forward(step_of(2))
    for _ in range(4):
        np.testing.assert_array_equal(model.run(other.forward, step_of(2)), expected)


def test_an_observed_step_is_never_shared(calls: Counter[str]) -> None:
    """Its observer would be called in a helper too, and its memory would not change here."""
    backend = CpuBackend(num_threads=2, linear_plan="tiled")
    seen: list[str] = []
    recording = RecordingBackend(backend, lambda spot, _: seen.append(spot.method))
    rng = np.random.default_rng(0)
    x = rng.standard_normal((NUM_IDS, 100)).astype("float32")
    matrix = backend.load_linear((300, 100), [rng.standard_normal((300, 100)).astype("float32")])

    def observed(batch: StepBatch) -> Floats:
        result: Floats = recording.linear(x[batch.token_ids], matrix)
        return result

    def plain(batch: StepBatch) -> Floats:
        return backend.linear(x[batch.token_ids], matrix)

    batch = replace(step_of(2), logits_rows=np.arange(2))
    try:
        found = [recording.run_step(observed, batch) for _ in range(5)]
        assert backend._crew._team is None
        assert not calls
        assert seen == ["linear", "run_step"] * 5
        # The same steps are shared if no one observes them.
        found += [backend.run_step(plain, batch) for _ in range(5)]
        assert calls == {"shared": 3}
        for each in found:
            np.testing.assert_array_equal(each, found[0])
    finally:
        backend._crew.close()


# Exceptions.


@pytest.mark.parametrize("after", [0, 1, 7])
def test_an_exception_in_the_caller_ends_the_helpers(
    after: int, new_model: Callable[..., Model], calls: Counter[str]
) -> None:
    """The next steps are right, and have helpers again."""
    both = [new_model(number) for number in (3, 1)]
    shared, wanted = (Products(each, 100, 300) for each in both)
    fails = False

    def forward(batch: StepBatch) -> Floats:
        # The helpers do not see this change of a variable.
        for _ in range(after if fails else 0):
            shared.matrices[0].apply(shared.x[batch.token_ids], None)
        if fails:
            raise ValueError("planted")
        return shared.forward(batch)

    start_helpers(both[0], forward)
    for number in range(3):
        old = pids_of(both[0])
        assert len(old) == 2
        fails = True
        with pytest.raises(ValueError, match="planted"):
            both[0].run(forward, step_of(2, number))
        assert all(map(has_ended, old))
        fails = False
        for num_tokens in (2, MAX_TOKENS + 1, 2, 2):
            calls.clear()
            batch = step_of(num_tokens, number)
            got, expected = both[0].run(forward, batch), both[1].run(wanted.forward, batch)
            np.testing.assert_array_equal(got, expected)
        assert calls == {"shared": NUM_PRODUCTS}
    assert not helpers_of(both[0]).have_failed


@pytest.mark.parametrize("num_before", [0, 2])
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_leaves_right_results(
    every: int, num_before: int, new_model: Callable[..., Model], calls: Counter[str]
) -> None:
    """It comes in the step that starts the helpers, or in a later one."""
    if sys.gettrace() is not None:
        pytest.skip("another tracer is at work")
    both = [new_model(number) for number in (2, 1)]
    model, alone = both
    chains = [Chain(each) for each in both]
    batches = [step_of(3, first) for first in range(4)]
    expected = [alone.run(chains[1].forward, batch) for batch in batches]
    line, num_interrupts = 1, 0
    while True:
        model.crew.close()
        for _ in range(num_before):
            model.run(chains[0].forward, batches[0])
        injector = Injector(KINDS["SIGINT"][0], line)
        with contextlib.suppress(KeyboardInterrupt), Blas().threads(1):
            injector.run(lambda: model.crew.run(chains[0].forward, batches[1]))
        # No helper is within a step any more.
        if pids_of(model):
            assert helpers_of(model).are_usable, injector.where
        calls.clear()
        for batch, wanted in zip(batches, expected, strict=True):
            got = model.run(chains[0].forward, batch)
            np.testing.assert_array_equal(got, wanted, str(injector.where))
        assert calls["shared"] > 0, injector.where
        if not injector.where:
            break
        num_interrupts += 1
        line += every if line < 30 else 30 * every
    assert num_interrupts > 40 / every
    assert not helpers_of(model).have_failed


# Trials.


class Timed:
    """A forward pass that takes as long as it is told to, by a clock of its own."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(crew_module, "_new_trials", NEW_TRIALS)
        self._now = 0.0
        monkeypatch.setattr(crew_module, "perf_counter", lambda: self._now)
        self._model, self._matrix = model, model.load(100, 300)
        self._x = model.values(NUM_IDS, 100)
        self.is_slower = dict.fromkeys(range(MAX_TOKENS + 2), False)
        """Whether helpers make a step slower, by its number of tokens."""

    def forward(self, batch: StepBatch) -> Floats:
        is_shared = self._model.plan.shared is not None
        self._now += 2.0 if is_shared == self.is_slower[len(batch.token_ids)] else 1.0
        return self._matrix.apply(self._x[batch.token_ids], None)

    def is_shared(self, num_tokens: int) -> bool:
        """Run a step. Return whether it was shared."""
        self._model.run(self.forward, step_of(num_tokens))
        return self._model.plan.shared is not None


NUM_TRIALS = 32


@pytest.mark.parametrize("is_slower", [False, True])
def test_steps_that_are_slower_with_helpers_go_to_threads(
    is_slower: bool, new_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(new_model(2), monkeypatch)
    timed.is_slower[1] = is_slower
    begin = [timed.is_shared(1) for _ in range(2)]
    assert begin == [False, False]  # There are no helpers yet, and then no step of this kind.
    trials = [timed.is_shared(1) for _ in range(NUM_TRIALS)]
    assert trials == ([True] * 8 + [False] * 8) * 2
    assert {timed.is_shared(1) for _ in range(100)} == {not is_slower}


def test_each_kind_of_step_has_trials_of_its_own(
    new_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(new_model(2), monkeypatch)
    timed.is_slower[1] = True
    kinds = (1, 20, 4)
    for num_tokens in kinds:
        for _ in range(3 + NUM_TRIALS):
            timed.is_shared(num_tokens)
    for num_tokens in kinds * 2:
        timed.is_shared(num_tokens)
        assert {timed.is_shared(num_tokens) for _ in range(10)} == {num_tokens != 1}


def test_a_single_step_of_another_kind_follows_the_one_before(
    new_model: Callable[..., Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = Timed(new_model(2), monkeypatch)
    timed.is_slower[1] = True
    for num_tokens in (1, 20):
        for _ in range(3 + NUM_TRIALS):
            timed.is_shared(num_tokens)
    # Kinds that are known and one that is not.
    assert [timed.is_shared(number) for number in (1, 20, 7, 1, 20)] == [True] * 5
    assert [timed.is_shared(number) for number in (1, 1)] == [True, False]
    assert [timed.is_shared(number) for number in (20, 1, 40, 20, 1)] == [False] * 5
    # A larger step goes to threads, and so does a smaller one of another kind after it.
    assert [timed.is_shared(number) for number in (20, 20)] == [False, True]
    assert [timed.is_shared(number) for number in (65, 1, 20, 20)] == [False, False, False, True]
