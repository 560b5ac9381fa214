"""Compare products with rounded activations, bit for bit, with the definition in mie.ops.

test_kernels.py says which modes there are.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from audit import captured_steps
from emulated import needs_compiler
from quantised_rows import FORMS, columns, in_blocks, quantised
from test_few_rows import garbage
from test_graphs import DEVICES, Run
from test_kernels import dtype, launcher_of, make_backend, mode, normal, wide

from mie.config.engine import EngineConfig
from mie.ops.weights.integer import integer_linear, round_activations
from mie.ops.weights.quantised import Form, QuantisedRows
from mie.ops_gpu.arena import fresh
from mie.ops_gpu.arrays import DTYPES
from mie.ops_gpu.cupy_backend import CupyBackend
from mie.ops_gpu.integer import RECORD, IntegerProducts, record_bytes
from mie.ops_gpu.weights import CupyLinear, load_parts

__all__ = ["dtype", "mode"]
pytestmark = needs_compiler

INTEGER_FORMS = [form for form in FORMS if form.codes != "float8_e4m3fn"]
COUNTS = (1, 3, 8, 9, 16, 40, 65, 100)


def matrix_of(rows: QuantisedRows, bias: np.ndarray | None = None) -> CupyLinear:
    parts = load_parts(
        np, rows.shape, in_blocks(rows, 23), [(len(rows), rows.form)], np.dtype(np.float16)
    )
    return CupyLinear(parts=parts, bias=bias)


def backend_of(mode: Any, dtype: str) -> CupyBackend:
    return make_backend(mode, dtype, activations="int8")


def hostile(dtype: str, num_rows: int, depth: int, seed: int = 0) -> np.ndarray:
    """Return rows of all magnitudes with zeros, ties, and some numbers that are not finite."""
    rng = np.random.default_rng([seed, num_rows, depth])
    x = rng.normal(size=(num_rows, depth)) * 2.0 ** rng.integers(-20, 10, (num_rows, 1))
    x[rng.random((num_rows, depth)) < 0.1] = 0
    for row in range(1, num_rows, 3):  # halves of codes: ties, and numbers beside ties
        x[row] = rng.integers(-253, 254, depth) / 2
        x[row, ::32] = 127
        x[row] *= rng.choice([1, rng.uniform(0.5, 1)])
    for row in range(2, num_rows, 5):
        group = rng.integers(0, -(-depth // 32))
        small = 2.0**-24 if dtype == "float16" else 2.0**-110
        x[row, 32 * group : 32 * group + 32] *= rng.choice([0.0, -0.0, small])
    with np.errstate(over="ignore"):
        x = x.astype(DTYPES[dtype])
    if num_rows > 6:
        x[4, rng.integers(depth)] = np.nan
        x[6, rng.integers(depth)] = rng.choice([np.inf, -np.inf])
    return x


def defined(
    x: np.ndarray,
    rows: QuantisedRows,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    """Return the definition's result for the numbers of ``x``, rounded to the dtype once."""
    terms = (None if term is None else term.astype(np.float32) for term in (bias, residual))
    with np.errstate(all="ignore"):
        return integer_linear(x.astype(np.float32), rows, *terms).astype(x.dtype)


def assert_same_bits(got: np.ndarray, wanted: np.ndarray) -> None:
    """Compare all bits, but not the bits of NaNs."""
    assert got.dtype == wanted.dtype
    is_nan = np.isnan(wide(wanted))
    np.testing.assert_array_equal(np.isnan(wide(got)), is_nan)
    unsigned = np.dtype(f"u{got.dtype.itemsize}")
    both = (np.where(is_nan, 0, each.view(unsigned)) for each in (got, wanted))
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize("depth", [1, 33, 128, 300])
def test_rows_are_rounded_as_defined(mode: str, dtype: str, depth: int):
    x = hostile(dtype, 13, depth)
    empty = fresh(np)

    def poisoned(*args: Any) -> np.ndarray:
        array: np.ndarray = empty(*args)
        launcher_of(mode).mark_uninitialised(array)
        return array

    records = IntegerProducts(launcher_of(mode), poisoned).round(x)
    assert records.shape == (13, record_bytes(depth))
    with np.errstate(all="ignore"):
        wanted = round_activations(x.astype(np.float32))
    chunks = wanted.codes.shape[1]
    got = records.reshape(13, -1, 160)
    codes = got[..., :RECORD].reshape(13, -1, 32).view(np.int8)
    assert not codes[:, chunks:].any()
    np.testing.assert_array_equal(codes[:, :chunks], wanted.codes)
    parts = (
        np.ascontiguousarray(got[..., RECORD:][..., part]) for part in (slice(16), slice(16, 32))
    )
    scales, sums = next(parts).view(np.float32), next(parts).view(np.int16)
    np.testing.assert_array_equal(scales.reshape(13, -1)[:, :chunks], wanted.scales)
    halves = codes.reshape(13, -1, 16).astype(np.int16).sum(axis=-1)
    np.testing.assert_array_equal(sums.reshape(13, -1), halves)


