"""Record the operators of recurrent layers."""

from typing import Any

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops.backend import StepBatch
from mie.ops.layers.recurrent import StateCache
from mie.ops.layers.recurrent_operators import RecurrentWeights
from mie.ops.layers.recurrent_shape import RecurrentShape
from mie.ops_jit.experts import ExpertOperators
from mie.ops_jit.layout import CHANNELS, NUM_SEQS, NUM_TOKENS, ROW_TILE
from mie.ops_jit.program import Program, Value, operator

KERNELS = ("convolve", "gated_delta", "mamba", "gated_norm", "sigmoid_mul")


class JitRecurrent(ExpertOperators):
    """The part of `JitBackend` that recurrent layers need. States are NumPy's arrays."""

    _recording: Program | None = None
    _has_states = False

    def new_state_cache(self, shape: RecurrentShape, num_layers: int, num_slots: int) -> StateCache:
        self._has_states = True
        return super().new_state_cache(shape, num_layers, num_slots)

    @operator
    def short_conv(
        self,
        bcx: Value,
        weights: RecurrentWeights,
        states: StateCache,
        layer: int,
        batch: StepBatch,
    ) -> Any:
        return self._convolved(bcx, weights, states, layer, is_gated=True)

    @operator
    def conv_silu(
        self, x: Value, weights: RecurrentWeights, states: StateCache, layer: int, batch: StepBatch
    ) -> Any:
        return self._convolved(x, weights, states, layer, is_gated=False)

    def _convolved(
        self, x: Value, weights: RecurrentWeights, states: StateCache, layer: int, *, is_gated: bool
    ) -> Value:
        program, shape = self._program, weights.shape
        channels = shape.num_channels
        out = program.value(NUM_TOKENS, channels)
        program.need_scratch(64 * shape.kernel_size)
        program.emit(
            "convolve", NUM_SEQS, 1, ceil_div(channels, CHANNELS),
            x, states.columns[layer], weights.conv, weights.conv_bias, out,
            channels, shape.kernel_size, int(is_gated),
        )  # fmt: skip
        return out

    @operator
    def gated_delta(
        self,
        qkv: Value,
        gates: Value | Floats,
        weights: RecurrentWeights,
        states: StateCache,
        layer: int,
        batch: StepBatch,
    ) -> Any:
        program, w, s = self._program, weights, weights.shape
        out = program.value(NUM_TOKENS, s.width)
        program.need_scratch(2 * 64 * ceil_div(s.key_dim, 16))
        program.emit(
            "gated_delta", NUM_SEQS, 1, s.num_heads,
            qkv, program.maybe_given(gates), states.states[layer], out, w.rates, w.dt_bias,
            s.num_groups, s.num_heads, s.key_dim, s.value_dim, float(w.most),
        )  # fmt: skip
        return out

    @operator
    def mamba(
        self,
        xbc: Value,
        dt: Value | Floats,
        weights: RecurrentWeights,
        states: StateCache,
        layer: int,
        batch: StepBatch,
    ) -> Any:
        program, w, s = self._program, weights, weights.shape
        out = program.value(NUM_TOKENS, s.width)
        program.need_scratch(4 * s.key_dim)
        program.emit(
            "mamba", NUM_SEQS, 1, s.num_heads,
            xbc, program.maybe_given(dt), states.states[layer], out, w.rates, w.dt_bias, w.skip,
            s.num_groups, s.num_heads, s.key_dim, s.value_dim,
        )  # fmt: skip
        return out

    @operator
    def gated_norm(self, x: Value, gate: Value | Floats, weights: RecurrentWeights) -> Any:
        program, w, width = self._program, weights, x.storage.width
        out = program.value(NUM_TOKENS, width)
        program.need_scratch(4 * w.norm_size)
        program.emit(
            "gated_norm", NUM_TOKENS, ROW_TILE, 1,
            x, program.maybe_given(gate), w.norm, out, width, w.norm_size, w.norm.size,
            float(w.eps), NUM_TOKENS, int(w.gates_first),
        )  # fmt: skip
        return out

    @operator
    def sigmoid_mul(self, x: Value, gate: Value | Floats) -> Any:
        program, width = self._program, x.storage.width
        out = program.value(NUM_TOKENS, width)
        gate_width = 1 if gate.shape[-1] == 1 else width
        arguments = x, program.maybe_given(gate), out, width, gate_width, NUM_TOKENS
        program.emit("sigmoid_mul", NUM_TOKENS, ROW_TILE, 1, *arguments)
        return out
