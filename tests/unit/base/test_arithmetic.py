"""Compare exp, log and powers with 50 decimal digits, and fix their bits."""

import hashlib
import math
import random
from decimal import Context, Decimal

import pytest

from mie.base.arithmetic import exp, log, power

EXACT = Context(prec=50)
RANDOM = random.Random(7)
NUMBERS = [RANDOM.uniform(-700, 700) for _ in range(500)] + [
    RANDOM.uniform(-1, 1) for _ in range(500)
]


def units(got: float, wanted: Decimal) -> float:
    """Return an error in units of the last place."""
    return abs(float((Decimal(got) - wanted) / Decimal(math.ulp(float(wanted)))))


def test_exp_is_off_by_about_one_unit() -> None:
    assert max(units(exp(x), EXACT.exp(Decimal(x))) for x in NUMBERS) < 1.2
    assert exp(0.0) == 1.0


def test_log_is_off_by_less_than_one_unit() -> None:
    assert max(units(log(x), EXACT.ln(Decimal(x))) for x in map(math.exp, NUMBERS)) < 1.0
    assert log(1.0) == 0.0
    assert log(5e-324) == math.log(5e-324)  # a subnormal number


@pytest.mark.parametrize("base", [1.0000001, 7.0, 1e4, 5e5, 1e6])
def test_powers_are_the_nearest_floats(base: float) -> None:
    for numerator, denominator in [(-3, 32), (-47, 48), (1, 3), (5, 1), (0, 7), (0.7, 1), (-10, 1)]:
        exponent = EXACT.divide(Decimal(numerator), Decimal(denominator))
        wanted = EXACT.exp(EXACT.multiply(exponent, EXACT.ln(Decimal(base))))
        assert power(base, numerator, denominator) == float(wanted)


@pytest.mark.parametrize("x", [-math.inf, -800.0, -746.5, -744.9, 0.0, 709.5, math.inf])
def test_numbers_at_the_ends_of_exp(x: float) -> None:
    assert exp(x) == math.exp(x)


def test_numbers_without_a_result_are_errors_as_in_python() -> None:
    assert math.isnan(exp(math.nan))
    assert math.isnan(log(math.nan))
    assert log(math.inf) == math.inf
    for x in (709.9, 1e9):
        with pytest.raises(OverflowError):
            exp(x)
    for x in (0.0, -1.0):
        with pytest.raises(ValueError, match=r"math domain error|expected a positive"):
            log(x)


def test_every_machine_gives_the_same_bits() -> None:
    found = [(exp(x).hex(), log(abs(x)).hex(), power(abs(x), -1, 3).hex()) for x in NUMBERS]
    digest = hashlib.sha256(repr(found).encode()).hexdigest()
    assert digest[:16] == "8c68a162789ecf16"
