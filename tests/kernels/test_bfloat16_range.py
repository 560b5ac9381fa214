"""Check that bfloat16 queries of any magnitude agree over a quantised cache.

Its products are those of float16, so queries and weights are brought into float16's range. Numbers
that float16 would lose decide the result of each test.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import (
    DEVICE_MODES,
    ERRORS,
    QUANTIZED,
    Shape,
    make_backend,
    make_batch,
    make_cache,
    normal,
    operators_attention,
    wide,
)

pytestmark = [
    needs_compiler,
    pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES]),
    pytest.mark.parametrize("stored", QUANTIZED),
    pytest.mark.parametrize("num_queries", [1, 3]),  # decode and prefill
]

Change = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
"""Changes in place q [T, H, Dh] and, in the order of the cache's planes, its elements
[2, N, B, Hkv, Dh], scales [2, N, B, Hkv] and numbers [2, N, B, Hkv, Dh]."""

LEAST = {"int8": (-127, 127.0), "fp8": (0xFE, 448.0)}  # an element, and how far it is below 0


def compare(mode: Any, stored: str, num_queries: int, change: Change) -> None:
    """Compare the rows of finite queries with the operator."""
    shape = Shape("bfloat16", 64, 3, 1, 16, None, stored)
    batch, num_blocks = make_batch([(num_queries, 70), (num_queries, 20)], shape.block_size)
    cache, planes = make_cache(shape, batch, num_blocks)
    q = normal(shape.dtype, 2 * num_queries, shape.group, shape.head_dim, seed=8)
    change(
        q, cache.layers[0].transpose(1, 0, 3, 2, 4), cache.scales[0].transpose(1, 0, 3, 2), planes
    )
    backend = make_backend(mode, shape.dtype, stored=stored)
    got = wide(backend.paged_attention(q, cache, 0, batch, None))
    with np.errstate(invalid="ignore"):
        wanted = operators_attention(q, planes, batch, shape)
    is_finite = np.isfinite(wide(q)).all(axis=-1)
    error = np.linalg.norm((got - wanted)[is_finite], axis=-1)
    assert (error < 2 * ERRORS["bfloat16"] * np.linalg.norm(wanted[is_finite], axis=-1)).all()


@pytest.mark.parametrize("power", [100, 40, -40, -60])
def test_each_head_has_its_own_magnitude(mode: str, stored: str, num_queries: int, power: int):
    def change(q: np.ndarray, elements: np.ndarray, scales: np.ndarray, numbers: np.ndarray):
        q *= np.exp2([[power], [power - 20], [power - 40]]).astype(q.dtype)
        scales[0] *= np.float32(2.0**-power)
        numbers[0] *= 2.0**-power

    compare(mode, stored, num_queries, change)


def test_an_element_is_far_larger_than_those_that_count(mode: str, stored: str, num_queries: int):
    def change(q: np.ndarray, elements: np.ndarray, scales: np.ndarray, numbers: np.ndarray):
        q[..., 5] = 2.0**24
        elements[0, ..., 5] = numbers[0, ..., 5] = 0

    compare(mode, stored, num_queries, change)


def test_a_value_is_far_larger_than_those_that_count(mode: str, stored: str, num_queries: int):
    """The token of the value with the largest scale has a weight of almost zero."""

    def change(q: np.ndarray, elements: np.ndarray, scales: np.ndarray, numbers: np.ndarray):
        element, distance = LEAST[stored]
        q[...] = np.abs(q)
        elements[0, :, 3], scales[0, :, 3] = element, 12.7 / distance  # scores of about -80
        numbers[0, :, 3] = -12.7
        scales[1, :, 3] *= np.float32(2.0**24)
        numbers[1, :, 3] *= 2.0**24

    compare(mode, stored, num_queries, change)


def test_infinity_and_nan_stay_in_their_rows(mode: str, stored: str, num_queries: int):
    def change(q: np.ndarray, elements: np.ndarray, scales: np.ndarray, numbers: np.ndarray):
        q[0, 0, 7], q[0, 1], q[0, 2, 9] = np.inf, 0, np.nan

    compare(mode, stored, num_queries, change)
