"""Compare products of quantised weights with those of their dequantised weights, bit for bit."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from compiled import jit_backend, needs_numba
from numpy.typing import NDArray
from quantised_rows import FORMS, columns, in_blocks, quantised

from mie.config.engine import EngineConfig
from mie.load.backends import load_backend
from mie.ops.kv_cache import HALVES
from mie.ops.weights.quantised import SMALLEST_SCALE, Form, dequantise

pytestmark = needs_numba

INT4 = Form(codes="int4", group=32, has_offsets=True)
INT8 = Form(codes="int8", group=32, has_offsets=False)
QUICK = [
    INT4,
    replace(INT8, scale_bits=16),
    Form(codes="int4", group=32, has_offsets=False, scale_bits=16),
    Form(codes="float8_e4m3fn", group=128, has_offsets=False),
    Form(codes="int4", group=32, has_offsets=True, scale_bits=8),
]
EACH_FORM = [
    pytest.param(form, id=str(form), marks=[] if form in QUICK else [pytest.mark.slow])
    for form in FORMS
]
NUM_ROWS = (*range(18), 97, 100)
"""All sizes of tiles, and around widening once for all rows (8 or 16) and blocks (96)."""
SIZES = [(1, 1), (20, 6), (96, 80), (70, 131), (65, 600), (70, 1041)]
"""Outputs and inputs. A pass has 512 inputs."""


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def assert_same_bits(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    assert got.shape == wanted.shape
    assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("form", EACH_FORM)
def test_a_product_has_the_bits_of_the_dequantised_weights(form: Form):
    for num_outputs, least in SIZES:
        num_inputs = columns(form, least)
        rows, bias = quantised(form, num_outputs, num_inputs), normal(num_outputs, seed=2)
        x, residual = normal(100, num_inputs), normal(100, num_outputs, seed=3)
        one, parts = jit_backend(1), [(num_outputs, form)]
        floats = one.load_linear(rows.shape, [dequantise(rows)], bias)
        wanted = one.linear(x, floats, residual)
        for threads, block in ((1, 100), (2, 33), (3, 1)):
            backend = jit_backend(threads)
            weight = backend.load_linear(rows.shape, in_blocks(rows, block), bias, parts)
            for count in NUM_ROWS:
                got = backend.linear(x[:count], weight, residual[:count])
                assert_same_bits(got, wanted[:count])


def test_scales_of_any_sign_and_size_give_the_bits_of_the_dequantised_weights():
    form, smallest = Form(codes="int4", group=32, has_offsets=False), SMALLEST_SCALE * 1.0000001
    rows = quantised(form, 70, 130)
    sizes = np.array([0, smallest, -smallest, 1e-20, -0.01, 1e30, -1e30], np.float32)
    rows.scales[...] = np.random.default_rng(1).choice(sizes, rows.scales.shape)
    backend, x = jit_backend(), normal(9, 130)
    plain = backend.load_linear(rows.shape, [dequantise(rows)])
    table = backend.load_embedding(rows.shape, [rows], form)
    for count in (1, 4, 8, 9):
        got = backend.linear(x[:count], backend.tie_linear(table))
        assert_same_bits(got, backend.linear(x[:count], plain))
    assert_same_bits(backend.embed(np.arange(70), table), dequantise(rows))


@pytest.mark.parametrize("form", EACH_FORM)
def test_an_embedding_and_its_head_share_one_copy(form: Form):
    num_inputs = columns(form, 600)
    backend, rows = jit_backend(), quantised(form, 70, num_inputs)
    table = backend.load_embedding(rows.shape, in_blocks(rows, 33), form)
    head, token_ids = backend.tie_linear(table), np.array([69, 0, 33, 0, 15, 16])
    assert_same_bits(backend.embed(token_ids, table), dequantise(rows)[token_ids])
    (panels,), (of_head,) = table.segments, head.segments
    assert panels.memory is of_head.memory
    assert panels.memory.nbytes == backend.weight_bytes(rows.shape, form)
    x = normal(5, num_inputs)
    wanted = backend.load_linear(rows.shape, [dequantise(rows)])
    assert_same_bits(backend.linear(x, head), backend.linear(x, wanted))


@pytest.mark.parametrize("forms", [(INT8, INT8), (INT4, INT4), (INT4, INT8), (INT8, None)])
def test_a_gate_of_any_forms_has_the_bits_of_the_dequantised_weights(forms):
    for width in (6, 80):
        check_gate(forms, width)


def check_gate(forms, width: int) -> None:
    backend, num_inputs = jit_backend(), 530
    halves = [quantised(form or INT8, width, num_inputs, seed) for seed, form in enumerate(forms)]
    floats = [dequantise(half) for half in halves]
    shape, bias = (2 * width, num_inputs), normal(2 * width)
    blocks = [
        half if form else each for half, form, each in zip(halves, forms, floats, strict=True)
    ]
    weight = backend.load_linear(shape, blocks, bias, [(width, form) for form in forms])
    plain = backend.load_linear(shape, floats, bias)
    norm = backend.load_vector(normal(num_inputs, seed=3))
    for num_rows in (1, 5, 9, 97):
        x = normal(num_rows, num_inputs)
        got, wanted = (backend.norm_gate_up(x, norm, 1e-5, each) for each in (weight, plain))
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("sizes", [(70, 30, 30), (64, 16, 1), (1, 1, 200)])
def test_parts_of_a_fused_matrix_have_their_own_formats(sizes: tuple[int, int, int]):
    first, second, third = sizes
    q, v = quantised(INT4, first, 65, seed=1), quantised(INT8, third, 65, seed=2)
    k = normal(second, 65).astype(HALVES["bfloat16"])
    backend, shape = jit_backend(), (sum(sizes), 65)
    bias, residual, x = normal(shape[0]), normal(20, shape[0]), normal(20, 65)
    parts = [(first, INT4), (second, None), (third, INT8)]
    weight = backend.load_linear(shape, [q, k, v], bias, parts)
    assert [each.format for each in weight.segments] == ["int4-g32-offsets", "bfloat16", "int8-g32"]
    floats = [dequantise(q), k.astype(np.float32), dequantise(v)]
    wanted = backend.linear(x, backend.load_linear(shape, floats, bias), residual)
    for count in (1, 8, 20):
        assert_same_bits(backend.linear(x[:count], weight, residual[:count]), wanted[:count])


def test_neighbours_of_one_form_are_one_segment():
    q, k = quantised(INT8, 70, 65), quantised(INT8, 10, 65, seed=1)
    weight = jit_backend().load_linear((80, 65), [q, k], None, [(70, INT8), (10, INT8)])
    (panels,) = weight.segments
    assert panels.shape == (80, 65)


@pytest.mark.slow
def test_weights_can_be_widened_at_load():
    rows, x = quantised(INT4, 70, 100), normal(9, 100)
    wide = load_backend("jit", config=EngineConfig(num_threads=1, weight_dtype="float32"))
    matrices = [
        (backend, backend.load_linear(rows.shape, [rows], None, [(70, INT4)]))
        for backend in (wide, jit_backend())
    ]
    assert matrices[0][1].segments[0].format == "float32"
    assert wide.weight_bytes((70, 100), INT4) == 128 * 100 * 4
    first, second = (backend.linear(x, matrix) for backend, matrix in matrices)
    assert_same_bits(np.array(first), second)


def test_loading_takes_a_few_blocks_beside_the_panels():
    """Panels are mapped memory, which tracemalloc does not count."""
    rows, backend = quantised(INT4, 4096, 512), jit_backend()
    size = 64
    block_bytes = size * (512 + 2 * 16 * 4)
    tracemalloc.start()
    weight = backend.load_linear(rows.shape, in_blocks(rows, size), None, [(4096, INT4)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * block_bytes
    assert weight.segments[0].memory.nbytes == rows.nbytes
