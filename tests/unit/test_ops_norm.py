"""Compare `rms_norm` with the formula in Python's floats."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mie.ops.norm import rms_norm

DTYPES = ("float32", "float64")
SHAPES = [(0, 4), (1, 1), (1, 7), (3, 5), (2, 3, 8), (9, 64), (2, 2, 0, 4)]


def normal(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    array = np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)
    array.flags.writeable = False
    return array


def one_row(row: list[float], weight: list[float], eps: float) -> list[float]:
    mean_square = math.fsum(value * value for value in row) / len(row)
    return [value / math.sqrt(mean_square + eps) * w for value, w in zip(row, weight, strict=True)]


def formula(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    rows = [
        one_row(row.tolist(), weight.tolist(), eps)
        for row in x.astype(float).reshape(-1, x.shape[-1])
    ]
    return np.array(rows).reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rms_norm(shape: tuple[int, ...], dtype: str, eps: float):
    x, weight = normal(0, shape, dtype), normal(1, shape[-1:], dtype)
    y = rms_norm(x, weight, eps)
    assert y.shape == shape
    assert y.dtype == dtype
    rtol = (shape[-1] + 8) * np.finfo(dtype).eps
    np.testing.assert_allclose(y, formula(x, weight, eps), rtol=rtol, atol=0)


def test_a_slice_of_heads_is_normalised_head_by_head():
    """The q and k norms of Qwen3 do this. The array is a view with gaps."""
    qkv, weight = normal(3, (4, 6, 8), "float64"), normal(4, (8,), "float64")
    y = rms_norm(qkv[:, 1:3], weight, 1e-6)
    np.testing.assert_allclose(y, formula(qkv[:, 1:3], weight, 1e-6), rtol=1e-14)
