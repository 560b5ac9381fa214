"""Apply rotary position embedding in the half-rotation order of Hugging Face checkpoints."""

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.ops.arrays import Floats

FloatOrFloats = float | NDArray[np.float64]


def rope_table(
    inv_freq: NDArray[np.float64], scaling: FloatOrFloats, num_positions: int, dtype: DTypeLike
) -> Floats:
    """Return cosines and sines of every position: [num_positions, 2, Dh/2], axis 1 = (cos, sin).

    inv_freq [Dh/2] is in radians per position. ``scaling``, a number or [Dh/2], multiplies both.
    Angles are computed in float64, exact to 1e-10 rad at position 100,000.
    """
    table = np.empty((num_positions, 2, inv_freq.size), dtype)
    for start in range(0, num_positions, 4096):  # in chunks, so that the float64 angles stay small
        stop = min(start + 4096, num_positions)
        angles = np.arange(start, stop, dtype=np.float64)[:, None] * inv_freq
        table[start:stop, 0] = np.cos(angles) * scaling
        table[start:stop, 1] = np.sin(angles) * scaling
    return table


def rope(x: Floats, cos_sin: Floats) -> Floats:
    """Rotate x by position, as a new array [T, H, Dh].

    x [T, H, Dh]; cos_sin [T, 2, Dh/2], the rows of `rope_table` at the tokens' positions. The pair
    (x[i], x[i + Dh/2]) turns by one angle: the "rotate_half" of Hugging Face's Llama. RoFormer: Su
    et al., 2021, arXiv:2104.09864, equation 34.
    """
    half = x.shape[-1] // 2
    cos, sin = cos_sin[:, None, 0], cos_sin[:, None, 1]
    first, second = x[..., :half], x[..., half:]
    y = np.empty(x.shape, x.dtype)
    np.multiply(first, cos, out=y[..., :half])
    y[..., :half] -= second * sin
    np.multiply(second, cos, out=y[..., half:])
    y[..., half:] += first * sin
    return y
