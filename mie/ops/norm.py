"""Normalise by the root mean square."""

import numpy as np

from mie.ops.activation import silu
from mie.ops.arrays import Floats


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """Return ``x / sqrt(mean(x²) + eps) * weight`` over the last axis, as a new array of x's shape.

    x [..., D], weight [D]. RMSNorm: Zhang and Sennrich, 2019, arXiv:1910.07467, equation 4, with
    the eps of Llama.
    """
    mean_square = np.matmul(x[..., None, :], x[..., :, None])[..., 0] / x.shape[-1]
    y: Floats = x * (1.0 / np.sqrt(mean_square + eps))
    y *= weight
    return y


def gated_norm(
    x: Floats, gate: Floats, weight: Floats, size: int, eps: float, *, gates_first: bool
) -> Floats:
    """Normalise groups of ``size`` channels of x [T, K], times silu(gate), as a new array.

    gate [T, K]. weight [size] is for each group, and a weight [K] for all of them. The gate
    multiplies the normalised x, or with ``gates_first`` the x that is normalised: the
    ``RMSNormGated`` of Qwen3-Next, and that of Mamba 2.
    """
    groups = x.shape[0], -1, size
    if gates_first:
        x = x * silu(gate)
    y = rms_norm(x.reshape(groups), weight.reshape(-1, size), eps).reshape(x.shape)
    if not gates_first:
        y *= silu(gate)
    return y