CASES = [
    pytest.param(form, count, marks=[] if i % 8 == j else [pytest.mark.slow], id=f"{form}-{count}")
    for i, form in enumerate(INTEGER_FORMS)
    for j, count in enumerate(COUNTS)
]


@pytest.mark.parametrize(("form", "num_rows"), CASES)
def test_products_have_the_bits_of_the_definition(mode: str, dtype: str, form: Form, num_rows: int):
    """Several slices of K, and an end inside a group."""
    rows = quantised(form, 41 if num_rows < 65 else 150, columns(form, 560 + form.group + 9))
    bias = normal(dtype, len(rows), seed=2)
    backend, x = backend_of(mode, dtype), hostile(dtype, num_rows, rows.shape[1])
    weight = matrix_of(rows, bias)
    assert_same_bits(backend.linear(x, weight), defined(x, rows, bias))
    residual = normal(dtype, num_rows, len(rows), seed=3)
    got = backend.linear(x, weight, residual.copy())
    assert_same_bits(got, defined(x, rows, bias, residual))


@pytest.mark.parametrize("depth", [1, 31, 64, 513])
def test_an_end_inside_a_unit_adds_nothing(mode: str, depth: int):
    """The sums of rows with negative zeros keep their signs, and weights past K are no zeros."""
    for form in (INTEGER_FORMS[1], INTEGER_FORMS[8], INTEGER_FORMS[4]):
        assert not form.has_units
        rows = quantised(form, 20, depth)
        # Each term is subnormal, or a zero with a sign.
        rows.scales[...] = np.float32(2.0**-140) * (-1) ** np.arange(20)[:, None]
        x = np.ones((70, depth), np.float32) * 2.0**-20
        for count in (2, 70):
            got = backend_of(mode, "float32").linear(x[:count], matrix_of(rows))
            assert_same_bits(got, defined(x[:count], rows))


def test_extreme_codes_and_scales(mode: str):
    """The largest sums of a segment, products that overflow, and results below 2**-126."""
    for form in INTEGER_FORMS[:8:2] + INTEGER_FORMS[8:16:3]:
        rows = quantised(form, 64, 320)
        low, high = {"int4": (0, 15) if form.has_offsets else (-8, 7)}.get(form.codes, (-128, 127))
        rows.codes[:20], rows.codes[20:40] = low, high
        rows.scales[::3] = 2.0**100
        rows.scales[1::3] = 2.0**-97
        x = np.full((9, 320), 127, np.float32)
        x[1], x[2], x[3], x[4] = -127, 2.0**40, 2.0**-99, 2.0**-30
        x[5:, ::2] *= -1
        backend = backend_of(mode, "float32")
        assert_same_bits(backend.linear(x, matrix_of(rows)), defined(x, rows))


def test_only_integer_parts_round_activations(mode: str, dtype: str):
    """A part of fp8 and a part of floats have the products that they have without the setting."""
    forms = [INTEGER_FORMS[3], FORMS[18], INTEGER_FORMS[8]]
    assert forms[1].codes == "float8_e4m3fn"
    some = [quantised(form, 32, 160, seed=i) for i, form in enumerate(forms)]
    dense = normal(dtype, 24, 160, seed=5)
    parts = tuple(part for rows in some for part in matrix_of(rows).parts)
    weight = CupyLinear(parts=(*parts, dense), bias=normal(dtype, 120, seed=2))
    for count in (3, 40):
        x = normal(dtype, count, 160)
        got = backend_of(mode, dtype).linear(x, weight)
        exact = make_backend(mode, dtype).linear(x, weight)
        for i, first in ((0, 0), (2, 64)):
            columns_of = slice(first, first + 32)
            assert weight.bias is not None
            wanted = defined(x, some[i], weight.bias[columns_of])
            assert_same_bits(np.ascontiguousarray(got[:, columns_of]), wanted)
        for kept in (slice(32, 64), slice(96, 120)):
            np.testing.assert_array_equal(got[:, kept], exact[:, kept])


