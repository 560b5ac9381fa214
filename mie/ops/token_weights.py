"""Weigh tokens by their logits, in integers that every backend computes bit for bit.

The weight of a token is 2**z, where z = (logit - largest logit) / temperature * log2(e), as a
multiple of 2**-`num_bits`, rounded down. Sums of integers do not depend on the order of addition.

For float32 logits every operation is a single rounded float32 operation: no fused multiply-add, no
library function. A CUDA kernel that repeats them gets the same bits. A weight's relative error is
at most (2 + 2.1 |z|) * 2**-24, plus the error of the last rounding. As a share of the largest
weight, that is at most 2.2 * 2**-24. For float64 logits (of a float64 engine alone), the same
formula is computed in float64.

Equal logits have equal weights. A larger logit may have a weight that is smaller by a rounding.
"""

import math

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import LOG2_E, log
from mie.ops.arrays import Floats

MAX_SCALE = 2.0**60
"""Largest factor between logits and z, and the inverse of the smallest.

A temperature below 1.3e-18 counts as 1.3e-18. The product then never becomes a NaN, and subnormal
differences of logits do not change a weight, because chips flush them to zero.
"""

LOWEST_Z = -100.0
"""A lower z counts as this one. The weight of both is 0, and 2**z is a normal float32."""

COEFFICIENTS = tuple(
    map(
        float.fromhex,
        (
            "0x1.41fbbap-13",
            "0x1.5f3e54p-10",
            "0x1.3b2d4cp-7",
            "0x1.c6aee8p-5",
            "0x1.ebfbdcp-3",
            "0x1.62e430p-1",
            "0x1p0",
        ),
    )
)
"""A polynomial in f for 2**f, |f| <= 1/2, from the highest power down; all are float32 numbers.

The approximation's relative error is 2**-28.9. With float32's roundings it is 2**-23.2.
"""


def num_weight_bits(vocab_size: int) -> int:
    """Return how many bits a weight has after the point. All weights sum to less than 2**62."""
    return 62 - vocab_size.bit_length()


def scale_of(temperature: float) -> float:
    """Return the factor between differences of logits and z, before it is rounded to a dtype."""
    return min(max(LOG2_E / temperature, 1 / MAX_SCALE), MAX_SCALE)


def lowest_kept_z(min_p: float) -> float:
    """Return the z below which min-p drops a token. -inf if it drops none.

    The largest logit's z is 0. A z that a chip may flush to zero counts as zero.
    """
    return min(log(min_p) * LOG2_E, -1 / MAX_SCALE) if min_p > 0.0 else -math.inf


def exponents(x: Floats, largest: Floats, scale: Floats) -> Floats:
    """Return z for each logit of x [..., V], in its dtype, as a new array.

    ``largest`` and ``scale``, of the same dtype, are broadcast over x.
    """
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the largest to -inf
        z: Floats = x - largest
        z *= scale
    return z


def weights_of(z: Floats, num_bits: int) -> NDArray[np.int64]:
    """Return floor(2**(z + num_bits)) for each exponent of z [...]. z is overwritten."""
    powers = np.exp2(z, out=z) if z.dtype == np.float64 else _exp2(z)
    powers *= z.dtype.type(2.0**num_bits)  # a power of two multiplies exactly
    weights: NDArray[np.int64] = powers.astype(np.int64)
    return weights


def _exp2(z: Floats) -> Floats:
    """Return 2**z for float32 numbers z <= 0. They are overwritten."""
    np.maximum(z, np.float32(LOWEST_Z), out=z)
    whole = np.rint(z)
    z -= whole
    power: Floats = z * np.float32(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:-1]:
        power += np.float32(coefficient)
        power *= z
    power += np.float32(COEFFICIENTS[-1])
    shift = whole.astype(np.int32)
    shift <<= 23  # adds to the exponent of a float32
    bits = power.view(np.int32)
    bits += shift
    return power
