"""Define the product of rounded activations and integer weights, bit for bit.

Activations are rounded to 8 bits in groups of `ACTIVATION_GROUP` inputs. The sum of a group is an
integer that no order changes. Fused multiply-adds then join the groups in the order of the inputs.
So every backend can compute the same bits, and a row does not depend on other rows.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops.weights.quantised import QuantisedRows

ACTIVATION_GROUP = 32
"""Inputs of a row that share a scale."""
LARGEST_CODE = np.float32(127)
"""The code of the largest magnitude in a group."""
SMALLEST_MAGNITUDE = np.float32(2.0**-100)
"""A group of smaller magnitudes counts as zeros. The scale would otherwise be subnormal."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RoundedActivations:
    """The rows of x [T, K] in A = ceil(K / `ACTIVATION_GROUP`) groups. x is about code * scale."""

    codes: NDArray[np.int8]  # [T, A, ACTIVATION_GROUP], -127 … 127; zeros after the last input
    scales: NDArray[np.float32]  # [T, A]


def round_activations(x: NDArray[np.float32]) -> RoundedActivations:
    """Round x [T, K] to the nearest codes, ties to even.

    scale = max|x| / 127 and code = rint(x / scale), with each quotient rounded to float32. In a
    group of magnitudes below `SMALLEST_MAGNITUDE`, codes and scale are 0. In a group with a NaN or
    an infinity, codes are 0 and the scale is this NaN or infinity, so that products are NaN.
    """
    num_rows, num_columns = x.shape
    num_groups = ceil_div(num_columns, ACTIVATION_GROUP)
    padded = np.zeros((num_rows, num_groups * ACTIVATION_GROUP), np.float32)
    padded[:, :num_columns] = x
    groups = padded.reshape(num_rows, num_groups, ACTIVATION_GROUP)
    largest = np.abs(groups).max(axis=-1)
    scales = np.where(largest < SMALLEST_MAGNITUDE, np.float32(0), largest / LARGEST_CODE)
    has_codes = np.isfinite(scales) & (scales > 0)
    groups[~has_codes] = 0
    groups /= np.where(has_codes, scales, np.float32(1))[..., None]
    return RoundedActivations(codes=np.rint(groups, out=groups).astype(np.int8), scales=scales)


def integer_product(x: RoundedActivations, weight: QuantisedRows) -> NDArray[np.float32]:
    """Return the products [T, N] of rounded activations and weights [N, K] of int4 or int8.

    In each segment of min(group, `ACTIVATION_GROUP`) inputs, from the first to the last:

        t   = float32(sum of activation code * weight code) * weight scale
        t   = fma(float32(sum of activation codes), weight offset, t), with offsets
        sum = fma(t, activation scale, sum), from 0

    The integers are exact. Each line rounds once to float32.
    """
    form, num_columns = weight.form, weight.shape[1]
    assert form.codes != "float8_e4m3fn", form
    segment = min(form.group, ACTIVATION_GROUP)
    num_rows, num_groups, size = x.codes.shape
    codes = x.codes.reshape(num_rows, num_groups * size).astype(np.float32)
    total = np.zeros((num_rows, len(weight)), np.float32)
    for first in range(0, num_columns, segment):
        inputs, group = slice(first, min(first + segment, num_columns)), first // form.group
        # Each partial sum is an integer below 2**24 in magnitude, and so exact in float32.
        partial = codes[:, inputs] @ weight.codes[:, inputs].astype(np.float32).T
        with np.errstate(over="ignore", invalid="ignore"):
            partial *= weight.scales[:, group]
        if weight.offsets is not None:
            sums = codes[:, inputs].sum(axis=1, keepdims=True)
            partial = fused_multiply_add(sums, weight.offsets[:, group], partial)
        scales = x.scales[:, first // ACTIVATION_GROUP, None]
        total = fused_multiply_add(partial, scales, total)
    return total


def integer_linear(
    x: NDArray[np.float32],
    weight: QuantisedRows,
    bias: Floats | None = None,
    residual: Floats | None = None,
) -> NDArray[np.float32]:
    """Return `integer_product` of the rounded x, then plus bias, then plus residual, as [T, N].

    x [T, K], bias [N], residual [T, N], all float32; weight [N, K] of int4 or int8. The result is
    NaN where a number of x is not finite.
    """
    y = integer_product(round_activations(x), weight)
    for term in (bias, residual):
        if term is not None:
            y += term
    return y


def fused_multiply_add(a: Floats, b: Floats, c: Floats) -> NDArray[np.float32]:
    """Return a * b + c of float32 arrays, rounded once to float32, ties to even.

    The product is exact in float64. The sum is rounded to odd there: an inexact sum with an even
    last bit is moved one unit towards the error. So the second rounding gives the result of a
    single one. Source: Boldo and Melquiond, 2008, "Emulation of FMA and correctly rounded sums",
    IEEE Transactions on Computers 57(4).
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        product = np.multiply(a, b, dtype=np.float64)
        total = product + c
        rest = total - product
        error = (product - (total - rest)) + (c - rest)  # TwoSum, by Knuth
        bits = total.view(np.int64)
        moves = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
        bits += np.where((error > 0) == (total > 0), 1, -1) * moves
        return total.astype(np.float32)
