"""Compute the gated activation of the MLP."""

import numpy as np

from mie.ops.arrays import Floats


def silu_mul(gate_up: Floats) -> Floats:
    """Return ``silu(gate) * up`` as a new array [T, F]. gate_up [T, 2F] holds gate, then up.

    silu(z) = z / (1 + exp(-z)). SwiGLU: Shazeer, 2020, arXiv:2002.05202, section 2.
    """
    gate, up = np.split(gate_up, 2, axis=-1)
    # exp overflows to inf below about -88 in float32. The quotient is then the correct limit, -0.
    with np.errstate(over="ignore"):
        y: Floats = np.exp(-gate)
    y += 1.0
    np.divide(gate, y, out=y)
    y *= up
    return y
