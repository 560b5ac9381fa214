"""Products with slots of adapters equal the definition, whatever the other rows are."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled import needs_numba
from emulated import needs_compiler
from numpy.typing import NDArray
from quantised_rows import quantised
from step_batches import partial_batch

from mie.config.engine import EngineConfig
from mie.load.backends import load_backend
from mie.ops.adapters.low_rank import LowRank, SlotShape, low_rank
from mie.ops.backend import Backend, StepBatch
from mie.ops.weights.quantised import Codes, Form

COUNTS, NUM_INPUTS = (24, 7, 9), 21
SHAPE = SlotShape(num_inputs=NUM_INPUTS, counts=COUNTS, num_slots=3, max_rank=6)
Floats = NDArray[np.floating[Any]]
Changes = list[LowRank | None]


EMULATED = pytest.param("cupy-emulated", marks=[needs_compiler, pytest.mark.slow])


def backend_of(name: str, dtype: str = "float32", **settings: Any) -> Backend:
    if name == EMULATED.values[0]:
        settings["enforce_eager"] = True  # a captured step would keep the first x
    else:
        settings["num_threads"] = 2
    return load_backend(name, dtype, EngineConfig(batch_invariant=True, **settings))


def random_changes(seed: int, ranks: tuple[int, ...]) -> Changes:
    """Return a change for each part. Rank 0 is none."""
    rng = np.random.default_rng(seed)
    return [
        LowRank(
            a=rng.normal(0, 1, (rank, NUM_INPUTS)).astype(np.float32),
            b=rng.normal(0, 1, (count, rank)).astype(np.float32),
            scale=0.3 + seed,
        )
        if rank
        else None
        for rank, count in zip(ranks, COUNTS, strict=True)
    ]


CHANGES = {1: random_changes(1, (1, 6, 3)), 2: random_changes(2, (0, 2, 5))}
WEIGHT = np.random.default_rng(0).normal(0, 1, (sum(COUNTS), NUM_INPUTS)).astype(np.float32)
X = np.random.default_rng(9).normal(0, 1, (13, NUM_INPUTS)).astype(np.float32)
SLOTS = [0, 1, 2, 1, 0, 2, 2, 1, 1, 0, 2, 1, 2]


def loaded(backend: Backend) -> Any:
    """Return the matrix with adapters in the slots 1 and 2."""
    weight = backend.load_linear(WEIGHT.shape, [WEIGHT])
    weight = backend.adapters.with_slots(weight, SHAPE)
    for slot, changes in CHANGES.items():
        backend.adapters.put(weight, slot, changes)
    return weight


def product(
    backend: Backend, weight: Any, x: Floats, slots: list[int], before: Any = None
) -> Floats:
    """Return a product in a step with these adapters of tokens, after another product."""
    batch = replace(
        partial_batch(
            token_ids=np.zeros(len(x), np.int64),
            positions=np.zeros(len(x), np.int64),
            slot_mapping=np.zeros(len(x), np.int64),
            cu_seqlens_q=np.arange(len(x) + 1),
            seq_lens=np.ones(len(x), np.int64),
            block_tables=np.zeros((len(x), 1), np.int64),
            logits_rows=np.arange(len(x)),
        ),
        adapters=np.array(slots),
    )

    def forward(_: StepBatch) -> Any:
        recorder = getattr(backend, "recorder", None)  # jit runs steps as programs
        given: Any = x if recorder is None else recorder.program.given(x)
        if before is not None:  # so that the memory of its results is used again
            backend.linear(given, before)
        return backend.linear(given, weight)

    return np.array(backend.run_step(forward, batch))


def defined(x: Floats, slots: list[int], y: Floats | None = None) -> Floats:
    """Return the product by the definition, in float64. ``y`` replaces the one without adapters."""
    x = x.astype(np.float64)
    y = x @ WEIGHT.T if y is None else y.astype(np.float64)
    ends = np.cumsum(COUNTS)
    for row, slot in enumerate(slots):
        for change, end, count in zip(CHANGES.get(slot, []), ends, COUNTS, strict=False):
            if change is not None:
                y[row, end - count : end] += low_rank(x[row : row + 1], change)[0]
    return y


BACKENDS = ["numpy", pytest.param("jit", marks=needs_numba), EMULATED]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_product_is_the_one_of_the_definition(name: str) -> None:
    backend = backend_of(name)
    found = product(backend, loaded(backend), X, SLOTS)
    np.testing.assert_allclose(found, defined(X, SLOTS), rtol=1e-5, atol=1e-4)


def test_numpy_in_float64_is_the_definition() -> None:
    backend = load_backend("numpy", "float64")
    found = product(backend, loaded(backend), X.astype(np.float64), SLOTS)
    np.testing.assert_allclose(found, defined(X, SLOTS), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_has_the_bits_that_it_has_alone(name: str) -> None:
    backend = backend_of(name)
    weight = loaded(backend)
    together = product(backend, weight, X, SLOTS)
    for row, slot in enumerate(SLOTS):
        alone = product(backend, weight, X[row : row + 1], [slot])
        assert together[row].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("name", BACKENDS)
def test_rows_without_an_adapter_have_the_bits_of_a_matrix_without_slots(name: str) -> None:
    backend = backend_of(name)
    plain = backend.linear(X, backend.load_linear(WEIGHT.shape, [WEIGHT]))
    found = product(backend, loaded(backend), X, [0] * len(X))
    assert found.tobytes() == np.array(plain).tobytes()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_slot_keeps_nothing_of_the_adapter_before(name: str) -> None:
    backend = backend_of(name)
    weight, fresh, busy = loaded(backend), loaded(backend), loaded(backend)
    for each in (weight, busy):
        backend.adapters.put(each, 1, random_changes(7, (6, 6, 6)))
    backend.adapters.put(weight, 1, CHANGES[2])
    found = product(backend, weight, X, [1] * len(X), before=busy)
    assert found.tobytes() == product(backend, fresh, X, [2] * len(X)).tobytes()


@pytest.mark.parametrize("activations", ["float32", "int8"])
@pytest.mark.parametrize("codes", ["int8", "int4"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_quantised_matrix_has_adapters(name: str, codes: Codes, activations: str) -> None:
    """The product with codes stays as it is, rounded activations included."""
    form = Form(codes=codes, group=32, has_offsets=False)
    rows, parts = quantised(form, sum(COUNTS), NUM_INPUTS), [(sum(COUNTS), form)]
    backend = backend_of(name, activations=activations)
    plain = backend.load_linear(WEIGHT.shape, [rows], parts=parts)
    weight = backend.adapters.with_slots(
        backend.load_linear(WEIGHT.shape, [rows], parts=parts), SHAPE
    )
    for slot, changes in CHANGES.items():
        backend.adapters.put(weight, slot, changes)
    wanted = defined(X, SLOTS, np.array(backend.linear(X, plain)))
    found = product(backend, weight, X, SLOTS)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
