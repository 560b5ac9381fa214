"""Mix the tokens of sequences in a layer: by attention, or by a recurrence with a state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from mie.ops.backend import Array, Backend, HeadWeights, StepBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Caches:
    """The keys and values of attention layers, and the states of recurrent ones."""

    kv: Array
    states: Array = None


class Mixer(Protocol):
    """A layer's weights before its MLP."""

    out: Array
    """The matrix that the result is multiplied by."""
    group: int
    """The group of block tables that it reads."""

    def mix(self, backend: Backend, x: Array, batch: StepBatch, caches: Caches) -> Array:
        """Return the result [T, K] of the hidden states x [T, D], and change the caches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention(Mixer):
    """Attention, with gates of its result if the family has them."""

    group: int
    index: int
    """The layer's number among the layers of its group, with keys and values."""
    heads: HeadWeights
    gate: Array | None
    gated_norm: Array | None
    """The norm before queries and gates. Without gates it is a part of ``heads``."""
    rope: Array
    rotated_norm: Array | None  # of queries that are normalised after RoPE
    rotated_eps: float
    window: int | None
    soft_cap: float | None
    sinks: Array | None
    out: Array

    def mix(self, backend: Backend, x: Array, batch: StepBatch, caches: Caches) -> Array:
        gate, heads = None, self.heads
        if self.gate is not None:
            x = backend.rms_norm(x, self.gated_norm, heads.eps)
            gate = backend.linear(x, self.gate)
        q = backend.norm_heads(x, heads, self.rope, caches.kv, self.index, batch)
        if self.rotated_norm is not None:
            backend.head_norm(q, 0, heads.num_heads, self.rotated_norm, self.rotated_eps)
        options = self.window, self.soft_cap, self.sinks
        y = backend.paged_attention(q, caches.kv, self.index, batch, *options)
        y = y.reshape(len(q), -1)
        return y if gate is None else backend.sigmoid_mul(y, gate)


@dataclass(frozen=True, kw_only=True, eq=False)
class Recurrence(Mixer):
    """A short convolution, or a convolution and a recurrence with a gated result."""

    index: int
    """The layer's number among the recurrent layers."""
    group: int = field(default=0, init=False)
    norm: Array
    eps: float
    mixed: Array  # gives the inputs of the convolution
    gate: Array | None
    small: Array | None  # gives b and a of the gated delta rule, or dt of Mamba 2
    weights: Any
    """The other weights, of the backend's `RecurrentOperators.load`."""
    out: Array

    def mix(self, backend: Backend, x: Array, batch: StepBatch, caches: Caches) -> Array:
        x = backend.rms_norm(x, self.norm, self.eps)
        of: tuple[Any, ...] = self.weights, caches.states, self.index, batch
        y = backend.linear(x, self.mixed)
        if self.gate is None:
            return backend.recurrent.convolve(y, *of)
        gate, small = backend.linear(x, self.gate), backend.linear(x, self.small)
        y = backend.recurrent.recur(backend.recurrent.convolve(y, *of), small, *of)
        return backend.recurrent.gated_norm(y, gate, self.weights)
