"""Compare the cache of 4-bit codes with Hadamard's matrix and with loops over groups."""

import numpy as np
import pytest

from mie.ops.kv_cache import INT4, head_bytes
from mie.ops.weights.int4_cache import dequantize, quantize, rotated

MATRIX = np.array([[(-1) ** (i & j).bit_count() for j in range(32)] for i in range(32)])
"""Sylvester's matrix of order 32, by the bits that two indices share."""

SIZES = (2, 32, 40, 64, 80, 96, 112, 128, 256)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng([*shape]).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_whole_groups_are_multiplied_by_hadamard_s_matrix(size: int):
    x = normal(5, 3, size).astype(np.float64)
    wanted = x.copy()
    for start in range(0, size - 31, 32):
        wanted[..., start : start + 32] = x[..., start : start + 32] @ MATRIX / 8
    np.testing.assert_allclose(rotated(x, 1 / 8), wanted, atol=1e-14)
    np.testing.assert_allclose(rotated(wanted, 1 / 4), x, atol=1e-14)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_number_becomes_the_nearest_code_of_its_group(size: int, dtype: str):
    x = normal(20, 3, size).astype(dtype) * 10.0 ** np.arange(-2, 4)[:, None, None, None]
    x = x.reshape(-1, 3, size).astype(dtype)
    got, numbers = quantize(x), rotated(x, 1 / 8)
    codes = np.stack([got.codes & 15, got.codes >> 4], axis=-1).reshape(x.shape)
    for start in range(0, size, 32):
        own = numbers[..., start : start + 32]
        scales, offsets = got.factors[..., start // 32].astype(dtype)[..., None].swapaxes(0, 2)
        scales, offsets = scales.swapaxes(0, 1), offsets.swapaxes(0, 1)
        lowest, highest = own.min(-1, keepdims=True), own.max(-1, keepdims=True)
        np.testing.assert_array_equal(offsets, lowest.astype(np.float16))
        np.testing.assert_array_equal(scales, ((highest - lowest) / x.dtype.type(15)).astype("f2"))
        every = scales[..., None] * np.arange(16) + offsets[..., None]
        nearest = np.abs(own[..., None] - every).min(-1)
        chosen = codes[..., start : start + 32] * scales + offsets
        np.testing.assert_allclose(np.abs(own - chosen), nearest, atol=1e-6 * np.abs(own).max())
    back = dequantize(got, dtype)
    assert back.dtype == dtype
    error = np.abs(rotated(back, 1 / 8) - numbers)
    size_of_groups = np.abs(numbers).max(-1, keepdims=True)
    steps = got.factors[..., 0, :].max(-1, keepdims=True).astype(dtype)
    assert (error <= steps / 2 + size_of_groups / 1000).all()


def test_ties_go_to_the_even_code():
    x = np.array([[0, 15, 0.5, 1.5, 2.5, 14.5]], np.float32)
    assert quantize(x).codes.tolist() == [[0 | 15 << 4, 0 | 2 << 4, 2 | 14 << 4]]


def test_constant_groups_are_kept_and_those_beyond_float16_become_nan():
    group = [1.0] + [0.0] * 31
    rows = [
        [0.0] * 32, [-0.0] * 32, group, [3e5] + [0.0] * 31, [1e6] + [0.0] * 31,
        [np.nan, *group[1:]], [np.inf, *group[1:]], [-np.inf, *group[1:]], [3e38] * 32,
    ]  # fmt: skip
    for dtype in ("float32", "float64"):
        got = quantize(np.array(rows, dtype))
        is_nan = [False] * 4 + [True] * 5
        assert np.isnan(got.factors).all((1, 2)).tolist() == is_nan
        assert not got.codes[4:].any()
        assert not np.signbit(got.factors[:2]).any(), "-0 becomes 0"
        back = dequantize(got, dtype)
        np.testing.assert_array_equal(back[:3], np.array(rows[:3]))
        assert back[3, 0] == pytest.approx(3e5, rel=1e-3)
        assert np.isnan(back[4:]).all()


def test_another_group_of_the_vector_is_not_touched_by_a_nan():
    x = normal(4, 64)
    x[2, 5] = np.nan
    back = dequantize(quantize(x), np.float32)
    assert np.isnan(back).any(axis=0).tolist() == [True] * 32 + [False] * 32


@pytest.mark.parametrize(("size", "times"), [(32, 3.2), (64, 3.2), (80, 3.08), (256, 3.2)])
def test_the_same_memory_holds_so_many_times_the_tokens_of_16_bits(size: int, times: float):
    cache = quantize(normal(1, size))
    assert cache.codes.nbytes + cache.factors.nbytes == head_bytes(INT4, size)
    assert round(2 * size / head_bytes(INT4, size), 2) == times
