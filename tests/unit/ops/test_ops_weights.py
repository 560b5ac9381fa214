"""Compare the weights of tokens with a softmax in float64, and with plain scalar arithmetic."""

import math

import numpy as np
import pytest

from mie.ops.token_weights import (
    COEFFICIENTS,
    MAX_SCALE,
    exponents,
    num_weight_bits,
    scale_of,
    weights_of,
)

UNIT = 2.0**-24
"""The rounding error of float32."""


def weigh(x: np.ndarray, temperature: float) -> np.ndarray:
    scale = np.array([scale_of(temperature)], x.dtype)
    return weights_of(exponents(x, x.max(keepdims=True), scale), num_weight_bits(x.size))


def plain_weight(x: float, largest: float, temperature: float, num_bits: int) -> int:
    """Return a weight by the definition, with scalars that round after each operation."""
    f = np.float32
    z = f(f(f(x) - f(largest)) * f(math.log2(math.e) / temperature))
    whole = int(f(2**23) - f(f(2**23) - z)) if z > -100 else -100
    fraction = z - f(whole) if z > -100 else f(0)
    power = f(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        power = f(f(power * fraction) + f(coefficient))
    mantissa, exponent = math.frexp(float(power))
    return math.floor(math.ldexp(mantissa, exponent + whole + num_bits))


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
def test_float32_weights_equal_scalar_arithmetic_bit_for_bit(temperature: float):
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(0, 4, 3000), rng.normal(0, 1e-6, 50), [-1e30, 12.0]])
    x = x.astype(np.float32)
    num_bits = num_weight_bits(x.size)
    wanted = [plain_weight(value, x.max(), temperature, num_bits) for value in x.tolist()]
    assert weigh(x, temperature).tolist() == wanted


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.5, 50.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_weight_has_the_relative_error_that_is_documented(temperature: float, dtype: str):
    x = np.random.default_rng(2).normal(0, 3, 100_000).astype(dtype)
    z = (x.astype(np.float64) - float(x.max())) / temperature * math.log2(math.e)
    scaled = np.ldexp(np.exp2(z), num_weight_bits(x.size))
    unit = UNIT if dtype == "float32" else 2.0**-52
    bound = scaled * (2 + 2.1 * np.abs(z)) * unit + 1
    error = np.abs(weigh(x, temperature) - scaled)
    assert (error <= bound).all()
    assert dtype == "float64" or (error > 0.3 * bound).any()  # the bound is not loose


@pytest.mark.parametrize("size", [1, 2, 1023, 1024, 300_000])
def test_equal_logits_have_the_largest_weight_and_a_sum_below_2_to_the_62(size: int):
    for dtype in (np.float32, np.float64):
        weights = weigh(np.full(size, -7.25, dtype), 0.3)
        assert (weights == 2 ** num_weight_bits(size)).all()
        assert 2**61 <= int(weights.sum()) < 2**62


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extreme_temperatures_and_logits(dtype: str):
    x = np.array([3.0, 3.0 - 2**-20, -np.inf, -3e38], dtype)
    one = 2 ** num_weight_bits(4)
    for temperature in (5e-324, 1e-300, 1e-18):
        assert weigh(x, temperature).tolist() == [one, 0, 0, 0]
    assert weigh(x, 1e300).tolist() == [one, one, 0, 0]
    assert scale_of(5e-324) == MAX_SCALE
    assert scale_of(1e300) == 1 / MAX_SCALE
    far = np.array([3e38, -3e38], dtype)  # their difference is no float32
    assert weigh(far, 1.0).tolist() == [2 ** num_weight_bits(2), 0]
