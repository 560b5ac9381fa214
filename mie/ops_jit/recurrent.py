"""Record the operators of recurrent layers."""

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops.backend import StepBatch
from mie.ops.layers.operators import RecurrentOperators, RecurrentWeights
from mie.ops.layers.recurrent import StateCache
from mie.ops.layers.recurrent_shape import RecurrentShape
from mie.ops_jit.layout import CHANNELS, NUM_SEQS, NUM_TOKENS, ROW_TILE
from mie.ops_jit.program import Value
from mie.ops_jit.recorder import Recorder, operator

KERNELS = ("convolve", "gated_delta", "mamba", "gated_norm", "sigmoid_mul")


class JitRecurrent(RecurrentOperators):
    """The operators of layers that keep a state. States are NumPy's arrays."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def state_bytes(self, shape: RecurrentShape) -> int:
        return 4 * shape.num_elements

    def new_state_cache(self, shape: RecurrentShape, num_layers: int, num_slots: int) -> StateCache:
        self.recorder.more_kernels = KERNELS
        return StateCache.zeros(shape, num_layers, num_slots, np.dtype(np.float32))

    @operator
    def convolve(
        self, x: Value, weights: RecurrentWeights, states: StateCache, layer: int, batch: StepBatch
    ) -> Value:
        program, shape = self.recorder.program, weights.shape
        channels = shape.num_channels
        out = program.value(NUM_TOKENS, channels)
        program.need_scratch(64 * shape.kernel_size)
        program.emit(
            "convolve", NUM_SEQS, 1, ceil_div(channels, CHANNELS),
            x, states.columns[layer], weights.conv, weights.conv_bias, out,
            channels, shape.kernel_size, int(shape.kind == "conv"),
        )  # fmt: skip
        return out

    @operator
    def recur(
        self,
        mixed: Value,
        small: Value | Floats,
        weights: RecurrentWeights,
        states: StateCache,
        layer: int,
        batch: StepBatch,
    ) -> Value:
        program, w, s = self.recorder.program, weights, weights.shape
        out = program.value(NUM_TOKENS, s.width)
        inputs = mixed, program.maybe_given(small), states.states[layer], out, w.rates, w.dt_bias
        sizes = s.num_groups, s.num_heads, s.key_dim, s.value_dim
        if s.kind == "delta":
            program.need_scratch(2 * 64 * ceil_div(s.key_dim, 16))
            most = float(w.most)
            program.emit("gated_delta", NUM_SEQS, 1, s.num_heads, *inputs, *sizes, most)
        else:
            program.need_scratch(4 * s.key_dim)
            program.emit("mamba", NUM_SEQS, 1, s.num_heads, *inputs, w.skip, *sizes)
        return out

    @operator
    def gated_norm(self, x: Value, gate: Value | Floats, weights: RecurrentWeights) -> Value:
        program, w, width = self.recorder.program, weights, x.storage.width
        out = program.value(NUM_TOKENS, width)
        program.need_scratch(4 * w.norm_size)
        program.emit(
            "gated_norm", NUM_TOKENS, ROW_TILE, 1,
            x, program.maybe_given(gate), w.norm, out, width, w.norm_size, w.norm.size,
            float(w.eps), NUM_TOKENS, int(w.gates_first),
        )  # fmt: skip
        return out
