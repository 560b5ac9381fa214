"""Compare products of many rows with codes with float64, and their bits for every number of rows.

test_kernels.py says which modes there are.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_adversarial import choose, run_calls
from test_few_rows import garbage
from test_kernels import ERRORS, MODES, check, launcher_of, make_backend, normal, wide
from test_narrow_weights import Q4_0, Q4_K, SIX, precise
from test_quantised_products import FORMS, matrix_of, rows_of, weights

from mie.checkpoint.gguf.blocks import FORMS as GGUF_FORMS
from mie.ops.weights.quantised import Form, QuantisedRows, dequantise, quantise
from mie.ops_gpu import wide_rows
from mie.ops_gpu.arrays import DTYPES
from mie.ops_gpu.chip import EMULATED_CHIP, Chip
from mie.ops_gpu.host.emulator import EmulatedLauncher
from mie.ops_gpu.weights import CupyLinear
from mie.ops_gpu.wide_rows import MAX_WIDE_ROWS, WideRows, splits_of, stages_of

pytestmark = needs_compiler

INT4 = Form(codes="int4", group=32, has_offsets=False)
Q4_1, Q5_1 = GGUF_FORMS["Q4_1"], GGUF_FORMS["Q5_1"]
H200 = Chip(num_multiprocessors=132, shared_bytes=228 << 10)
ONE = Chip(num_multiprocessors=1, shared_bytes=100 << 10)


def chip_of(num_multiprocessors: int) -> Chip:
    return Chip(num_multiprocessors=num_multiprocessors, shared_bytes=228 << 10)


def drawn(form: Form, width: int, depth: int) -> QuantisedRows:
    """Return rows whose weights are at most 2, and whose offsets count as much as their codes."""
    rows = precise(form, width, depth)
    planes = dict(rows.kept())
    if form.has_units and form.has_offsets:
        planes["offset_units"] = planes["scale_units"] * np.float32(5)
    largest = np.abs(wide(dequantise(QuantisedRows.of_kept(form, planes)))).max()
    power = 2.0 ** -np.floor(np.log2(largest))
    for name in ("scale_units", "offset_units") if form.has_units else ("scales", "offsets"):
        if name in planes:
            planes[name] = (planes[name] * power).astype(planes[name].dtype)
    return QuantisedRows.of_kept(form, planes)


def multiply(
    mode: Any,
    x: np.ndarray,
    rows: QuantisedRows,
    chip: Chip = EMULATED_CHIP,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
    products: WideRows | None = None,
) -> np.ndarray:
    """Return the product, which is written between other columns."""
    first, width = 8, len(rows)
    if residual is None:
        out = garbage(mode, x.dtype.name, len(x), width + 11)
    else:
        out = np.pad(residual, ((0, 0), (first, 3)))
    before = out.copy()
    matrix = matrix_of(rows)
    assert wide_rows.takes(x, matrix)
    (products or WideRows(launcher_of(mode), chip)).linear(
        x, matrix, out, bias=bias, is_added=residual is not None, first=first
    )
    for others in (slice(first), slice(first + width, None)):
        assert out[:, others].tobytes() == before[:, others].tobytes()
    return np.ascontiguousarray(out[:, first : first + width])


CASES = [
    # dtype, form, inputs, outputs, rows, multiprocessors
    ("float16", INT4, 328, 150, 40, 8),
    ("bfloat16", INT4, 328, 130, 20, 1),
    ("bfloat16", FORMS[2], 136, 33, 70, 2),
    ("float16", FORMS[1], 1096, 129, 17, 1),
    ("bfloat16", FORMS[3], 1032, 16, 33, 132),
    ("float16", FORMS[4], 200, 1, 64, 1),
    ("bfloat16", FORMS[5], 64, 128, 31, 3),
    ("float16", FORMS[6], 8, 40, 129, 3),
    ("float16", FORMS[7], 1104, 300, 100, 12),
    ("float16", FORMS[0], 4096, 129, 33, 132),
    ("bfloat16", Q4_0, 640, 140, 24, 4),
    ("float16", Q4_K, 1024, 140, 24, 8),
    ("bfloat16", Q4_K, 512, 17, 50, 4),
    ("bfloat16", SIX[0], 768, 60, 18, 3),
    ("float16", SIX[1], 512, 60, 64, 1),
    ("bfloat16", SIX[4], 384, 144, 65, 1),
    ("float16", Q5_1, 320, 20, 19, 5),
    ("bfloat16", Q4_1, 320, 20, 256, 1),
]


@pytest.mark.parametrize(
    ("mode", "case"),
    [
        pytest.param(
            mode,
            case,
            id=f"{mode}-{i}",
            marks=[] if (i, mode) == (0, "checked") else pytest.mark.slow,
        )
        for i, case in enumerate(CASES)
        for mode in MODES
    ],
)
def test_products(mode: str, case: tuple[Any, ...]):
    dtype, form, depth, width, num_rows, multiprocessors = case
    rows, chip = drawn(form, width, depth), chip_of(multiprocessors)
    x, bias = normal(dtype, num_rows, rows.shape[1]), normal(dtype, width, seed=2)
    product = wide(x) @ weights(rows).T
    check(multiply(mode, x, rows, chip, bias), product + wide(bias), dtype)
    residual = normal(dtype, num_rows, width, seed=3)
    check(multiply(mode, x, rows, chip, None, residual), product + wide(residual), dtype)


@pytest.mark.parametrize(
    ("dtype", "form", "depth"),
    [
        ("float16", INT4, 520),
        pytest.param("bfloat16", Q4_K, 512, marks=pytest.mark.slow),
        pytest.param("bfloat16", FORMS[2], 200, marks=pytest.mark.slow),
        pytest.param("float16", FORMS[3], 1032, marks=pytest.mark.slow),
        pytest.param("bfloat16", SIX[0], 1024, marks=pytest.mark.slow),
    ],
)
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype: str, form: Form, depth: int):
    """The other rows are large, infinite or NaN. Blocks have 32 rows or 64, and splits meet."""
    rows, chip = drawn(form, 20, depth), chip_of(3)
    x = normal(dtype, 130, rows.shape[1])
    x[1] *= 100
    x[2] = np.inf
    x[3, 0] = np.nan
    assert splits_of(rows.shape, chip) > 1
    whole = multiply("reverse", x, rows, chip)
    assert np.isnan(wide(whole[3])).all()
    products = WideRows(launcher_of("forward"), chip)  # the next launch counts anew
    for num_rows in (1, 17, 32, 33, 64, 65):
        some = multiply("forward", x[:num_rows], rows, chip, products=products)
        assert some.tobytes() == whole[:num_rows].tobytes()
    backwards = multiply("forward", np.ascontiguousarray(x[::-1]), rows, chip)
    assert np.ascontiguousarray(backwards[::-1]).tobytes() == whole.tobytes()


@pytest.mark.slow
def test_a_rows_bits_do_not_depend_on_the_stages():
    """Chips with other shared memory have other pipelines."""
    rows, x = drawn(INT4, 20, 520), normal("bfloat16", 40, 520)
    results = set()
    for shared_bytes in (0, 100 << 10, 228 << 10):
        chip = replace(EMULATED_CHIP, shared_bytes=shared_bytes)
        results.add(multiply("forward", x, rows, chip).tobytes())
    assert len(results) == 1


SOME_FORMS = [*FORMS, *SIX, Q4_0, Q4_1, Q4_K]


@pytest.mark.slow
@pytest.mark.parametrize("form", SOME_FORMS, ids=str)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_weight_has_the_bits_of_the_definition(dtype: str, form: Form):
    """Each product with a unit vector is one weight, in any of 64 rows. Every code occurs."""
    rows = drawn(form, 40, 136)
    depth = rows.shape[1]
    if form.codes != "float8_e4m3fn":
        low, high = int(rows.codes.min()), int(rows.codes.max())
        every = np.arange(rows.codes.size).reshape(rows.shape) * 7 % (high - low + 1) + low
        rows.codes[...] = every.astype(np.int8)
    wanted = dequantise(rows).astype(DTYPES[dtype])
    for first in range(0, depth, 64):
        x = np.eye(depth, dtype=DTYPES[dtype])[first : first + 64]
        got = multiply("forward", x, rows)
        np.testing.assert_array_equal(got, wanted[:, first : first + 64].T)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_scales_and_rows_of_extreme_magnitudes(dtype: str):
    """Neither scales nor rows are brought into the range of 16 bits."""
    rows = rows_of(INT4, 48, 264)
    rng = np.random.default_rng(9)
    most = -8 if dtype == "float16" else 10  # results are finite
    rows.scales[...] = 2.0 ** rng.integers(-100, most, rows.scales.shape) * rng.uniform(1, 2)
    powers = 2.0 ** rng.integers(-14, 8, (40, 1))
    x = (wide(normal(dtype, 40, 264)) * powers).astype(DTYPES[dtype])
    if dtype == "bfloat16":
        x[0] = (wide(x[0]) * 2.0**90).astype(x.dtype)
        x[1] = (wide(x[1]) * 2.0**-90).astype(x.dtype)
    got = wide(multiply("random", x, rows))
    wanted = wide(x) @ weights(rows).T
    sizes = np.abs(wide(x)) @ np.abs(weights(rows)).T
    tiny = 2.0**-24 if dtype == "float16" else 2.0**-133  # half of the least subnormal number
    assert (np.abs(got - wanted) <= 4 * ERRORS[dtype] * sizes + tiny).all()


@pytest.mark.slow
def test_a_bfloat16_row_is_not_rounded_to_float16():
    """Its smallest numbers count beside numbers that are 2^40 as large."""
    rows = quantise(normal("float32", 16, 64), Form(codes="int8", group=64, has_offsets=False))
    rows.codes[:, 0] = 0
    x = np.full((17, 64), 2.0**-20).astype(DTYPES["bfloat16"])
    x[:, 0] = 2.0**20
    check(multiply("forward", x, rows), wide(x) @ weights(rows).T, "bfloat16")


def test_each_product_uses_the_kernels_it_may():
    """The shape chooses: 17 to 256 rows, 16 bits, and inputs in whole vectors."""

    def launched(dtype: str, depth: int, num_rows: int) -> str:
        backend, names = make_backend("forward", dtype), []

        def kernel(file: str, name: str) -> Callable[..., None]:
            return lambda *args, **sizes: names.append(name)

        backend.launcher.kernel = kernel
        weight = CupyLinear(parts=(matrix_of(rows_of(INT4, 20, depth)),))
        backend.linear(normal(dtype, num_rows, depth), weight)
        [name] = names
        return name

    assert launched("float16", 72, 16).startswith("few_rows_linear<")
    assert launched("float16", 72, 17).startswith("wide_linear<f16, nibbles, 32, false, 32, 4,")
    assert launched("bfloat16", 72, 33).startswith("wide_linear<bf16, nibbles, 32, false, 32, 8,")
    assert launched("float16", 72, MAX_WIDE_ROWS).startswith("wide_linear<")
    for others in (("float16", 72, MAX_WIDE_ROWS + 1), ("float16", 71, 17), ("float32", 72, 17)):
        assert launched(*others).startswith("widen_weights<")


@pytest.mark.parametrize(
    ("width", "depth", "splits", "stages"),
    [(2560, 2048, 6, 3), (2048, 5632, 8, 6), (11264, 2048, 3, 6), (32000, 2048, 1, 16)],
)
def test_splits_fill_the_chip(width: int, depth: int, splits: int, stages: int):
    """The stages of a block follow from the matrix and the chip (TinyLlama on an H200)."""
    matrix = matrix_of(rows_of(INT4, 1, 8))
    assert splits_of((width, depth), H200) == splits
    assert -(-depth // 128 // splits) == stages
    assert (stages_of(matrix, 64, H200), stages_of(matrix, 64, ONE)) == (6, 3)
    assert stages_of(matrix, 64, replace(ONE, shared_bytes=0)) == 2
    num_bytes = 4 * 128 * 64 * splits * -(-width // 128)
    assert splits == 1 or num_bytes <= wide_rows.most_sums_bytes(64, H200)


def call(rng: np.random.Generator, mode: str) -> str:
    """Compare each row of a random product with float64. Return a description."""
    dtype, number = choose(rng, "float16", "bfloat16"), int(rng.integers(len(ALL_CALLED)))
    form = ALL_CALLED[number]
    depth = 8 * int(choose(rng, 1, 8, 16, 17, 64, 80, rng.integers(1, 200)))
    width = int(choose(rng, 1, 16, 127, 128, 129, 260, rng.integers(1, 300)))
    num_rows = int(choose(rng, 17, 18, 31, 32, 33, 63, 64, 65, rng.integers(1, 140)))
    chip = Chip(
        num_multiprocessors=int(choose(rng, 1, 2, 3, 8, 132)),
        shared_bytes=int(choose(rng, 0, 99 << 10, 227 << 10)),
    )
    seed, hostile = int(rng.integers(1 << 30)), int(rng.integers(6))
    called = f"{dtype} {form} {(depth, width, num_rows)} {chip} {hostile} {seed}"
    rows = drawn(form, width, depth)
    depth = rows.shape[1]
    if hostile == 1 and not form.has_units:  # groups without a weight
        rows.scales[rng.random(rows.scales.shape) < 0.5] = 0
    if hostile == 2:  # only the ends of the range
        ends = rows.codes.astype(np.float32).min(), rows.codes.astype(np.float32).max()
        rows.codes[...] = np.where(rng.random(rows.shape) < 0.5, *ends).astype(rows.codes.dtype)
    x = normal(dtype, num_rows, depth, seed=seed % 1000)
    if hostile == 3:  # rows of all magnitudes
        powers = rng.integers(-12, 5, (num_rows, 1)) * (5 if dtype == "bfloat16" else 1)
        x = (wide(x) * 2.0**powers).astype(x.dtype)
    if hostile == 5 and form.scale_bits == 32:  # scales of all magnitudes
        rows.scales[...] *= (2.0 ** rng.integers(-40, 4, rows.scales.shape)).astype(np.float32)
    spoilt = num_rows if hostile != 4 else int(rng.integers(num_rows))
    x[spoilt : spoilt + 1] = choose(rng, np.nan, np.inf)
    before = normal(dtype, num_rows, width, seed=3) if rng.random() < 0.3 else None
    bias = normal(dtype, width, seed=4) if rng.random() < 0.3 else None
    with np.errstate(all="ignore"):
        got = wide(multiply(mode, x, rows, chip, bias, before))
        base = np.zeros((num_rows, width)) if before is None else wide(before)
        base = base + (0 if bias is None else wide(bias))
        wanted, size = wide(x) @ weights(rows).T, np.abs(wide(x)) @ np.abs(weights(rows)).T
        others = np.arange(num_rows) != spoilt
        error = np.linalg.norm((got - wanted - base)[others], axis=-1)
        allowed = 2 * ERRORS[dtype] * np.linalg.norm((size + np.abs(base))[others], axis=-1)
    assert (error <= allowed + 2.0**-24).all(), called
    assert spoilt == num_rows or not np.isfinite(got[spoilt]).all(), called
    return called


ALL_CALLED = [INT4, *FORMS[:3], FORMS[3], FORMS[4], FORMS[7], SIX[0], SIX[2], Q4_0, Q4_K]
CALLS, SEEDS = 20, 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_calls_agree_with_float64(seed: int):
    own: Callable[..., str] = call
    assert len(run_calls(seed, CALLS, call=own)) == CALLS


COUNTED = (
    *("mma", "cp_async.requests", "cp_async.passes", "cp_async_source.passes", "in_flight"),
    *("barriers", "blocks", "idle_blocks", "unhinted_copies"),
)
WORK = {
    ("float16", INT4): (6144, 768, 2496, 7680, 7680, 30, 6, 0, 0),
    ("bfloat16", Q4_K): (9216, 960, 2688, 8064, 8064, 30, 6, 0, 0),
}
"""The counts of `COUNTED` in `launch_some_work`. They are the same with every compiler."""

SHARED = {("float16", INT4): 18024, ("bfloat16", Q4_K): 18792}
"""Wavefronts of other accesses to shared memory, with g++ 12. Other compilers may need fewer."""


@pytest.mark.parametrize(
    "load",
    [pytest.param(load, marks=[pytest.mark.slow] if i else []) for i, load in enumerate(WORK)],
)
def test_launches_do_the_work_of_the_ledger(load: tuple[str, Form]):
    """Notice a bank conflict, a copy or a barrier too many, and stages that nothing hides."""
    dtype, form = load
    launcher = EmulatedLauncher(check=True, count=True)
    rows = drawn(form, 264, 512)
    multiply(launcher, normal(dtype, 40, 512), rows, chip_of(6))
    [counters], [products] = launcher.counters.values(), launcher.products.values()
    assert tuple(counters[each] for each in COUNTED) == WORK[load]
    assert counters["cp_async.passes"] == counters["cp_async.least"]
    assert counters["cp_async_source.passes"] == counters["cp_async_source.least"]
    assert counters["shared.passes"] <= 1.05 * SHARED[load]
    assert len({*products}) == 1
