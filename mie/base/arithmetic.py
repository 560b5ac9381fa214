"""Arithmetic that several rooms need, with equal results on every machine.

The C libraries, and the loops that NumPy chooses by the CPU, round exponentials, logarithms and
powers differently in the last bit. The functions below consist of operations that IEEE 754 or the
`decimal` module rounds in one way only.
"""

import math
from decimal import Context, Decimal

LOG2_E = 1.4426950408889634
LN2 = 0.6931471803691238, 1.9082149292705877e-10
"""Numbers that sum to ln 2. The first has 32 bits, so that products with exponents are exact."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def exp(x: float) -> float:
    """Return e**x to about one unit in the last place: 2**n times a Taylor series.

    Raises:
        OverflowError: the result is too large for a float.
    """
    if not -746.0 < x < 710.0:
        return math.exp(x)  # 0, infinity, NaN or an error
    n = round(x * LOG2_E)
    x = x - n * LN2[0] - n * LN2[1]
    series = 1.0
    for k in range(14, 0, -1):
        series = 1.0 + x / k * series
    return math.ldexp(series, n)


def log(x: float) -> float:
    """Return the natural logarithm of a positive number to about one unit in the last place.

    With s = f / (2 + f), log(1 + f) is 2 artanh(s) = 2 (s + s³/3 + s⁵/5 + …) = f - f²/2 + s (f²/2 +
    R), as in the C library of Sun Microsystems (fdlibm, 1993).
    """
    if not 0.0 < x < math.inf:
        return math.log(x)  # infinity, NaN or an error
    mantissa, exponent = math.frexp(x)
    if mantissa < 0.7071067811865476:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    f = mantissa - 1.0
    s = f / (2.0 + f)
    rest = 0.0
    for odd in range(23, 1, -2):
        rest = s * s * (2.0 / odd + rest)
    half = 0.5 * f * f
    return exponent * LN2[0] - ((half - (s * (half + rest) + exponent * LN2[1])) - f)


def power(base: float, numerator: float, denominator: int = 1) -> float:
    """Return base ** (numerator / denominator) of a positive base, rounded to the nearest float."""
    exact = Context(prec=40)
    exponent = exact.divide(Decimal(numerator), Decimal(denominator))
    return float(exact.power(Decimal(base), exponent))
