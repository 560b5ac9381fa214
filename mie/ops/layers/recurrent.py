"""Compute the layers that keep a state: causal convolution, gated delta rule and Mamba 2.

A batch is ragged, as in attention. Each sequence begins with the state in its slot, or with zeros
if it is fresh, and leaves its new state there. The recurrences are defined token by token, so a
token's result depends on the earlier tokens of its sequence only, and not on how they were batched
or cut into chunks.

    W kernel size      C channels      G groups, or key heads      H heads, or value heads
    Dk key dim, or size of Mamba's state      Dv value dim, or head size      N slots
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mie.ops.activation import sigmoid, silu
from mie.ops.arrays import Bools, Floats, Ints
from mie.ops.backend import StepBatch
from mie.ops.layers.recurrent_shape import RecurrentShape
from mie.ops.norm import rms_norm


@dataclass(frozen=True, kw_only=True, eq=False)
class StateCache:
    """The states of all recurrent layers and slots."""

    columns: Floats  # [L, N, W - 1, C]  the last inputs of the convolution
    states: Floats  # [L, N, H, Dk, Dv]

    @classmethod
    def zeros(
        cls, shape: RecurrentShape, num_layers: int, num_slots: int, dtype: np.dtype[Any]
    ) -> "StateCache":
        """Allocate the states of ``num_layers`` layers."""
        s, first = shape, (num_layers, num_slots)
        return cls(
            columns=np.zeros((*first, s.kernel_size - 1, s.num_channels), dtype),
            states=np.zeros((*first, s.num_heads, s.key_dim, s.value_dim), dtype),
        )

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy whole slots. All are read before any is written."""
        for array in (self.columns, self.states):
            array[:, np.asarray(dst, np.int64)] = array[:, np.asarray(src, np.int64)]

    def export(self, slot: int) -> bytes:
        """Return the contents of a slot in all layers."""
        return self.columns[:, slot].tobytes() + self.states[:, slot].tobytes()

    def fill(self, slot: int, data: bytes) -> None:
        """Fill a slot with the result of `export`."""
        start = 0
        for array in (self.columns, self.states):
            own = array[:, slot]
            own[...] = np.frombuffer(data, own.dtype, own.size, start).reshape(own.shape)
            start += own.nbytes


def slots_of(batch: StepBatch) -> tuple[Ints, Bools]:
    """Return the slots of a batch's sequences, and whether each is fresh."""
    assert batch.slots is not None, "the batch has no slots"
    assert batch.fresh is not None, "the batch has no slots"
    return batch.slots, batch.fresh


def runs(cu_seqlens: Ints, slots: Ints, fresh: Bools) -> Iterator[tuple[int, int, int, bool]]:
    """Yield the tokens begin … end - 1 of each sequence, its slot, and whether it is fresh."""
    ends = cu_seqlens.tolist()
    yield from zip(ends[:-1], ends[1:], slots.tolist(), fresh.tolist(), strict=True)


def causal_conv(
    x: Floats, weight: Floats, bias: Floats | None, columns: Floats, of: tuple[Ints, Ints, Bools]
) -> Floats:
    """Return bias + Σ_j weight[j] · x[t - W + 1 + j] for each token t, as a new array [T, C].

    x [T, C]; weight [W, C], with the last row for the token itself; bias [C]; columns [N, W - 1,
    C], the inputs before a sequence's next token. ``of`` is (cu_seqlens, slots, fresh).
    """
    y = np.empty_like(x)
    for begin, end, slot, is_fresh in runs(*of):
        if is_fresh:
            columns[slot] = 0
        inputs = np.concatenate([columns[slot], x[begin:end]])
        columns[slot] = inputs[end - begin :]
        y[begin:end] = convolve(inputs, weight, bias)
    return y


def convolve(inputs: Floats, weight: Floats, bias: Floats | None) -> Floats:
    """Return the sums of W neighbouring rows of inputs [..., W - 1 + n, C], as [..., n, C].

    Terms are added from the oldest to the newest, and then the bias.
    """
    count = inputs.shape[-2] - len(weight) + 1
    y: Floats = inputs[..., :count, :] * weight[0]
    for j in range(1, len(weight)):
        y += inputs[..., j : j + count, :] * weight[j]
    if bias is not None:
        y += bias
    return y