def test_a_norm_is_rounded_before_its_result_is(mode: str, dtype: str):
    """Norms, gates and heads are operators of their own before and after integer products."""
    rows = quantised(INTEGER_FORMS[3], 96, 200)
    weight, by = matrix_of(rows), normal(dtype, 200, seed=4)
    for count in (2, 30):
        x = normal(dtype, count, 200)
        backend = backend_of(mode, dtype)
        normed = backend.rms_norm(x, by, 1e-5)
        wanted = defined(normed, rows)
        assert_same_bits(backend.norm_linear(x, by, 1e-5, weight), wanted)
        gated = backend.norm_gate_up(x, by, 1e-5, weight)
        assert gated.tobytes() == backend.activate(wanted, "silu").tobytes()


@pytest.mark.parametrize("form", [INTEGER_FORMS[0], INTEGER_FORMS[3], INTEGER_FORMS[9]], ids=str)
@pytest.mark.parametrize("is_few", [True, False])
def test_experts(mode: str, dtype: str, form: Form, is_few: bool):
    """Tiles of sorted rows of two experts, one of them with two tiles, and empty tiles."""
    most = 8 if is_few else 32
    matrices = [quantised(form, 300, 216, seed=expert) for expert in range(3)]
    backend = backend_of(mode, dtype)
    bias = normal(dtype, 3, 300, seed=4)
    loaded = backend.experts.load(
        router=None,
        gate_up=[matrix_of(rows, bias[i]) for i, rows in enumerate(matrices)],
        down=[matrix_of(rows) for rows in matrices],
        number=3,
        num_chosen=1,
        is_normalised=True,
        activation="silu",
    )
    tiles = np.array([[0, 0, most], [0, most, 3], [2, most + 3, 5], [0, 0, 0]], np.int32)
    x = hostile(dtype, most + 8, 216)
    products = IntegerProducts(launcher_of(mode), fresh(np))
    out = garbage(mode, dtype, len(x), 300)
    matrix, biases = loaded.gate_up.matrix, loaded.gate_up.bias
    products.experts(products.round(x), matrix, biases, tiles, out, is_few=is_few)
    for expert, first, count in tiles:
        of_tile = slice(first, first + count)
        wanted = defined(x[of_tile], matrices[expert], bias[expert])
        assert_same_bits(out[of_tile], wanted)


@pytest.mark.parametrize("form", [INTEGER_FORMS[2], INTEGER_FORMS[3], INTEGER_FORMS[8]], ids=str)
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype: str, form: Form):
    """Rows alone, among few and among many, of which some are not finite."""
    rows = quantised(form, 50, 700)
    weight, backend = matrix_of(rows), backend_of("forward", dtype)
    x = hostile(dtype, 130, 700)
    together = {count: backend.linear(x[:count], weight) for count in (8, 9, 64, 65, 130)}
    for row in range(0, 130, 9):
        alone = backend.linear(x[row : row + 1], weight).tobytes()
        for count, results in together.items():
            assert row >= count or results[row].tobytes() == alone


MODELS = {"head norms": tiny_models.QWEN3_TIED, "experts": tiny_models.QWEN3_MOE}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "quantization"), [("head norms", "int8"), ("experts", "int4")])
def test_a_model_gives_the_tokens_of_numpy_captured_and_eager(
    tmp_path: Path, device: str, name: str, quantization: str
):
    """Steps of few rows and of many, with chunks, prefix hits and padded steps."""
    model = tiny_models.write_model(
        tmp_path, MODELS[name], tiny_models.random_weights(MODELS[name])
    )
    settings: dict[str, Any] = {
        "activations": "int8",
        "num_blocks": 40,
        "block_size": 4,
        "max_num_batched_tokens": 80,
        "max_num_seqs": 12,
        "async_scheduling": False,
    }
    captured, eager, wanted = (
        Run(
            model,
            backend,
            3,
            config=EngineConfig(**settings, enforce_eager=is_eager),
            dtype="float32",
            quantization=quantization,
        )
        for backend, is_eager in ((device, False), (device, True), ("numpy", False))
    )
    assert len(captured_steps(captured.backend)) >= 3
    assert not captured_steps(eager.backend)
    logits = [[each.tobytes() for each in run.logits] for run in (captured, eager)]
    assert logits[0] == logits[1]
    assert captured.tokens == wanted.tokens
