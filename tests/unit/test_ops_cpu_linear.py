"""Compare the plans for the matrix product with `ops.linear.linear` in float64."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from linear_layouts import (
    KERNEL,
    LAYOUTS,
    PACKED,
    TILED,
    layout_of,
    needs_kernel,
)

from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.load.backends import load_backend
from mie.ops import linear
from mie.ops_cpu import cpu_backend
from mie.ops_cpu.allocator import CACHE_LINE
from mie.ops_cpu.cpu_backend import CpuBackend
from mie.ops_cpu.embedding import Embedding
from mie.ops_cpu.linear.geometry import KERNEL_ROWS, MAX_ROWS
from mie.ops_cpu.linear.matrix import Matrix
from mie.ops_cpu.linear.plain import PlainPlan
from mie.ops_cpu.linear.probe import Probe
from mie.ops_cpu.linear.tiled import BYTES_PER_TURN, TiledMatrix, TiledPlan, tasks_of
from mie.ops_cpu.linear.widen import stored, widen
from mie.ops_cpu.threads.blas import Blas
from mie.ops_cpu.threads.workers import Workers

RNG = np.random.default_rng(0)
# (K, N): one tile or less, odd sizes, more than one part of K, several tasks.
SHAPES = [(1, 1), (7, 5), (64, 64), (100, 130), (4001, 70), (37, 700)]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    workers = Workers(3)
    with Blas().threads(1):  # as in a step
        yield workers
    workers.close()


def make_plan(dtype: str, workers: Workers, weight_dtype: str = "auto") -> TiledPlan:
    """Return a plan that shares even the smallest product between threads."""
    return TiledPlan(np.dtype(dtype), workers, weight_dtype, bytes_per_thread=1, kernel=KERNEL)


def load(
    name: str,
    dtype: str,
    workers: Workers,
    blocks: list[np.ndarray],
    bias: np.ndarray | None = None,
    weight_dtype: str = "auto",
) -> Matrix:
    """Load a matrix that is plain or in a layout."""
    shape = sum(map(len, blocks)), blocks[0].shape[1]
    if name == "plain":
        plain = PlainPlan(np.dtype(dtype), workers, bytes_per_thread=1)
        return plain.load(shape, blocks, bias)
    plan = make_plan(dtype, workers, weight_dtype)
    return plan.load(shape, blocks, bias, layout_of(plan, name, shape))


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape)


def assert_close(got: np.ndarray, wanted: np.ndarray, num_inputs: int) -> None:
    """Compare within num_inputs roundings of a sum of order sqrt(num_inputs).

    Terms of order 1 are rounded once each, and so are their sums.
    """
    bound = float(np.finfo(got.dtype).eps) * (num_inputs + 4) * np.sqrt(num_inputs + 2)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=bound)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in ("plain", *TILED) for dtype in ("float32", "float64")),
        *(pytest.param(*each.values, "float32", marks=needs_kernel) for each in PACKED),
    ],
)
def test_a_plan_multiplies_any_number_of_rows(
    name: str, dtype: str, shape: tuple[int, int], workers: Workers
):
    num_inputs, num_outputs = shape
    weight, bias = normal(num_outputs, num_inputs).astype(dtype), normal(num_outputs).astype(dtype)
    cut = num_outputs // 3
    matrix = load(name, dtype, workers, [weight[:cut], weight[cut:]], bias)
    every = range(71) if num_inputs < 200 else (1, 6)
    for num_rows in [*every, MAX_ROWS + 3]:
        x = normal(num_rows, num_inputs).astype(dtype)
        residual = normal(num_rows, num_outputs).astype(dtype)
        wanted = linear.linear(*(each.astype("float64") for each in (x, weight.T, bias, residual)))
        got = matrix.apply(x, residual)
        assert got.dtype == dtype
        assert got.shape == wanted.shape
        assert_close(got, wanted, num_inputs)


@pytest.mark.parametrize("name", ["plain", *LAYOUTS])
def test_bias_and_residual_are_optional(name: str, workers: Workers):
    weight, x = normal(70, 9).astype("float32"), normal(5, 9).astype("float32")
    matrix = load(name, "float32", workers, [weight])
    assert_close(matrix.apply(x, None), x @ weight.T, 9)


@pytest.mark.parametrize("name", ["plain", *LAYOUTS])
def test_operands_may_have_any_strides(name: str, workers: Workers):
    weight, x = normal(70, 70).astype("float32"), normal(70, 24).astype("float32")
    matrix = load(name, "float32", workers, [weight])
    residual = normal(70, 48).astype("float32").T[::2]
    wide = normal(48, 140).astype("float32")
    # Columns, rows with others between them, rows in reverse order, one row several times.
    same = np.broadcast_to(wide[0, :70], (24, 70))
    for each in (x.T, wide[:24, ::2], wide[::2, 3:73], wide[23::-1, :70], same):
        assert_close(matrix.apply(each, residual), each @ weight.T + residual.copy(), 70)
        assert_close(matrix.apply(each[:1], None), each[:1] @ weight.T, 70)
    for each in (x.T[:6].copy(), x.T[:24].copy()):
        assert_close(matrix.apply(each, each), each @ weight.T + each.copy(), 70)


@pytest.mark.parametrize("name", ["plain", *LAYOUTS])
def test_operands_are_not_written(name: str, workers: Workers):
    matrix = load(name, "float32", workers, [normal(70, 9).astype("float32")])
    x, residual = normal(5, 9).astype("float32"), normal(5, 70).astype("float32")
    first = matrix.apply(x, residual)
    np.testing.assert_array_equal(matrix.apply(x, residual), first)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("tiled", "float64"),
        *((name, "float32") for name in TILED),
        pytest.param("packed-invariant", "float32", marks=needs_kernel),
    ],
)
@pytest.mark.parametrize("shape", [(64, 64), (576, 330), (4001, 270)])
def test_a_row_of_an_invariant_layout_depends_only_on_itself(
    name: str, dtype: str, shape: tuple[int, int], workers: Workers
):
    """It does not depend on the number of threads either."""
    num_inputs, num_outputs = shape
    weight = normal(num_outputs, num_inputs).astype(dtype)
    x = normal(MAX_ROWS + 9, num_inputs).astype(dtype)
    everything = load(name, dtype, workers, [weight]).apply(x, None)
    for num_threads in (1, 2, 3):
        others = Workers(num_threads)
        matrix = load(name, dtype, others, [weight])
        for num_rows in (1, 2, 3, 4, 5, 8, 13, 24, 33, MAX_ROWS, MAX_ROWS + 1, len(x)):
            rows = RNG.permutation(len(x))[:num_rows]
            np.testing.assert_array_equal(matrix.apply(x[rows], None), everything[rows])
        others.close()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(64, 64), (576, 330), (100, 2000), (4001, 270)])
def test_a_product_in_tiles_does_not_depend_on_the_number_of_threads(
    name: str, shape: tuple[int, int]
):
    num_inputs, num_outputs = shape
    weight = normal(num_outputs, num_inputs).astype("float32")
    results = []
    for num_threads in (1, 2, 3):
        workers = Workers(num_threads)
        matrix = load(name, "float32", workers, [weight])
        rows = np.random.default_rng(1).standard_normal((70, num_inputs)).astype("float32")
        results.append([matrix.apply(rows[:n], None) for n in (1, 4, 8, 12, 13, 24, 40, 70)])
        workers.close()
    for others in results[1:]:
        for got, wanted in zip(others, results[0], strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(9, 70), (2049, 150)])
def test_a_layout_takes_what_was_put_at_any_border(
    name: str, shape: tuple[int, int], workers: Workers
):
    num_inputs, num_outputs = shape
    weight = normal(num_outputs, num_inputs).astype("float32")
    whole = load(name, "float32", workers, [weight])
    assert isinstance(whole, TiledMatrix)
    columns = RNG.permutation(num_outputs)
    np.testing.assert_array_equal(whole.layout.take(whole.tiles, columns), weight[columns])
    rest = np.arange(num_outputs, len(whole.tiles) * whole.layout.width)
    assert not whole.layout.take(whole.tiles, rest).any()
    for border in (1, 7, 8, 31, 32, 33, 63, 64, 65, num_outputs - 1):
        cut = load(name, "float32", workers, [weight[:border], weight[border:]])
        assert isinstance(cut, TiledMatrix)
        np.testing.assert_array_equal(cut.tiles, whole.tiles)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_kept_in_16_bits_give_the_same_bits(
    name: str, weight_dtype: str, shape: tuple[int, int], workers: Workers
):
    num_inputs, num_outputs = shape
    # Many float16 are subnormal: below 6e-5.
    scale = RNG.choice([1, 1e-3, 1e-5, 1e-7], (num_outputs, num_inputs))
    weight = (normal(num_outputs, num_inputs) * scale).astype(weight_dtype)
    wide, kept = (
        load(name, "float32", workers, [weight], weight[:, 0], each)
        for each in ("auto", weight_dtype)
    )
    for num_rows in (1, 6, 40, 150):
        x = normal(num_rows, num_inputs).astype("float32")
        got, wanted = kept.apply(x, None), wide.apply(x, None)
        np.testing.assert_array_equal(got, wanted)
    assert kept.nbytes < 0.6 * wide.nbytes or num_inputs < 8  # the bias is wide in both


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("weight_dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("size", [9, 2049])
def test_an_embedding_and_its_head_share_their_memory(
    size: int, weight_dtype: str, name: str, workers: Workers
):
    table = normal(70, size).astype(ml_dtypes.bfloat16)
    embedding = Embedding((70, size), [table[:8], table[8:]], np.dtype("float32"), weight_dtype)
    plan = make_plan("float32", workers, weight_dtype)
    layout = layout_of(plan, name, (70, size))
    token_ids = np.array([69, 0, 64, 0])
    wanted = table[token_ids].astype("float32")
    np.testing.assert_array_equal(embedding.take(token_ids), wanted)
    np.testing.assert_array_equal(embedding.rows, table)
    tiles = embedding.as_tiles(layout)
    assert tiles.shape == (-(-70 // layout.width), size, layout.width)
    np.testing.assert_array_equal(embedding.take(token_ids), wanted)
    assert np.shares_memory(tiles, embedding.memory)
    assert embedding.as_tiles(layout) is tiles
    x = normal(5, size).astype("float32")
    head = TiledMatrix(plan, layout, tiles, 70, None)
    loaded = load(name, "float32", workers, [table], None, weight_dtype)
    np.testing.assert_array_equal(head.apply(x, None), loaded.apply(x, None))


@pytest.mark.parametrize("width", KERNEL_ROWS)
def test_a_backend_takes_the_width_that_the_probe_finds(
    width: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Probe, "width", lambda probe, num_inputs: width)
    backend = load_backend("numpy", config=EngineConfig(linear_plan="tiled", num_threads=2))
    weight, x = normal(70, 9).astype("float32"), normal(5, 9).astype("float32")
    head = backend.tie_linear(backend.load_embedding((70, 9), [weight]))
    for matrix in (backend.load_linear((70, 9), [weight]), head):
        assert matrix.tiles.shape[2] == width
        assert_close(backend.linear(x, matrix), x @ weight.T, 9)
    backend.workers.close()


def test_widening_is_exact_for_every_finite_float16():
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    values = values[np.isfinite(values)]
    out = widen(values, np.empty(len(values), np.float32))
    np.testing.assert_array_equal(out.view(np.uint32), values.astype("float32").view(np.uint32))


def test_weights_that_cannot_stay_in_16_bits_are_refused():
    single = np.dtype("float32")
    with pytest.raises(ConfigError, match="'bfloat16'; the checkpoint has weights in float32"):
        stored(np.ones((2, 2), "float32"), "bfloat16", single)
    with pytest.raises(ConfigError, match="infinite"):
        stored(np.array([[np.inf]], "float16"), "float16", single)


@pytest.mark.parametrize("tied", [False, True])
def test_a_backend_reports_the_plans_it_loaded(tied: bool):
    wanted = {"plain": "plain", "tiled": "tiled"}
    if KERNEL is not None:
        wanted["packed"] = "packed-invariant"
    for plan, name in wanted.items():
        backend = load_backend("numpy", config=EngineConfig(linear_plan=plan))
        assert backend.linear_is_batch_invariant  # vacuously
        embedding = backend.load_embedding((70, 9), [normal(70, 9)])
        if tied:
            backend.tie_linear(embedding)
        else:
            backend.load_linear((70, 9), [normal(70, 9)])
        assert backend.linear_plans == {(9, 70): name}
        assert backend.linear_is_batch_invariant == (plan != "plain")


def test_16_bit_weights_take_half_the_memory():
    wide, kept = (
        load_backend("numpy", config=EngineConfig(weight_dtype=each))
        for each in ("auto", "bfloat16")
    )
    assert wide.weight_bytes((70, 9)) == 4 * 630
    assert kept.weight_bytes((70, 9)) == 2 * 630
    assert kept.weight_bytes((9,)) == 4 * 9  # norms are widened


@pytest.mark.parametrize("num_threads", [2, 3, 8, 64])
@pytest.mark.parametrize("num_bytes", [1 << 20, 8 * BYTES_PER_TURN])
@pytest.mark.parametrize("head_start", [-2, 0, 3])
@pytest.mark.parametrize(("num_tiles", "num_groups"), [(1, 1), (9, 16), (40, 16), (176, 128)])
def test_tasks_cover_each_tile_and_group_once(
    num_tiles: int, num_groups: int, head_start: int, num_bytes: int, num_threads: int
):
    # The head starts that are learned leave each thread some work.
    head_start = max(-num_tiles // (2 * num_threads), min(head_start, num_tiles // 2))
    covered = np.zeros((num_tiles, num_groups), int)
    for tiles, groups in tasks_of(num_tiles, num_groups, num_threads, num_bytes, head_start):
        assert covered[tiles, groups].size
        covered[tiles, groups] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("num_threads", [2, 4, 8, 16, 32, 64])
def test_tasks_of_a_prompt_are_even_and_read_the_weights_a_few_times(num_threads: int):
    tasks = tasks_of(176, 128, num_threads, 92 * BYTES_PER_TURN)
    sizes = [(tiles.stop - tiles.start) * (groups.stop - groups.start) for tiles, groups in tasks]
    assert max(sizes) < 1.15 * sum(sizes) / len(sizes)
    assert len(tasks) >= num_threads
    assert len({groups.start for _, groups in tasks}) <= 4


def test_a_decode_reads_the_weights_once():
    for num_threads in (2, 4, 32):
        tasks = tasks_of(176, 1, num_threads, 92 << 20)
        assert all(groups == slice(0, 1) for _, groups in tasks)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_packed_plan_is_refused_where_it_has_no_kernel(
    dtype: str, monkeypatch: pytest.MonkeyPatch
):
    if dtype == "float32":
        monkeypatch.setattr(cpu_backend, "numpy_kernel", lambda: None)
    wanted = f"linear_plan 'packed' needs dtype float32 and .*; got {dtype} and BLAS .* 'auto'"
    with pytest.raises(ConfigError, match=wanted):
        CpuBackend(dtype, linear_plan="packed")
    backend = CpuBackend(dtype)
    weight, x = normal(70, 9).astype(dtype), normal(5, 9).astype(dtype)
    assert_close(backend.linear(x, backend.load_linear((70, 9), [weight])), x @ weight.T, 9)
    assert backend.linear_plans == {(9, 70): "tiled"}


@pytest.mark.parametrize("plan", ["plain", "tiled", pytest.param("packed", marks=needs_kernel)])
def test_weights_begin_at_cache_lines(plan):
    backend = CpuBackend(linear_plan=plan)
    shapes = [(3, 5), (70, 33), (200, 100)]
    weights = [backend.load_linear(shape, [np.ones(shape, np.float32)]) for shape in shapes]
    embedding = backend.load_embedding((7, 3), [np.ones((7, 3), np.float32)])
    arrays = [each.weight if plan == "plain" else each.tiles for each in weights]
    assert {each.ctypes.data % CACHE_LINE for each in [*arrays, embedding.memory]} == {0}
