"""Implement norms and gated activations, which treat each row alone."""

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Array, Backend
from mie.ops.layers.expert_operators import ACTIVATIONS, Activation
from mie.ops_gpu.arena import Empty
from mie.ops_gpu.arrays import block_threads, kernel_type
from mie.ops_gpu.launcher import Launcher


class RowOperators(Backend):
    """The part of `CupyBackend` that normalises, activates and gates."""

    launcher: Launcher
    _empty: Empty

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array:
        out = self._empty("norm", x.shape, x.dtype)
        self._normalise(x, weight, None, out, x.shape, eps)
        return out

    def norm_add(self, x: Array, weight: Array, eps: float, residual: Array) -> Array:
        self._normalise(x, weight, residual, residual, x.shape, eps)
        return residual

    def _normalise(
        self,
        x: Array,
        weight: Array,
        residual: Array | None,
        out: Array,
        shape: tuple[int, int],
        eps: float,
    ) -> None:
        """Normalise rows of a matrix of that shape: as many columns as there are weights."""
        (num_rows, stride), threads = shape, block_threads(len(weight) // 4)
        sizes = np.int32(len(weight)), np.int32(stride), np.float32(eps)
        kernel = self.launcher.kernel("rms_norm.cu", f"rms_norm<{kernel_type(x)}>")
        kernel((num_rows,), (threads,), (x, weight, residual, out, *sizes))

    def head_norm(self, qkv: Array, first: int, last: int, weight: Array, eps: float) -> None:
        num_tokens, num_heads, head_dim = qkv.shape
        if len(weight) != head_dim:
            heads = qkv.reshape(-1)[first * head_dim :]
            self._normalise(heads, weight, None, heads, (num_tokens, num_heads * head_dim), eps)
            return
        count, warps = last - first, 4
        sizes = (np.int32(n) for n in (num_tokens, num_heads, first, count, head_dim))
        kernel = self.launcher.kernel("rms_norm.cu", f"head_norm<{kernel_type(qkv)}>")
        grid = (ceil_div(num_tokens * count, warps),)
        kernel(grid, (32 * warps,), (qkv, weight, *sizes, np.float32(eps)))

    def silu_mul(self, gate_up: Array) -> Array:
        return self.activate(gate_up, "silu")

    def gelu_mul(self, gate_up: Array) -> Array:
        return self.activate(gate_up, "gelu_tanh")

    def clamped_silu_mul(self, gate_up: Array) -> Array:
        return self.activate(gate_up, "clamped_silu")

    def activate(self, gate_up: Array, activation: Activation) -> Array:
        num_tokens, dim = gate_up.shape[0], gate_up.shape[1] // 2
        out = self._empty("gated", (num_tokens, dim), gate_up.dtype)
        threads = block_threads(dim)
        kernel = self.launcher.kernel("gated_mul.cu", f"gated_mul<{kernel_type(gate_up)}>")
        numbers = np.int32(dim), np.int32(ACTIVATIONS.index(activation))
        kernel((num_tokens, ceil_div(dim, threads)), (threads,), (gate_up, out, *numbers))
        return out

    def soft_cap(self, x: Array, cap: float) -> Array:
        """Bound ``x`` itself."""
        (num_rows, dim), threads = x.shape, block_threads(x.shape[1])
        kernel = self.launcher.kernel("gated_mul.cu", f"soft_cap<{kernel_type(x)}>")
        grid = (num_rows, ceil_div(dim, threads))
        kernel(grid, (threads,), (x, np.int32(dim), np.float32(cap)))
        return x

    def sigmoid_mul(self, x: Array, gate: Array) -> Array:
        num_tokens, dim = x.shape
        out = self._empty("sigmoid", x.shape, x.dtype)
        threads = block_threads(dim)
        kernel = self.launcher.kernel("gated_mul.cu", f"sigmoid_mul<{kernel_type(x)}>")
        numbers = np.int32(dim), np.int32(gate.shape[1])
        kernel((num_tokens, ceil_div(dim, threads)), (threads,), (x, gate, out, *numbers))
        return out