def delta_inputs(
    qkv: Floats, gates: Floats, shape: RecurrentShape, rates: Floats, dt_bias: Floats, most: float
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return q, k [T, G, Dk], v [T, H, Dv], and beta and decay [T, H] of the gated delta rule.

    qkv [T, C] has queries, keys and values; gates [T, 2 H] has b, then a; rates and dt_bias [H].
    q and k are normalised, and q is divided by sqrt(Dk). beta = most · sigmoid(b), and
    decay = exp(-rates · softplus(a + dt_bias)).
    """
    keys = shape.num_groups * shape.key_dim
    q, k, v = np.split(qkv, [keys, 2 * keys], axis=1)
    heads = len(qkv), shape.num_groups, shape.key_dim
    q = l2_norm(q.reshape(heads)) / qkv.dtype.type(shape.key_dim**0.5)
    b, a = np.split(gates, 2, axis=1)
    beta = sigmoid(b) * qkv.dtype.type(most)
    decay = np.exp(-rates * softplus(a + dt_bias))
    v = v.reshape(len(qkv), shape.num_heads, shape.value_dim)
    return q, l2_norm(k.reshape(heads)), v, beta, decay


def gated_delta(
    q: Floats, k: Floats, v: Floats, beta: Floats, decay: Floats, state: Floats
) -> Floats:
    """Run the gated delta rule over the tokens of one sequence, as a new array [n, H, Dv].

    q, k [n, G, Dk]; v [n, H, Dv]; beta, decay [n, H]; state [H, Dk, Dv], updated in place. Each key
    head serves H / G value heads in a row. Yang et al., 2024, arXiv:2412.06464, equation 10.
    """
    group = len(state) // k.shape[1]
    q, k = np.repeat(q, group, axis=1), np.repeat(k, group, axis=1)
    y = np.empty_like(v)
    for t in range(len(v)):
        state *= decay[t, :, None, None]
        predicted = np.matmul(k[t, :, None], state)[:, 0]
        change = beta[t, :, None] * (v[t] - predicted)
        state += k[t, :, :, None] * change[:, None]
        y[t] = np.matmul(q[t, :, None], state)[:, 0]
    return y


def mamba_inputs(
    xbc: Floats, dt: Floats, shape: RecurrentShape, rates: Floats, dt_bias: Floats
) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return x [T, H, Dv], b and c [T, G, Dk], and the step and decay [T, H] of Mamba 2.

    xbc [T, C]; dt [T, H]; rates and dt_bias [H]. step = softplus(dt + dt_bias), and
    decay = exp(-rates · step).
    """
    keys = shape.num_groups * shape.key_dim
    x, b, c = np.split(xbc, [shape.width, shape.width + keys], axis=1)
    heads = len(xbc), shape.num_groups, shape.key_dim
    step = softplus(dt + dt_bias)
    x = x.reshape(len(xbc), shape.num_heads, shape.value_dim)
    return x, b.reshape(heads), c.reshape(heads), step, np.exp(-rates * step)


def mamba(
    x: Floats, b: Floats, c: Floats, step: Floats, decay: Floats, skip: Floats, state: Floats
) -> Floats:
    """Run Mamba 2 over the tokens of one sequence, as a new array [n, H, Dv].

    x [n, H, Dv]; b, c [n, G, Dk]; step, decay [n, H]; skip [H]; state [H, Dk, Dv], updated in
    place. Each group serves H / G heads in a row. Dao and Gu, 2024, arXiv:2405.21060, section 7.
    """
    group = len(state) // b.shape[1]
    b, c = np.repeat(b, group, axis=1) * step[:, :, None], np.repeat(c, group, axis=1)
    y = np.empty_like(x)
    for t in range(len(x)):
        state *= decay[t, :, None, None]
        state += b[t, :, :, None] * x[t, :, None]
        y[t] = np.matmul(c[t, :, None], state)[:, 0]
    y += skip[:, None] * x
    return y


def gated_norm(
    x: Floats, gate: Floats, weight: Floats, size: int, eps: float, *, gates_first: bool
) -> Floats:
    """Normalise groups of ``size`` channels of x [T, K], times silu(gate), as a new array.

    gate [T, K]. weight [size] is for each group, and a weight [K] for all of them. The gate
    multiplies the normalised x, or with ``gates_first`` the x that is normalised: the
    ``RMSNormGated`` of Qwen3-Next, and of Mamba 2.
    """
    groups = x.shape[0], -1, size
    if gates_first:
        x = x * silu(gate)
    y = rms_norm(x.reshape(groups), weight.reshape(-1, size), eps).reshape(x.shape)
    if not gates_first:
        y *= silu(gate)
    return y


def l2_norm(x: Floats) -> Floats:
    """Return x / sqrt(Σ x² + 1e-6) over the last axis, as a new array."""
    squares = np.matmul(x[..., None, :], x[..., :, None])[..., 0]
    y: Floats = x * (1 / np.sqrt(squares + x.dtype.type(1e-6)))
    return y


def softplus(x: Floats) -> Floats:
    """Return log(1 + exp(x)) as a new array."""
    y: Floats = np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))
    return y
