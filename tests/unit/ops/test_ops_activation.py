"""Compare `silu_mul` with the formula in Python's floats."""

import math

import numpy as np
import pytest

from mie.ops.activation import silu_mul

DTYPES = ("float32", "float64")


def silu(z: float) -> float:
    """Return z times the logistic function, computed from the smaller of e^z and e^-z."""
    if z >= 0:
        return z / (1.0 + math.exp(-z))
    return z * math.exp(z) / (1.0 + math.exp(z))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [80.0, 88.0, 89.0, 104.0, 710.0, 1e4, 1e30])
def test_extreme_gates_reach_their_limits_without_a_warning(size: float, dtype: str):
    y = silu_mul(np.array([[size, -size, 2.0, 2.0]], dtype))
    assert y[0, 0] == np.dtype(dtype).type(size) * 2
    # Below e^-88 float32 may give 0 for a number that it could just represent.
    assert y[0, 1] == pytest.approx(2 * silu(-size), rel=1e-5, abs=1e-35)
    assert y[0, 1] <= 0
