"""Compare matrix products with `ops.linear.linear`, and tiles with themselves bit for bit."""

from collections.abc import Iterator

import numpy as np
import pytest

from mie.errors import ConfigError
from mie.ops import linear
from mie.ops_cpu import linear as linear_module
from mie.ops_cpu.blas import Blas
from mie.ops_cpu.cpu_backend import CpuBackend
from mie.ops_cpu.linear import Matrix, PlainMatrix, TiledMatrix
from mie.ops_cpu.products import Groups
from mie.ops_cpu.weights import stored_dtype
from mie.ops_cpu.workers import Workers

RNG = np.random.default_rng(0)
# (K, N): one tile or less, odd sizes, more than one part of K, several threads.
SHAPES = [(1, 1), (7, 5), (64, 64), (100, 130), (4001, 70), (37, 700)]


PLANS = ["plain", "tiled"]


@pytest.fixture(params=["alone", "shared"])
def workers(request, monkeypatch) -> Iterator[Workers]:
    """Multiply in one thread, or share even the smallest product among three."""
    if request.param == "shared":
        monkeypatch.setattr(linear_module, "BYTES_PER_THREAD", 1)
    workers = Workers(3)
    with Blas().threads(1):  # as in a step
        yield workers
    workers.close()


def load(plan, dtype, workers, blocks, bias=None, weight_dtype="auto") -> Matrix:
    shape = sum(len(block) for block in blocks), blocks[0].shape[1]
    if plan == "plain":
        return PlainMatrix.load(shape, blocks, bias, np.dtype(dtype), workers)
    groups = Groups(np.dtype(dtype))
    return TiledMatrix.load(shape, blocks, bias, groups, workers, weight_dtype)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 9, 65, 130])
def test_products_equal_the_definition(plan, dtype, shape, num_rows, workers):
    num_inputs, num_outputs = shape
    weight, bias = normal(num_outputs, num_inputs).astype(dtype), normal(num_outputs).astype(dtype)
    x, residual = (normal(num_rows, size).astype(dtype) for size in (num_inputs, num_outputs))
    for own_bias, own_residual in ((None, None), (bias, residual)):
        matrix = load(plan, dtype, workers, [weight], own_bias)
        got = matrix.apply(x, own_residual)
        wide = [
            None if each is None else each.astype("float64") for each in (own_bias, own_residual)
        ]
        expected = linear.linear(x.astype("float64"), weight.T.astype("float64"), *wide)
        assert (got.dtype, got.shape) == (np.dtype(dtype), expected.shape)
        atol = num_inputs * np.finfo(dtype).eps * 10
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(576, 200), (1536, 130), (2048, 64), (4001, 70), (100, 130)])
def test_a_row_of_tiles_has_the_same_bits_in_any_batch(dtype, shape, workers):
    num_inputs, num_outputs = shape
    weight = normal(num_outputs, num_inputs).astype(dtype)
    matrix = load("tiled", dtype, workers, [weight])
    x = normal(90, num_inputs).astype(dtype)
    whole = matrix.apply(x, None)
    for number in (1, 2, 3, 5, 8, 9, 16, 24, 33, 64):
        at = int(RNG.integers(len(x) - number))
        np.testing.assert_array_equal(
            matrix.apply(x[at : at + number], None), whole[at : at + number]
        )
    one_thread = load("tiled", dtype, Workers(1), [weight])
    np.testing.assert_array_equal(one_thread.apply(x, None), whole)


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_kept_in_16_bits_give_the_same_bits(weight_dtype, shape, workers):
    num_inputs, num_outputs = shape
    # Many float16 are subnormal: below 6e-5.
    scale = RNG.choice([1, 1e-3, 1e-5, 1e-7], (num_outputs, num_inputs))
    weight = (normal(num_outputs, num_inputs) * scale).astype(weight_dtype)
    wide, kept = (
        load("tiled", "float32", workers, [weight], weight[:, 0], each)
        for each in ("auto", weight_dtype)
    )
    for num_rows in (1, 6, 40):
        x = normal(num_rows, num_inputs).astype("float32")
        np.testing.assert_array_equal(kept.apply(x, None), wide.apply(x, None))
    assert kept.nbytes < 0.6 * wide.nbytes or num_inputs < 8  # the bias is wide in both


def test_weights_that_cannot_stay_in_16_bits_are_refused():
    single = np.dtype("float32")
    with pytest.raises(ConfigError, match="'bfloat16'; the checkpoint has weights in float32"):
        stored_dtype(np.ones((2, 2), "float32"), "bfloat16", single)
    with pytest.raises(ConfigError, match="infinite"):
        stored_dtype(np.array([[np.inf]], "float16"), "float16", single)


@pytest.mark.parametrize(
    ("core", "settings", "expected"),
    [
        ("SkylakeX", {}, "tiled"),
        ("SapphireRapids", {"linear_plan": "plain"}, "plain"),
        ("Haswell", {}, "plain"),
        ("unknown", {}, "plain"),
        ("Haswell", {"linear_plan": "tiled"}, "tiled"),
        ("Haswell", {"batch_invariant": True}, "tiled"),
        ("Zen", {"weight_dtype": "bfloat16"}, "tiled"),
    ],
)
def test_the_plan_follows_from_the_kernels_and_the_settings(core, settings, expected, monkeypatch):
    monkeypatch.setattr(Blas, "_text", lambda self, name: core)
    backend = CpuBackend(num_threads=1, **settings)
    assert backend.linear_plan == expected
    weight = normal(70, 9).astype("bfloat16")
    x = normal(5, 9).astype("float32")
    tied = backend.tie_linear(backend.load_embedding((70, 9), [weight]))
    for matrix in (backend.load_linear((70, 9), [weight]), tied):
        assert isinstance(matrix, TiledMatrix if expected == "tiled" else PlainMatrix)
        wanted = x @ weight.T.astype("float32")
        np.testing.assert_allclose(backend.linear(x, matrix), wanted, rtol=0, atol=1e-5)
