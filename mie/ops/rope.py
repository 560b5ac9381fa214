"""Apply rotary position embedding in the half-rotation order of Hugging Face checkpoints."""

import math

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mie.ops.arrays import Floats

FloatOrFloats = float | NDArray[np.float64]

QUARTER_TURN = tuple(
    map(float.fromhex, ("0x1.921fb544p+0", "0x1.0b4611a6p-34", "0x1.3198a2e037073p-69"))
)
"""Numbers that sum to pi / 2. Products of the first two with integers below 2**20 are exact."""
SIN = tuple((-1) ** k / math.factorial(2 * k + 1) for k in range(8, -1, -1))
COS = tuple((-1) ** k / math.factorial(2 * k) for k in range(8, -1, -1))
"""Taylor series of sin(x) / x and cos(x) in x², from the highest power down."""


def rope_table(
    inv_freq: NDArray[np.float64], scaling: FloatOrFloats, num_positions: int, dtype: DTypeLike
) -> Floats:
    """Return cosines and sines of every position: [num_positions, 2, Dh/2], axis 1 = (cos, sin).

    inv_freq [Dh/2] is in radians per position. ``scaling``, a number or [Dh/2], multiplies both.
    Angles are computed in float64, exact to 1e-10 rad at position 100,000. The table is equal on
    every machine.
    """
    table = np.empty((num_positions, 2, inv_freq.size), dtype)
    fill_rope_table(table, inv_freq, scaling, 0, num_positions)
    return table


def fill_rope_table(
    table: Floats, inv_freq: NDArray[np.float64], scaling: FloatOrFloats, first: int, end: int
) -> None:
    """Write the positions ``first`` to ``end`` - 1 of a table, or to the last one."""
    end = min(end, len(table))
    for start in range(first, end, 256):  # in chunks that fit the CPU's caches
        stop = min(start + 256, end)
        angles = np.arange(start, stop, dtype=np.float64)[:, None] * inv_freq
        cos, sin = cos_sin(angles)
        table[start:stop, 0] = cos * scaling
        table[start:stop, 1] = sin * scaling


def cos_sin(angles: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the cosines and sines of angles from 0 to 10⁶, to two units in the last place.

    NumPy's own differ in the last bit from CPU to CPU. These consist of sums, products and
    roundings to integers, which IEEE 754 defines.
    """
    quarters = np.rint(angles * (2 / math.pi))
    x = angles
    for part in QUARTER_TURN:  # Cody and Waite, 1980: subtract the whole quarter turns
        x = x - quarters * part
    square = x * x
    cos, sin = _polynomial(square, COS), _polynomial(square, SIN) * x
    quadrant = quarters.astype(np.int64) & 3
    is_odd = quadrant % 2 == 1
    cos, sin = np.where(is_odd, sin, cos), np.where(is_odd, cos, sin)
    np.negative(cos, out=cos, where=(quadrant == 1) | (quadrant == 2))
    np.negative(sin, out=sin, where=quadrant >= 2)
    return cos, sin


def _polynomial(x: NDArray[np.float64], coefficients: tuple[float, ...]) -> NDArray[np.float64]:
    y = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        y += coefficient
        y *= x
    y += coefficients[-1]
    return y


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
