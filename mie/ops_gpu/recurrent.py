"""Implement the operators of recurrent layers, with float32 states on the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.errors import UnsupportedModelError
from mie.ops.backend import Array, StepBatch
from mie.ops.layers.operators import RecurrentOperators, RecurrentWeights
from mie.ops.layers.recurrent import StateCache
from mie.ops.layers.recurrent_shape import RecurrentShape
from mie.ops_gpu.arena import Empty
from mie.ops_gpu.arrays import block_threads, kernel_type, next_power_of_two, to_host
from mie.ops_gpu.batch import to_device
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.queue import Queue, in_queue
from mie.ops_gpu.steps import Steps

CONV_TILE = 64
"""Tokens of a sequence that one thread convolves."""

COLUMNS, MAX_KEYS = 32, 256
"""Columns of a state that a block of kernels/recurrence.cu has, and their most elements."""


class CupyRecurrent(RecurrentOperators):
    """The operators of layers that keep a state."""

    def __init__(
        self, name: str, launcher: Launcher, queue: Queue, empty: Empty, steps: Steps
    ) -> None:
        self._name, self._launcher, self._xp = name, launcher, launcher.xp
        self._queue, self._empty, self._steps = queue, empty, steps

    def state_bytes(self, shape: RecurrentShape) -> int:
        return shape.num_elements * np.dtype(np.float32).itemsize

    @in_queue
    def new_state_cache(self, shape: RecurrentShape, num_layers: int, num_slots: int) -> StateCache:
        if shape.key_dim > MAX_KEYS:
            raise UnsupportedModelError(
                f"a recurrent state has {shape.key_dim} rows; the {self._name} backend takes up to "
                f"{MAX_KEYS} (choose backend numpy)"
            )
        self._steps.has_states = True
        s, first = shape, (num_layers, num_slots)
        columns = (*first, s.kernel_size - 1, s.num_channels)
        states = (*first, s.num_heads, s.key_dim, s.value_dim)
        zeros = self._xp.zeros
        return StateCache(columns=zeros(columns, np.float32), states=zeros(states, np.float32))

    @in_queue
    def copy_states(self, states: StateCache, src: Sequence[int], dst: Sequence[int]) -> None:
        sources, targets = (self._xp.asarray(np.array(ids, np.int64)) for ids in (src, dst))
        for array in (states.columns, states.states):
            array[:, targets] = array[:, sources]

    @in_queue
    def export_state(self, states: StateCache, slot: int) -> bytes:
        return b"".join(to_host(a[:, slot]).tobytes() for a in (states.columns, states.states))

    @in_queue
    def import_state(self, states: StateCache, slot: int, data: bytes) -> None:
        start = 0
        for array in (states.columns, states.states):
            own = array[:, slot]
            numbers = np.frombuffer(data, np.float32, own.size, start)
            array[:, slot] = self._xp.asarray(numbers.reshape(own.shape))
            start += numbers.nbytes

    def convolve(
        self, x: Array, weights: RecurrentWeights, states: StateCache, layer: int, batch: StepBatch
    ) -> Array:
        on_device, shape = to_device(self._xp, batch), weights.shape
        columns, channels = states.columns[layer], shape.num_channels
        out = self._empty("convolved", (len(x), channels), x.dtype)
        num_tiles = ceil_div(max(1, on_device.max_prefill_queries), CONV_TILE)
        threads = block_threads(channels, 128)
        grid = (ceil_div(channels, threads), len(on_device.seq_lens))
        of = (on_device.cu_seqlens_q, on_device.slots, on_device.fresh)
        parameters = f"<{kernel_type(x)}, {shape.kernel_size}>"
        sizes = np.int32(channels), np.int32(CONV_TILE), np.int32(shape.kind == "conv")
        kernel = self._launcher.kernel("causal_conv.cu", "causal_conv" + parameters)
        arrays = (x, weights.conv, weights.conv_bias, columns, *of, out)
        kernel((*grid, num_tiles), (threads,), (*arrays, *sizes))
        if num_tiles > 1:
            keep = self._launcher.kernel("causal_conv.cu", "keep_columns" + parameters)
            keep(grid, (threads,), (x, columns, *of, sizes[0], sizes[2]))
        return out

    def recur(
        self,
        mixed: Array,
        small: Array,
        weights: RecurrentWeights,
        states: StateCache,
        layer: int,
        batch: StepBatch,
    ) -> Array:
        on_device, w, s = to_device(self._xp, batch), weights, weights.shape
        out = self._empty("recurrence", (len(mixed), s.width), mixed.dtype)
        is_delta = s.kind == "delta"
        kind = "true" if is_delta else "false"
        name = f"recurrence<{kernel_type(mixed)}, {keys_of(s.key_dim)}, {kind}>"
        arrays: list[Any] = [mixed, small, w.rates, w.dt_bias, None if is_delta else w.skip]
        arrays += [states.states[layer], on_device.cu_seqlens_q, on_device.slots, on_device.fresh]
        sizes = map(np.int32, (s.num_groups, s.num_heads, s.key_dim, s.value_dim))
        grid = (ceil_div(s.value_dim, COLUMNS), s.num_heads, len(on_device.seq_lens))
        kernel = self._launcher.kernel("recurrence.cu", name)
        kernel(grid, (128,), (*arrays, out, *sizes, np.float32(w.most)))
        return out

    def gated_norm(self, x: Array, gate: Array, weights: RecurrentWeights) -> Array:
        w, (num_tokens, width) = weights, x.shape
        out = self._empty("gated norm", x.shape, x.dtype)
        kernel = self._launcher.kernel("rms_norm.cu", f"gated_norm<{kernel_type(x)}>")
        grid, threads = (num_tokens, width // w.norm_size), block_threads(w.norm_size)
        sizes = np.int32(w.norm_size), np.int32(len(w.norm)), np.float32(w.eps)
        kernel(grid, (threads,), (x, gate, w.norm, out, *sizes, np.int32(w.gates_first)))
        return out


def keys_of(key_dim: int) -> int:
    """Return the elements of a column that a lane has: a fourth, rounded up to a power of two."""
    return next_power_of_two(ceil_div(key_dim, 4))
