"""Test `rope_table` and `rope`: the rotation, its properties, and Hugging Face's order."""

import cmath
from fractions import Fraction

import numpy as np
import pytest

from mie.ops.rope import rope_table

DTYPES = ("float32", "float64")

TWO_PI = Fraction("6.28318530717958647692528676655900576839433879875021164194988918461563281257242")


def frequencies(head_dim: int, theta: float = 10000.0) -> np.ndarray:
    return np.array([theta ** (-2 * j / head_dim) for j in range(head_dim // 2)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_positions", [1, 4095, 4096, 4097, 9000])
def test_the_table_has_the_cosine_and_sine_of_every_position(num_positions: int, dtype: str):
    inv_freq = frequencies(8)
    table = rope_table(inv_freq, 1.0, num_positions, dtype)
    assert table.shape == (num_positions, 2, 4)
    assert table.dtype == dtype
    angles = np.arange(num_positions)[:, None] * inv_freq
    np.testing.assert_array_equal(table[:, 0], np.cos(angles).astype(dtype))
    np.testing.assert_array_equal(table[:, 1], np.sin(angles).astype(dtype))


def test_far_positions_are_exact():
    """The angle is reduced with 78 digits of 2 pi here; float32 angles would be off by 0.002."""
    inv_freq = frequencies(16)
    tables = {dtype: rope_table(inv_freq, 1.0, 100_001, dtype) for dtype in DTYPES}
    for position in (65_537, 99_999, 100_000):
        for j, frequency in enumerate(inv_freq.tolist()):
            angle = float((Fraction(frequency) * position) % TWO_PI)
            wanted = cmath.rect(1.0, angle)
            assert abs(complex(*tables["float64"][position, :, j]) - wanted) < 1e-10
            assert abs(complex(*tables["float32"][position, :, j]) - wanted) < 1e-7
