"""Compute the gated activations of the MLP, and soft caps."""

import math
from typing import Literal

import numpy as np

from mie.ops.arrays import Floats

Activation = Literal["silu", "gelu_tanh", "clamped_silu"]
ACTIVATIONS = ("silu", "gelu_tanh", "clamped_silu")
"""The names of all gated activations. Kernels number them in this order."""


def activate(gate_up: Floats, activation: Activation) -> Floats:
    """Apply a gated activation to gate_up [T, 2F], as a new array [T, F]."""
    operators = silu_mul, gelu_mul, clamped_silu_mul
    return operators[ACTIVATIONS.index(activation)](gate_up)


def silu_mul(gate_up: Floats) -> Floats:
    """Return ``silu(gate) * up`` as a new array [T, F]. gate_up [T, 2F] holds gate, then up.

    silu(z) = z / (1 + exp(-z)). SwiGLU: Shazeer, 2020, arXiv:2002.05202, section 2.
    """
    gate, up = np.split(gate_up, 2, axis=-1)
    y = silu(gate)
    y *= up
    return y


def silu(x: Floats) -> Floats:
    """Return ``x / (1 + exp(-x))`` as a new array of x's shape."""
    # exp overflows to inf below about -88 in float32. The quotient is then the correct limit, -0.
    with np.errstate(over="ignore"):
        y: Floats = np.exp(-x)
    y += 1.0
    return np.divide(x, y, out=y)


def sigmoid(x: Floats) -> Floats:
    """Return ``1 / (1 + exp(-x))`` as a new array of x's shape."""
    with np.errstate(over="ignore"):  # the quotient is then the limit, 0
        y: Floats = np.exp(-x)
    y += 1.0
    return np.divide(1.0, y, out=y)


GELU_SLOPE = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715


def gelu_mul(gate_up: Floats) -> Floats:
    """Return ``gelu(gate) * up`` as a new array [T, F]. gate_up [T, 2F] holds gate, then up.

    gelu(z) = z (1 + tanh(u)) / 2 = z / (1 + exp(-2u)) with u = sqrt(2/pi) (z + 0.044715 z³), the
    approximation that Gemma is trained with. GELU: Hendrycks and Gimpel, 2016, arXiv:1606.08415.
    """
    gate, up = np.split(gate_up, 2, axis=-1)
    with np.errstate(over="ignore"):  # the quotient is then the limit, as in `silu_mul`
        y: Floats = np.exp(-GELU_SLOPE * (gate + GELU_CUBIC * gate * gate * gate))
    y += 1.0
    np.divide(gate, y, out=y)
    y *= up
    return y


CLAMP_SLOPE, CLAMP_LIMIT = 1.702, 7.0


def clamped_silu_mul(gate_up: Floats) -> Floats:
    """Return ``gate sigmoid(1.702 gate) (up + 1)`` as a new array [T, F].

    gate_up [T, 2F] holds gate (limited to 7), then up (limited to -7 … 7), as in gpt-oss.
    """
    gate, up = np.split(gate_up, 2, axis=-1)
    gate = np.minimum(gate, CLAMP_LIMIT)
    with np.errstate(over="ignore"):  # the quotient is then the limit, as in `silu_mul`
        y: Floats = np.exp(-CLAMP_SLOPE * gate)
    y += 1.0
    np.divide(gate, y, out=y)
    y *= np.clip(up, -CLAMP_LIMIT, CLAMP_LIMIT) + 1
    return y


def soft_cap(x: Floats, cap: float) -> Floats:
    """Return ``cap * tanh(x / cap)``, in -cap … cap, as a new array of x's shape.

    Gemma 2 (2024, arXiv:2408.00118, section 2) caps scores and logits like this.
    """
    y: Floats = np.tanh(x / cap)
    y *= cap
    return y
