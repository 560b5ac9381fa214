"""Check that the operators of recurrent layers equal their definitions on every backend.

The definitions run in float64 on the numbers that the backend was given.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled import needs_numba
from test_backend_contract import MACHINES, Machine, machine_params, normal

from mie.config.engine import EngineConfig
from mie.load.backends import load_backend
from mie.ops.activation import sigmoid
from mie.ops.backend import StepBatch
from mie.ops.layers.operators import RecurrentWeights
from mie.ops.layers.recurrent import gated_norm
from mie.ops.layers.recurrent_shape import RecurrentShape
from mie.ops.numpy_backend import NumpyBackend

Outputs = dict[str, np.ndarray]
SHAPES = {
    "conv": RecurrentShape(
        kind="conv", kernel_size=3, num_groups=0, num_heads=1, key_dim=0, value_dim=37
    ),
    "delta": RecurrentShape(
        kind="delta", kernel_size=4, num_groups=2, num_heads=4, key_dim=12, value_dim=83
    ),
    "mamba": RecurrentShape(
        kind="mamba", kernel_size=2, num_groups=1, num_heads=3, key_dim=9, value_dim=20
    ),
}
NUM_SLOTS, NUM_TOKENS = 5, 14
# A state is a sum over all tokens, of terms that shrink.
TOLERANCE = {"float32": 5e-6, "float64": 1e-13}


@pytest.fixture(params=machine_params(MACHINES))
def machine(request: pytest.FixtureRequest) -> Machine:
    return request.param()


def batch_of(counts: list[int], slots: list[int], fresh: list[bool]) -> StepBatch:
    """Return a batch of sequences, of which only the numbers of tokens and the slots matter."""
    ends = np.cumsum([0, *counts])
    zeros = np.zeros(ends[-1], np.int64)
    return StepBatch(
        token_ids=zeros,
        positions=zeros,
        slot_mapping=zeros,
        cu_seqlens_q=ends,
        seq_lens=np.array(counts) + np.where(fresh, 0, 3),
        block_tables=np.zeros((len(counts), 1), np.int64),
        logits_rows=zeros[:1],
        slots=np.array(slots),
        fresh=np.array(fresh),
    )


def weights_of(load: Callable[[np.ndarray], Any], shape: RecurrentShape) -> RecurrentWeights:
    heads, channels = shape.num_heads, shape.num_channels
    is_mamba = shape.kind == "mamba"
    return RecurrentWeights(
        shape=shape,
        conv=load(normal(shape.kernel_size * channels, seed=1)),
        conv_bias=load(normal(channels, seed=2)) if is_mamba else None,
        rates=load(np.exp(normal(heads, seed=3))),
        dt_bias=load(normal(heads, seed=4)),
        skip=load(normal(heads, seed=5)),
        most=2.0,
        norm=load(normal(shape.width if is_mamba else shape.value_dim, seed=6)),
        norm_size=shape.width // shape.num_groups if is_mamba else shape.value_dim,
        gates_first=is_mamba,
        eps=1e-5,
    )


class Layer:
    """The operators of a layer on a backend, and its states."""

    def __init__(
        self,
        backend: Any,
        put: Callable[[np.ndarray], Any],
        kind: str,
        get: Callable[[Any], np.ndarray] = np.array,
    ) -> None:
        self.backend, self.put, self.get = backend.recurrent, put, get
        self.shape = SHAPES[kind]
        self.weights = weights_of(lambda array: backend.load_vector(array), self.shape)
        self.states = self.backend.new_state_cache(self.shape, 2, NUM_SLOTS)
        for index, array in enumerate((self.states.columns, self.states.states)):
            array[...] = put(normal(*array.shape, seed=7 + index))

    def run(self, batch: StepBatch, tokens: slice) -> Outputs:
        """Return the results for these tokens of the second layer."""
        kind, of = self.shape.kind, (self.weights, self.states, 1, batch)
        width = 3 * self.shape.width if kind == "conv" else self.shape.num_channels
        x = self.put(normal(NUM_TOKENS, width)[tokens])
        if kind == "conv":
            return {"short_conv": self.get(self.backend.convolve(x, *of))}
        small = normal(NUM_TOKENS, self.shape.num_heads * (2 if kind == "delta" else 1), seed=1)
        mixed = self.put(self.get(self.backend.convolve(x, *of)))
        y = self.put(self.get(self.backend.recur(mixed, self.put(small[tokens]), *of)))
        gate = self.put(normal(NUM_TOKENS, self.shape.width, seed=2)[tokens])
        normed = self.get(self.backend.gated_norm(y, gate, self.weights))
        return {"conv_silu": self.get(mixed), "recurrence": self.get(y), "gated_norm": normed}

    def planes(self) -> list[np.ndarray]:
        """Return copies of the columns and of the states."""
        return [self.get(each) for each in (self.states.columns, self.states.states)]


def layer_on(machine: Machine, kind: str) -> Layer:
    return Layer(machine.backend, machine.put, kind, machine.get)


BATCH = batch_of([1, 6, 2, 5], [3, 0, 4, 1], [False, True, False, True])


@pytest.mark.parametrize("kind", SHAPES)
def test_the_operators_equal_their_definitions(machine: Machine, kind: str) -> None:
    own = layer_on(machine, kind)
    wanted = Layer(NumpyBackend("float64"), np.array, kind)
    before = own.planes()
    got, expected = own.run(BATCH, slice(None)), wanted.run(BATCH, slice(None))
    atol = TOLERANCE[machine.dtype]
    for name, array in expected.items():
        np.testing.assert_allclose(got[name], array, atol=atol * np.abs(array).max(), err_msg=name)
    for index, (array, other) in enumerate(zip(own.planes(), wanted.planes(), strict=True)):
        np.testing.assert_allclose(array, other, atol=atol * 10, err_msg=str(index))
        np.testing.assert_array_equal(array[0], before[index][0])  # another layer
        np.testing.assert_array_equal(array[:, 2], before[index][:, 2])  # another slot


@pytest.mark.parametrize("kind", SHAPES)
def test_chunks_and_batches_change_no_bit(machine: Machine, kind: str) -> None:
    """The second sequence runs alone, in chunks of 1, 3 and 2 tokens, in another slot."""
    together, alone = layer_on(machine, kind), layer_on(machine, kind)
    whole = together.run(BATCH, slice(None))
    parts, start = [], 1
    for count in (1, 3, 2):
        batch = batch_of([count], [2], [start == 1])
        parts.append(alone.run(batch, slice(start, start + count)))
        start += count
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array[1:7])
    for own, other in zip(together.planes(), alone.planes(), strict=True):
        np.testing.assert_array_equal(own[1, 0], other[1, 2])


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("name", ["numpy", pytest.param("jit", marks=needs_numba)])
def test_threads_change_no_bit(name: str, kind: str) -> None:
    """Decodes and chunks, with one thread, with four, and with the plain operators."""
    batch = batch_of([1, 6, 1, 1, 5], [3, 0, 4, 1, 2], [False, True, True, False, False])

    def results(backend: Any) -> Outputs:
        return Layer(backend, lambda array: array.astype(np.float32), kind).run(batch, slice(None))

    config = {"batch_invariant": True}
    one, four = (
        results(load_backend(name, "float32", EngineConfig(num_threads=number, **config)))
        for number in (1, 4)
    )
    plain = results(NumpyBackend("float32")) if name == "numpy" else one
    for key, array in one.items():
        np.testing.assert_array_equal(four[key], array)
        np.testing.assert_array_equal(plain[key], array)


def test_states_are_copied_exported_and_imported(machine: Machine) -> None:
    own = layer_on(machine, "delta")
    backend, states = own.backend, own.states
    planes = own.planes()
    backend.copy_states(states, [0, 1], [1, 3])  # both are read before one is written
    for array, before in zip(own.planes(), planes, strict=True):
        np.testing.assert_array_equal(array[:, [1, 3]], before[:, [0, 1]])
        np.testing.assert_array_equal(array[:, [0, 2, 4]], before[:, [0, 2, 4]])
    data = backend.export_state(states, 2)
    assert len(data) == 2 * backend.state_bytes(own.shape)
    backend.import_state(states, 4, data)
    for array, before in zip(own.planes(), planes, strict=True):
        np.testing.assert_array_equal(array[:, 4], before[:, 2])


def test_gated_attention(machine: Machine) -> None:
    x, gate = normal(5, 37), 3 * normal(5, 37, seed=1)
    got = machine.get(machine.backend.sigmoid_mul(machine.put(x), machine.put(gate)))
    np.testing.assert_allclose(got, x * sigmoid(gate), rtol=2e-6, atol=1e-7)


def test_extreme_gates_give_numbers() -> None:
    """Gates of ±200 overflow float32's exp. The results are the limits."""
    backend = NumpyBackend("float32")
    gate = np.array([[-200.0, 200.0]], np.float32)
    with np.errstate(all="raise", under="ignore", over="raise"):
        y = backend.sigmoid_mul(np.ones((1, 2), np.float32), gate)
    np.testing.assert_array_equal(y, [[0.0, 1.0]])


@pytest.mark.parametrize("gates_first", [False, True])
def test_the_order_of_gate_and_norm_matters(gates_first: bool) -> None:
    x, gate, weight = normal(3, 8), normal(3, 8, seed=1), normal(4, seed=2)
    silu = gate / (1 + np.exp(-gate))
    whole = (x * silu if gates_first else x).reshape(3, 2, 4)
    normed = whole / np.sqrt((whole**2).mean(-1, keepdims=True) + 1e-5) * weight
    wanted = normed.reshape(3, 8) * (1 if gates_first else silu)
    got = gated_norm(x, gate, weight, 4, 1e-5, gates_first=gates_first)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)


def test_replaced_slots_read_no_old_state() -> None:
    """A fresh sequence ignores even a slot of NaN."""
    layer = Layer(NumpyBackend("float64"), np.array, "mamba")
    layer.states.columns[:, 0] = layer.states.states[:, 0] = np.nan
    batch = batch_of([6], [0], [True])
    assert all(np.isfinite(each).all() for each in layer.run(batch, slice(1, 7)).values())
    stale = replace(batch, fresh=np.array([False]))
    layer.states.states[:, 0] = np.nan
    assert not np.isfinite(layer.run(stale, slice(1, 7))["recurrence"]).any()
