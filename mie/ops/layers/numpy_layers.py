"""Implement the operators of sparse and recurrent layers with the NumPy definitions."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mie.ops.activation import silu
from mie.ops.arrays import Floats
from mie.ops.backend import Backend, StepBatch
from mie.ops.layers import experts, recurrent
from mie.ops.layers.operators import (
    ExpertOperators,
    ExpertWeights,
    RecurrentOperators,
    RecurrentWeights,
    unchanged,
)
from mie.ops.layers.recurrent import StateCache, runs, slots_of
from mie.ops.layers.recurrent_shape import RecurrentShape

RULES: dict[str, Callable[..., Floats]] = {"delta": recurrent.gated_delta, "mamba": recurrent.mamba}
"""The recurrence of each kind of layer. The state is the last argument."""


class NumpyExperts(ExpertOperators):
    """The operators of sparse layers. They multiply by the matrices of a backend."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.whole = backend, unchanged

    def route(self, x: Floats, weights: ExpertWeights) -> Floats:
        logits = self.backend.linear(x, weights.router)
        if weights.bias is not None:
            return experts.route_by_sigmoid(logits, weights.bias, weights.num_chosen)
        return experts.route(logits, weights.num_chosen, weights.is_normalised)

    def compute(
        self, x: Floats, routed: Floats, weights: ExpertWeights, residual: Floats
    ) -> Floats:
        backend = self.backend

        def results(expert: int, rows: Floats) -> Floats:
            gate_up = backend.linear(rows, weights.gate_up[expert])
            gated = backend.activate(gate_up, weights.activation)
            y: Floats = self.whole(backend.linear(gated, weights.down[expert]), x.shape[-1])
            return y

        return experts.experts(x, routed, results, residual)


class NumpyRecurrent(RecurrentOperators):
    """The operators of layers that keep a state, in one dtype."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype

    def state_bytes(self, shape: RecurrentShape) -> int:
        return shape.num_elements * self._dtype.itemsize

    def new_state_cache(self, shape: RecurrentShape, num_layers: int, num_slots: int) -> StateCache:
        return StateCache.zeros(shape, num_layers, num_slots, self._dtype)

    def convolve(
        self, x: Floats, weights: RecurrentWeights, states: StateCache, layer: int, batch: StepBatch
    ) -> Floats:
        kernel = weights.conv.reshape(weights.shape.kernel_size, -1)
        of = batch.cu_seqlens_q, *slots_of(batch)
        more = kernel, weights.conv_bias, states.columns[layer], of
        if weights.shape.kind != "conv":
            return silu(recurrent.causal_conv(x, *more))
        b, c, x = np.split(x, 3, axis=1)
        y = recurrent.causal_conv(b * x, *more)
        y *= c
        return y

    def recur(
        self,
        mixed: Floats,
        small: Floats,
        weights: RecurrentWeights,
        states: StateCache,
        layer: int,
        batch: StepBatch,
    ) -> Floats:
        others: tuple[Floats, ...] = ()
        w, pieces = weights, []
        of = w.shape, w.rates, w.dt_bias
        if w.shape.kind == "delta":
            inputs = recurrent.delta_inputs(mixed, small, *of, w.most)
        else:
            inputs, others = recurrent.mamba_inputs(mixed, small, *of), (w.skip,)
        own_states = states.states[layer]
        for begin, end, slot, is_fresh in runs(batch.cu_seqlens_q, *slots_of(batch)):
            if is_fresh:
                own_states[slot] = 0
            own = [each[begin:end] for each in inputs]
            pieces.append(RULES[w.shape.kind](*own, *others, own_states[slot]))
        y = np.concatenate(pieces)
        return y.reshape(len(y), -1)

    def gated_norm(self, x: Floats, gate: Floats, weights: RecurrentWeights) -> Floats:
        w = weights
        return recurrent.gated_norm(x, gate, w.norm, w.norm_size, w.eps, gates_first=w.gates_first)
