"""Define the mixers of layers. A mixer is the part of a layer before its MLP.

This file has attention. `mie.model.layers.recurrent` has the mixers that keep a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from mie.ops.backend import Array, Backend, HeadWeights, StepBatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Caches:
    """The keys and values of attention layers, and the states of recurrent ones."""

    kv: Array
    states: Array = None


class Mixer(Protocol):
    """The part of a layer before its MLP: attention, or recurrence."""

    out: Array
    """Matrix that multiplies the result."""
    group: int
    """Group of layers with the same block tables."""

    def mix(self, backend: Backend, x: Array, batch: StepBatch, caches: Caches) -> Array:
        """Return the result [T, K] of the hidden states x [T, D], and change the caches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Attention(Mixer):
    """Attention, with gates of its result if the family has them."""

    group: int
    index: int
    """Number of the layer in the group, by which the cache has keys and values."""
    heads: HeadWeights
    gate: Array | None
    gated_norm: Array | None
    """The norm before queries and gates. Without gates it is a part of ``heads``."""
    rope: Array
    rotated_norm: Array | None
    """The norm of queries that are normalised after RoPE."""
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
