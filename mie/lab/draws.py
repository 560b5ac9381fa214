"""Draw random numbers that are the same to the last bit on every machine and in every Python.

`random.Random.random` is guaranteed to stay the same. The other methods are not, and methods with a
logarithm call the C library. The last bit of its results differs among platforms. The functions
here use `random`, the four operations and a square root. IEEE 754 fixes their rounding.
"""

import math
import random
from dataclasses import dataclass
from typing import TypeAlias

_LN2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476


def ln(x: float) -> float:
    """Return the natural logarithm of a positive number.

    Near 1 it uses the series ln m = 2 artanh((m - 1) / (m + 1)).
    """
    mantissa, exponent = math.frexp(x)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = 2 * mantissa, exponent - 1
    z = (mantissa - 1) / (mantissa + 1)
    total = 0.0
    for odd in range(25, 0, -2):
        total = total * z * z + 1 / odd
    return 2 * z * total + exponent * _LN2


def exp(x: float) -> float:
    """Return e to the x, as 2 to a whole number times a Taylor series."""
    whole = math.floor(x / _LN2 + 0.5)
    rest = x - whole * _LN2
    total = 1.0
    for n in range(16, 0, -1):
        total = total * rest / n + 1
    return math.ldexp(total, whole)


class Draws:
    """A stream of draws from a seed."""

    def __init__(self, seed: int) -> None:
        self.uniform = random.Random(seed).random
        """Draws a number in [0, 1)."""

    def integer(self, low: int, high: int) -> int:
        """Draw a whole number in low … high."""
        return low + int(self.uniform() * (high - low + 1))

    def normal(self) -> float:
        """Draw from the standard normal distribution (Marsaglia's polar method)."""
        while True:
            x, y = 2 * self.uniform() - 1, 2 * self.uniform() - 1
            square = x * x + y * y
            if 0 < square < 1:
                return x * math.sqrt(-2 * ln(square) / square)

    def gamma(self, shape: float) -> float:
        """Draw from the gamma distribution of scale 1 (Marsaglia and Tsang, 2000)."""
        if shape == 1:
            return -ln(1 - self.uniform())
        if shape < 1:
            return self.gamma(shape + 1) * exp(ln(1 - self.uniform()) / shape)
        d = shape - 1 / 3
        c = 1 / math.sqrt(9 * d)
        while True:
            x = self.normal()
            v = (1 + c * x) * (1 + c * x) * (1 + c * x)
            if v > 0 and ln(1 - self.uniform()) < x * x / 2 + d - d * v + d * ln(v):
                return d * v


@dataclass(frozen=True)
class Fixed:
    """A constant length."""

    length: int

    def draw(self, draws: Draws) -> int:
        """Draw a length."""
        return self.length


@dataclass(frozen=True)
class Uniform:
    """A length that is uniform in low … high."""

    low: int
    high: int

    def draw(self, draws: Draws) -> int:
        """Draw a length."""
        return draws.integer(self.low, self.high)


@dataclass(frozen=True)
class LogNormal:
    """A log-normal length, e to a normal number, clipped to low … high."""

    median: int
    sigma: float
    low: int
    high: int

    def draw(self, draws: Draws) -> int:
        """Draw a length."""
        return min(self.high, max(self.low, int(self.median * exp(self.sigma * draws.normal()))))


Lengths: TypeAlias = Fixed | Uniform | LogNormal
