"""Normalise by the root mean square."""

import numpy as np

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
