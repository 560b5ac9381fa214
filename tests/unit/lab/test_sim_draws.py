"""Compare draws with the C library, and with earlier draws bit for bit."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.lab.draws import Draws, exp, ln


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_ln_is_the_logarithm(x: float):
    assert ln(x) == pytest.approx(math.log(x), rel=4e-16, abs=3e-16)


@given(st.floats(min_value=-600, max_value=600))
def test_exp_is_the_exponential(x: float):
    assert exp(x) == pytest.approx(math.exp(x), rel=3e-13)


def test_draws_have_not_changed():
    """Workloads, and so all results, depend on every bit of these."""
    draws = Draws(7)
    assert [draws.integer(1, 6) for _ in range(8)] == [2, 1, 4, 1, 4, 3, 1, 4]
    found = [draws.normal(), draws.gamma(1), draws.gamma(0.25), draws.gamma(3.5)]
    assert [value.hex() for value in found] == GOLDEN


GOLDEN = [
    "-0x1.07dd066723168p-1",
    "0x1.289ce3afff1e7p-4",
    "0x1.86853caffaf2dp-3",
    "0x1.64930b5e46f35p+0",
]
