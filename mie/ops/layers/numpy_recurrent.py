"""Implement the operators of recurrent layers with the plain NumPy definitions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mie.ops import activation, norm
from mie.ops.arrays import Bools, Floats, Ints
from mie.ops.backend import Backend, StepBatch
from mie.ops.layers import recurrent
from mie.ops.layers.recurrent import StateCache, runs
from mie.ops.layers.recurrent_operators import RecurrentWeights
from mie.ops.layers.recurrent_shape import RecurrentShape

Recurrence = Callable[..., Floats]
"""`recurrent.gated_delta` or `recurrent.mamba`: its last argument is the state."""


class NumpyRecurrent(Backend):
    """The part of `NumpyBackend` that recurrent layers need."""

    dtype: np.dtype[Any]

    def state_bytes(self, shape: RecurrentShape) -> int:
        return shape.num_elements * self.dtype.itemsize

    def new_state_cache(self, shape: RecurrentShape, num_layers: int, num_slots: int) -> StateCache:
        return StateCache.zeros(shape, num_layers, num_slots, self.dtype)

    def copy_states(self, states: StateCache, src: Sequence[int], dst: Sequence[int]) -> None:
        recurrent.move_states(states, states, np.asarray(src), np.asarray(dst))

    def export_state(self, states: StateCache, slot: int) -> bytes:
        return states.columns[:, slot].tobytes() + states.states[:, slot].tobytes()

    def import_state(self, states: StateCache, slot: int, data: bytes) -> None:
        start = 0
        for array in (states.columns, states.states):
            own = array[:, slot]
            own[...] = np.frombuffer(data, own.dtype, own.size, start).reshape(own.shape)
            start += own.nbytes

    def short_conv(
        self,
        bcx: Floats,
        weights: RecurrentWeights,
        states: StateCache,
        layer: int,
        batch: StepBatch,
    ) -> Floats:
        b, c, x = np.split(bcx, 3, axis=1)
        y = self._convolve(b * x, weights, states, layer, batch)
        y *= c
        return y

    def conv_silu(
        self, x: Floats, weights: RecurrentWeights, states: StateCache, layer: int, batch: StepBatch
    ) -> Floats:
        return activation.silu(self._convolve(x, weights, states, layer, batch))

    def gated_delta(
        self,
        qkv: Floats,
        gates: Floats,
        weights: RecurrentWeights,
        states: StateCache,
        layer: int,
        batch: StepBatch,
    ) -> Floats:
        w = weights
        of_tokens = recurrent.delta_inputs(qkv, gates, w.shape, w.rates, w.dt_bias, w.most)
        return self._recur(recurrent.gated_delta, of_tokens, (), states.states[layer], batch)

    def mamba(
        self,
        xbc: Floats,
        dt: Floats,
        weights: RecurrentWeights,
        states: StateCache,
        layer: int,
        batch: StepBatch,
    ) -> Floats:
        w = weights
        of_tokens = recurrent.mamba_inputs(xbc, dt, w.shape, w.rates, w.dt_bias)
        return self._recur(recurrent.mamba, of_tokens, (w.skip,), states.states[layer], batch)

    def gated_norm(self, x: Floats, gate: Floats, weights: RecurrentWeights) -> Floats:
        w = weights
        return norm.gated_norm(x, gate, w.norm, w.norm_size, w.eps, gates_first=w.gates_first)

    def sigmoid_mul(self, x: Floats, gate: Floats) -> Floats:
        return x * activation.sigmoid(gate)

    def _convolve(
        self, x: Floats, weights: RecurrentWeights, states: StateCache, layer: int, batch: StepBatch
    ) -> Floats:
        kernel = weights.conv.reshape(weights.shape.kernel_size, -1)
        of = batch.cu_seqlens_q, *slots_of(batch)
        return recurrent.causal_conv(x, kernel, weights.conv_bias, states.columns[layer], of)

    def _recur(
        self,
        recurrence: Recurrence,
        of_tokens: Sequence[Floats],
        others: Sequence[Floats],
        states: Floats,
        batch: StepBatch,
    ) -> Floats:
        """Run a recurrence over each sequence. ``of_tokens`` have a row for each token."""
        pieces = []
        for begin, end, slot, is_fresh in runs(batch.cu_seqlens_q, *slots_of(batch)):
            if is_fresh:
                states[slot] = 0
            own = [each[begin:end] for each in of_tokens]
            pieces.append(recurrence(*own, *others, states[slot]))
        y = np.concatenate(pieces)
        return y.reshape(len(y), -1)


def slots_of(batch: StepBatch) -> tuple[Ints, Bools]:
    """Return the slots of a batch's sequences, and which of them are fresh."""
    assert batch.slots is not None, "the batch has no slots"
    assert batch.fresh is not None, "the batch has no slots"
    return batch.slots, batch.fresh
