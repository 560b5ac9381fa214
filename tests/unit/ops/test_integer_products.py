"""Compare products of rounded activations with loops of Python's integers and fractions."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from quantised_rows import FORMS, columns, quantised

from mie.ops.weights.integer import (
    ACTIVATION_GROUP,
    fused_multiply_add,
    integer_linear,
    integer_product,
    round_activations,
)
from mie.ops.weights.quantised import Form, QuantisedRows, linear_quantised

INTEGER_FORMS = [form for form in FORMS if form.codes != "float8_e4m3fn"]
LEAST_EXPONENT = -149  # of a unit in the last place of float32


def rounded(exact: Fraction) -> float:
    """Return the float32 nearest to a fraction, ties to even. Zero is positive."""
    if exact == 0:
        return 0.0
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length() - 24
    if size / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    exponent = max(exponent, LEAST_EXPONENT)
    number = round(size / Fraction(2) ** exponent)  # of a fraction: ties to even
    value = math.inf if number * Fraction(2) ** exponent >= 2**128 else math.ldexp(number, exponent)
    return -value if exact < 0 else value


def multiply_add(a: float, b: float, c: float) -> float:
    """Return a * b + c of finite floats, rounded once to float32."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c if a * b == 0 else 0.0  # zeros keep their signs; a difference is +0
    value = rounded(exact)
    return math.copysign(value, exact) if value == 0 else value


def test_the_rounding_of_the_tests_is_that_of_float32():
    rng = np.random.default_rng(1)
    values = np.ldexp(rng.normal(size=3000), rng.integers(-160, 130, 3000))
    with np.errstate(over="ignore"):
        wanted = values.astype(np.float32)
    assert [rounded(Fraction(value)) for value in values.tolist()] == wanted.tolist()


def same_bits(got: np.ndarray, wanted: np.ndarray) -> bool:
    """Return whether float32 arrays are equal, with the signs of zeros. NaNs are equal."""
    both_nan = np.isnan(got) & np.isnan(wanted)
    return bool(((got.view(np.int32) == wanted.view(np.int32)) | both_nan).all())


def check_fma(triples: list[tuple[float, float, float]]) -> None:
    a, b, c = np.array(triples, np.float32).T
    wanted = [multiply_add(*triple) for triple in zip(*np.stack([a, b, c]).tolist(), strict=True)]
    assert same_bits(fused_multiply_add(a, b, c), np.array(wanted, np.float32))


def test_a_fused_multiply_add_of_random_numbers_rounds_once():
    rng = np.random.default_rng(2)
    near = rng.normal(size=(4000, 3)) * 2.0 ** rng.integers(-30, 30, (4000, 3))
    a, b = rng.normal(size=(2, 4000)).astype(np.float32).astype(float)
    tails = np.stack([a, b, -a * b * (1 + 2.0 ** -rng.integers(20, 40, 4000))], axis=1)
    tiny = rng.normal(size=(1000, 3)) * 2.0 ** rng.integers(-80, -60, (1000, 3))
    tiny[:, 2] *= 2.0**-70
    check_fma([*near.tolist(), *tails.tolist(), *tiny.tolist()])


def test_a_fused_multiply_add_of_edge_cases_rounds_once():
    """Ties of float32 that a far smaller term breaks, subnormals, and the largest numbers."""
    ulp, most = 2.0**-23, float(np.finfo(np.float32).max)
    ties = [1 + ulp / 2, 1 + 3 * ulp / 2, 2 - ulp / 2, 1 + ulp, 1.0]
    rests = [0.0, 2.0**-60, 2.0**-100, 2.0**-149, 2.0**-53, 2.0**-54]
    products = [(1 + ulp, 0.5), (1 + ulp, 1.5), (4097.0, 4097.0), (ulp, 0.5), (3 * ulp, 0.5)]
    triples = []
    for (a, b), c, sign in itertools.product(products, [*ties, *rests], (1, -1)):
        triples += [(a, b, sign * c), (-a, b, sign * c), (c, sign, a), (c, 1.0, sign * b)]
    for c, rest in itertools.product(ties, rests):
        triples += [(rest, 1.0, c), (-rest, 1.0, c), (2.0**-70, rest, c), (1 + ulp, 1 + ulp, rest)]
    for c in (most, -most):
        half = 2.0**103  # of the last unit of the largest number
        triples += [(half, 1.0, c), (half, -1.0, c), (half, 1 - ulp, c), (most, most, c)]
        triples += [(most, 2.0, -most), (2.0**64, 2.0**64, c), (2.0**64, -(2.0**64), c)]
    for low in (2.0**-149, 2.0**-126, 2.0**-127, 3 * 2.0**-149):
        triples += [(low, 0.5, 0.0), (low, 0.5, low), (low, -0.5, low), (low, low, 0.0)]
        triples += [(low, low, -low), (-low, low, 0.0), (low, 1.5, -0.0), (low, 0.75, low)]
    zeros = (0.0, -0.0)
    triples += [*itertools.product((1.0, -1.0, *zeros), zeros, zeros), (1.0, 1.0, -1.0)]
    check_fma(triples)


