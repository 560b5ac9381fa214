"""The kernel that sums exponentials of logits in float64, for log-probabilities."""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from mie.base.arithmetic import LN2, LOG2_E
from mie.ops_jit.kernels.vectors import (
    I64,
    Emitted,
    call,
    everywhere,
    int64,
    kernel_function,
    lanes,
    load,
    load_first,
    number,
    plain,
    pointer,
    splat,
    vector,
    within,
    words,
)

F64 = ir.DoubleType()
DOUBLES = lanes(F64)
LOWEST = -700.0
"""A lower difference counts as this one. Both add nothing to a sum that is at least 1."""
SHIFT = 1.5 * 2.0**52
"""A float64 plus this number is rounded to an integer, in the low bits of the sum."""
HIDDEN = np.float32(-np.inf)
COEFFICIENTS = tuple(1 / math.factorial(k) for k in range(13, -1, -1))


def _exp(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Return e**x of 16 float64 numbers from `LOWEST` to 0, to one unit in the last place.

    It is 2**n times a Taylor series. Each operation is rounded once.
    """

    def fused(x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        return call(b, "llvm.fma.v16f64", DOUBLES, (x, y, z))

    shifted = fused(x, splat(F64, LOG2_E), splat(F64, SHIFT))
    n = b.fsub(shifted, splat(F64, SHIFT))
    for part in LN2:
        x = fused(n, splat(F64, -part), x)
    power = splat(F64, COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        power = fused(power, x, splat(F64, coefficient))
    exponents = b.shl(b.bitcast(shifted, lanes(I64)), splat(I64, 52))
    return b.bitcast(b.add(b.bitcast(power, lanes(I64)), exponents), DOUBLES)


@intrinsic
def add_exponentials(_: Any, sums: Any, x: Any, largest: Any) -> Emitted:
    """Add e**(x - largest) to 16 float64 sums at an address."""

    def emit(b: ir.IRBuilder, sums: Any, x: Any, largest: Any) -> None:
        wide = b.fsub(b.fpext(x, DOUBLES), b.fpext(largest, DOUBLES))
        low = splat(F64, LOWEST)
        powers = _exp(b, b.select(b.fcmp_ordered(">", wide, low), wide, low))
        at = pointer(b, sums, DOUBLES)
        b.store(b.fadd(b.load(at, align=8), powers), at, align=8)

    return plain(types.void, [int64, vector, vector], emit)


@kernel_function
def sum_exponentials(args, step, tile, scratch):
    """Add e**(logit - largest) of logits to 16 float64 sums at ``scratch``.

    Sum j has logits j, j + 16, j + 32, … in order. Arguments: logits, their number, the largest.
    """
    logits, count, largest_at = words(args, 3)
    largest = everywhere(number(largest_at, 0))
    whole = count - count % 16
    for i in range(0, whole, 16):
        add_exponentials(scratch, load(logits + 4 * i), largest)
    rest = load_first(logits + 4 * whole, count - whole)
    add_exponentials(scratch, within(rest, 0, count - whole, HIDDEN), largest)
