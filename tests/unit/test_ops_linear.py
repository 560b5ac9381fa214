"""Compare `embed` and `linear` with loops and einsum in float64."""

from __future__ import annotations

import numpy as np
import pytest

from mie.ops.linear import linear

SHAPES = [(0, 3, 4), (1, 1, 1), (1, 5, 7), (6, 8, 3), (33, 64, 17)]  # T, K, N
DTYPES = ("float32", "float64")


def normal(seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return random numbers in a read-only array."""
    array = np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_linear(shape: tuple[int, int, int], dtype: str, has_bias: bool, has_residual: bool):
    num_tokens, num_inputs, num_outputs = shape
    x = normal(0, (num_tokens, num_inputs), dtype)
    weight = normal(1, (num_inputs, num_outputs), dtype)
    bias = normal(2, (num_outputs,), dtype) if has_bias else None
    residual = normal(3, (num_tokens, num_outputs), dtype) if has_residual else None
    wanted = np.einsum("tk,kn->tn", x.astype(float), weight.astype(float), optimize=False)
    magnitude = np.einsum("tk,kn->tn", abs(x.astype(float)), abs(weight.astype(float)))
    for term in (bias, residual):
        if term is not None:
            wanted = wanted + term.astype(float)
            magnitude = magnitude + abs(term.astype(float))

    y = linear(x, weight, bias, residual)

    assert y.shape == (num_tokens, num_outputs)
    assert y.dtype == dtype
    # A sum of n products rounds at most n times in any order: Higham, 2002, section 3.1.
    bound = (num_inputs + 2) * np.finfo(dtype).eps * magnitude
    assert np.all(abs(y - wanted) <= bound)