def test_a_fused_multiply_add_keeps_what_is_not_finite():
    inf, nan = math.inf, math.nan
    cases = [
        ((inf, 1.0, 1.0), inf), ((-inf, 2.0, 1.0), -inf), ((1.0, 1.0, inf), inf),
        ((inf, 0.0, 1.0), nan), ((inf, 1.0, -inf), nan), ((3e38, 3e38, -inf), -inf),
        ((nan, 1.0, 1.0), nan), ((1.0, 1.0, nan), nan),
    ]  # fmt: skip
    a, b, c = np.array([triple for triple, _ in cases], np.float32).T
    wanted = np.array([value for _, value in cases], np.float32)
    assert same_bits(fused_multiply_add(a, b, c), wanted)


def slow_round(group: list[float]) -> tuple[list[int], float]:
    """Return the codes of up to 32 inputs, and their scale."""
    largest = max(map(abs, group))
    if largest < 2.0**-100:
        return [0] * len(group), 0.0
    scale = rounded(Fraction(largest) / 127)
    return [round(rounded(Fraction(x) / Fraction(scale))) for x in group], scale


def slow_product(groups: list[tuple[list[int], float]], weight: QuantisedRows, row: int) -> float:
    """Return one number of the product of rounded groups, by the documented definition."""
    form, codes = weight.form, weight.codes[row].tolist()
    segment, total = min(form.group, 32), 0.0
    for first in range(0, len(codes), segment):
        group, start = first // form.group, first % 32
        own, scale = groups[first // 32]
        own = own[start : start + segment]
        exact = sum(a * q for a, q in zip(own, codes[first : first + segment], strict=True))
        t = multiply_add(exact, float(weight.scales[row, group]), 0.0)
        if weight.offsets is not None:
            t = multiply_add(sum(own), float(weight.offsets[row, group]), t)
        total = multiply_add(t, scale, total)
    return total


def inputs(num_rows: int, num_columns: int, seed: int = 0) -> np.ndarray:
    """Return normal numbers with groups of other sizes, of zeros and of tiny numbers among them."""
    rng = np.random.default_rng([seed, num_rows, num_columns])
    x = rng.normal(size=(num_rows, num_columns))
    sizes = rng.choice([1.0, 1e-3, 40.0, 0.0, 1e-32, 1e20], (num_rows, -(-num_columns // 32)))
    return (x * sizes.repeat(32, axis=1)[:, :num_columns]).astype(np.float32)


def wanted_product(x: np.ndarray, weight: QuantisedRows) -> np.ndarray:
    wanted = np.empty((len(x), len(weight)), np.float32)
    for t, row in enumerate(x.tolist()):
        groups = [slow_round(row[start : start + 32]) for start in range(0, len(row), 32)]
        wanted[t] = [slow_product(groups, weight, n) for n in range(len(weight))]
    return wanted


@pytest.mark.parametrize("form", INTEGER_FORMS, ids=str)
def test_a_product_equals_the_loop_of_fractions(form: Form):
    for seed, least in enumerate((1, 31, form.group + 17, 2 * form.group, 100)):
        weight = quantised(form, 3, columns(form, least), seed)
        x = inputs(2, weight.shape[1], seed)
        assert same_bits(integer_linear(x, weight), wanted_product(x, weight))


@pytest.mark.parametrize("form", [form for form in INTEGER_FORMS if not form.has_units], ids=str)
def test_each_step_of_a_product_rounds_once(form: Form):
    """Scales and offsets have all their bits, and few groups hide a rounding."""
    rows, rng = quantised(form, 40, 40), np.random.default_rng(6)
    planes = {"scales": rows.scales} | ({"offsets": rows.offsets} if form.has_offsets else {})
    wide = {name: rng.normal(size=plane.shape).astype("f4") for name, plane in planes.items()}
    weight = replace(rows, **wide)
    x = rng.normal(size=(2, 40)).astype(np.float32)
    assert same_bits(integer_linear(x, weight), wanted_product(x, weight))


@pytest.mark.slow
@pytest.mark.parametrize("form", INTEGER_FORMS, ids=str)
def test_products_of_random_shapes_equal_the_loop_of_fractions(form: Form):
    rng = np.random.default_rng(5)
    for seed in range(40):
        num_rows, num_tokens, least = rng.integers(1, [6, 5, 400]).tolist()
        weight = quantised(form, num_rows, columns(form, least), seed)
        x = inputs(num_tokens, weight.shape[1], seed)
        assert same_bits(integer_linear(x, weight), wanted_product(x, weight))


def test_activations_round_to_the_codes_of_fractions():
    x = inputs(50, 100, 7)
    got = round_activations(x)
    assert got.codes.shape == (50, 4, ACTIVATION_GROUP)
    assert got.scales.shape == (50, 4)
    for row, codes, scales in zip(x.tolist(), got.codes.tolist(), got.scales.tolist(), strict=True):
        wanted = [slow_round(row[start : start + 32]) for start in range(0, 100, 32)]
        assert scales == [scale for _, scale in wanted]
        assert codes[-1][4:] == [0] * 28
        codes[-1] = codes[-1][:4]
        assert codes == [group for group, _ in wanted]


def test_ties_of_activations_go_to_even():
    x = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 125.5]], np.float32)
    assert round_activations(x).codes[0, 0, :8].tolist() == [127, 0, 2, 2, 0, -2, -126, 126]


def test_small_groups_of_activations_are_zeros():
    border = 2.0**-100
    x = np.zeros((3, 32), np.float32)
    x[:, 5] = border, np.nextafter(np.float32(border), np.float32(0)), 1e-40
    got = round_activations(x)
    assert got.scales[0, 0] == np.float32(border) / np.float32(127)
    assert got.codes[:, 0, 5].tolist() == [127, 0, 0]
    assert got.scales[1:].tolist() == [[0], [0]]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("form", [INTEGER_FORMS[0], INTEGER_FORMS[1]], ids=str)
def test_a_row_with_a_number_that_is_not_finite_has_products_of_nan(value: float, form: Form):
    weight = quantised(form, 5, 70)
    x = inputs(3, 70, 1)
    wanted = integer_linear(x, weight)
    x[1, 40] = value
    got = integer_linear(x, weight)
    assert np.isnan(got[1]).all()
    assert same_bits(got[[0, 2]], wanted[[0, 2]])
    scale = round_activations(x).scales[1, 1]
    assert np.isnan(scale) if math.isnan(value) else scale == math.inf
    assert not round_activations(x).codes[1, 1].any()


def test_bias_and_residual_are_added_after_the_product():
    form = INTEGER_FORMS[0]
    weight, x = quantised(form, 6, 48), inputs(4, 48, 3)
    rng = np.random.default_rng(1)
    bias, residual = rng.normal(size=6).astype("f4"), rng.normal(size=(4, 6)).astype("f4")
    product = integer_product(round_activations(x), weight)
    got = integer_linear(x, weight, bias, residual)
    assert same_bits(got, (product + bias) + residual)
    assert same_bits(integer_linear(x, weight), product)


@pytest.mark.parametrize("form", INTEGER_FORMS, ids=str)
def test_a_product_is_near_the_product_of_floats(form: Form):
    weight = quantised(form, 40, columns(form, 320))
    x = np.random.default_rng(4).normal(size=(9, weight.shape[1])).astype(np.float32)
    exact = linear_quantised(x, weight)
    error = integer_linear(x, weight) - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < 0.01


@pytest.mark.parametrize("form", INTEGER_FORMS[::5], ids=str)
def test_a_row_has_the_same_bits_alone(form: Form):
    weight = quantised(form, 33, columns(form, 200))
    x = inputs(12, weight.shape[1], 9)
    together = integer_linear(x, weight)
    for row in range(len(x)):
        assert same_bits(integer_linear(x[row : row + 1], weight), together[row : row + 1])
    assert integer_linear(x[:0], weight).shape == (0, 33)
