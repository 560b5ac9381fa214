"""Compare products with rounded activations with their definition in `mie.ops`, bit for bit."""

import functools
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compiled import needs_numba
from numpy.typing import NDArray
from quantised_rows import FORMS, columns, in_blocks, quantised

from mie.config.engine import EngineConfig
from mie.load.backends import load_backend
from mie.ops.weights.integer import integer_linear
from mie.ops.weights.quantised import Form, QuantisedRows, dequantise

pytestmark = needs_numba

INT4 = Form(codes="int4", group=32, has_offsets=True)
INT8 = Form(codes="int8", group=32, has_offsets=False)
SIGNED = Form(codes="int4", group=64, has_offsets=False)
HALF = Form(codes="int8", group=16, has_offsets=True, scale_bits=8)
SEXTETS = Form(codes="int8", group=32, has_offsets=False, scale_bits=16, has_six_bits=True)
SEXTETS_OF_16 = Form(codes="int8", group=16, has_offsets=True, scale_bits=8, has_six_bits=True)
INTEGERS = [form for form in FORMS if form.codes != "float8_e4m3fn"]
SIX_BITS = [
    replace(form, has_six_bits=True)
    for form in INTEGERS
    if form.codes == "int8" and form.scale_bits < 32
]
QUICK = (INT4, HALF, SIGNED, SEXTETS)
EACH_FORM = [
    pytest.param(
        form,
        id=f"{form}{', six bits' * form.has_six_bits}",
        marks=[] if form in QUICK else [pytest.mark.slow],
    )
    for form in [*INTEGERS, *SIX_BITS]
]
CPUS = ["", "haswell"]
"""This CPU, and one with AVX2 only."""
NUM_ROWS = (*range(18), 31, 97, 100)
"""All sizes of tiles, and around blocks (96)."""
SIZES = [(1, 1), (20, 6), (96, 80), (65, 131), (130, 561)]
"""Outputs and inputs."""

Array = NDArray[np.float32]


@functools.cache  # each keeps threads
def backend_on(cpu: str, num_threads: int = 2) -> Any:
    if cpu and platform.machine() != "x86_64":
        pytest.skip("no such CPU")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIE_CPU", cpu)
        return load_backend("jit", config=EngineConfig(num_threads=num_threads, activations="int8"))


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def assert_same_bits(got: Array, wanted: Array) -> None:
    """Compare bits. NaNs are equal."""
    assert got.shape == wanted.shape
    differ = (got.view(np.int32) != wanted.view(np.int32)) & ~(np.isnan(got) & np.isnan(wanted))
    assert not differ.any(), np.argwhere(differ)[:5]


def loaded(backend: Any, rows: QuantisedRows, bias: Array | None = None, block: int = 100) -> Any:
    parts = [(len(rows), rows.form)]
    return backend.load_linear(rows.shape, in_blocks(rows, block), bias, parts)


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("form", EACH_FORM)
def test_a_product_has_the_bits_of_the_definition(form: Form, cpu: str):
    for num_outputs, least in SIZES:
        num_inputs = columns(form, least)
        rows, bias = quantised(form, num_outputs, num_inputs), normal(num_outputs, seed=2)
        x, residual = normal(100, num_inputs), normal(100, num_outputs, seed=3)
        wanted = integer_linear(x, rows, bias, residual)
        for threads, block in ((1, 100), (2, 33), (3, 7)):
            backend = backend_on(cpu, threads)
            weight = loaded(backend, rows, bias, block)
            for count in NUM_ROWS:
                got = backend.linear(x[:count], weight, residual[:count])
                assert_same_bits(got, wanted[:count])


@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("form", [INT4, HALF], ids=str)
def test_rows_of_any_numbers_have_the_bits_of_the_definition(form: Form, cpu: str):
    """Groups of zeros, tiny and huge numbers, equal magnitudes, infinities and NaNs."""
    rng = np.random.default_rng(7)
    num_inputs = columns(form, 333)
    rows, backend = quantised(form, 70, num_inputs), backend_on(cpu)
    weight = loaded(backend, rows)
    sizes = np.array([0, 2.0**-100, 2.0**-101, 1e-42, 1e-30, 1, 1e30, 1e37], np.float32)
    of_groups = rng.choice(sizes, (40, -(-num_inputs // 32))).repeat(32, axis=1)
    x = normal(40, num_inputs) * of_groups[:, :num_inputs]
    x[3:8] = np.sign(x[3:8])
    x[8, 5::7], x[8, :5] = np.arange(len(x[8, 5::7])) / 2, 127  # ties
    for row, value in ((10, np.inf), (11, -np.inf), (12, np.nan)):
        x[row, rng.integers(num_inputs)] = value
    x[13, :2] = np.inf, np.nan
    x[14] = 0
    x[14, 3], x[14, 40] = 2.0**-100, np.nextafter(np.float32(2.0**-100), np.float32(0))
    scales = (np.abs(normal(10, 9, 1, seed=4)) / np.float32(127)).repeat(32, axis=2)
    halves = rng.integers(-126, 126, scales.shape) + np.float32(0.5)
    halves[..., 0] = 127  # and many quotients are ties, or next to one
    x[20:30, :288] = (halves * scales).astype(np.float32).reshape(10, 288)
    with np.errstate(all="ignore"):
        wanted = integer_linear(x, rows)
    assert np.isnan(wanted[10:14]).all()
    for count in (1, 2, 5, 9, 40):
        for first in range(0, 40 - count + 1, count):
            got = backend.linear(x[first : first + count], weight)
            assert_same_bits(got, wanted[first : first + count])


def test_the_largest_sums_have_the_bits_of_the_definition():
    """Sums of 8 and 16 bits would overflow first with codes and activations of one sign."""
    for cpu in CPUS:
        backend = backend_on(cpu)
        for form in (INT4, SIGNED, INT8, SEXTETS):
            rows = quantised(form, 64, 128)
            lowest = {"int8": -128, "int4": 0 if form.has_offsets else -8}[form.codes]
            highest = {"int8": 127, "int4": 15 if form.has_offsets else 7}[form.codes]
            if form.has_six_bits:
                lowest, highest = -32, 31
            rows.codes[:20], rows.codes[20:40], rows.codes[40:] = lowest, highest, rows.codes[40:]
            x = np.ones((6, 128), np.float32)
            x[1], x[2, ::2], x[3, 1::2] = -1, -1, -1
            weight = loaded(backend, rows)
            assert_same_bits(backend.linear(x, weight), integer_linear(x, rows))


def test_an_embedding_and_its_head_share_one_copy():
    for form in (INT4, INT8, HALF, SEXTETS, SEXTETS_OF_16):
        num_inputs = columns(form, 600)
        backend, rows = backend_on(""), quantised(form, 70, num_inputs)
        table = backend.load_embedding(rows.shape, in_blocks(rows, 33), form)
        head, token_ids = backend.tie_linear(table), np.array([69, 0, 33, 0, 15, 16])
        assert_same_bits(backend.embed(token_ids, table), dequantise(rows)[token_ids])
        (panels,) = table.segments
        assert panels.memory.nbytes == backend.weight_bytes(rows.shape, form)
        x = normal(5, num_inputs)
        assert_same_bits(backend.linear(x, head), integer_linear(x, rows))


@pytest.mark.parametrize("forms", [(INT8, INT8), (INT4, INT4), (INT4, INT8)])
@pytest.mark.parametrize("width", [6, 80])
def test_a_gate_has_the_bits_of_its_two_products(forms: tuple[Form, Form], width: int):
    backend, num_inputs = backend_on(""), 530
    halves = [quantised(form, width, num_inputs, seed) for seed, form in enumerate(forms)]
    bias, norm = normal(2 * width), normal(num_inputs, seed=3)
    parts = [(width, form) for form in forms]
    weight = backend.load_linear((2 * width, num_inputs), halves, bias, parts)
    for num_rows in (1, 5, 9, 97):
        x = normal(num_rows, num_inputs)
        normed = backend.rms_norm(x, backend.load_vector(norm), 1e-5)
        both = [
            integer_linear(normed, half, bias[at : at + width])
            for half, at in zip(halves, (0, width), strict=True)
        ]
        wanted = backend.activate(np.concatenate(both, axis=1), "silu")
        got = backend.norm_gate_up(x, backend.load_vector(norm), 1e-5, weight)
        assert_same_bits(np.array(got), np.array(wanted))


def test_parts_of_a_fused_matrix_have_their_own_forms_and_floats_are_exact():
    q, v = quantised(INT4, 70, 65, seed=1), quantised(INT8, 30, 65, seed=2)
    k = normal(64, 65)
    backend, bias, x = backend_on(""), normal(164), normal(20, 65)
    parts = [(70, INT4), (64, None), (30, INT8)]
    weight = backend.load_linear((164, 65), [q, k, v], bias, parts)
    exact = backend.linear(x, backend.load_linear(k.shape, [k], bias[70:134]))
    pieces = [integer_linear(x, q, bias[:70]), exact, integer_linear(x, v, bias[134:])]
    for count in (1, 8, 20):
        got = backend.linear(x[:count], weight)
        assert_same_bits(got, np.concatenate(pieces, axis=1)[:count])


@pytest.mark.parametrize("form", [INT4, INT8], ids=str)
def test_experts_have_the_bits_of_each_rows_products(form: Form):
    hidden, width, num_experts, chosen = 70, 48, 5, 2
    backend, rng = backend_on(""), np.random.default_rng(3)
    gates = [quantised(form, 2 * width, hidden, seed) for seed in range(num_experts)]
    downs = [quantised(form, hidden, width, seed + 9) for seed in range(num_experts)]
    for each in (*gates, *downs):  # results stay finite
        each.scales[...] *= np.float32(0.01)
        if each.offsets is not None:
            each.offsets[...] *= np.float32(0.01)
    router = backend.load_linear((num_experts, hidden), [normal(num_experts, hidden)])
    weights = backend.experts.load(
        router=router, number=num_experts, num_chosen=chosen, is_normalised=True, activation="silu",
        gate_up=[loaded(backend, each) for each in gates],
        down=[loaded(backend, each) for each in downs],
    )  # fmt: skip
    x, residual = normal(130, hidden), normal(130, hidden, seed=1)
    routed = np.zeros((130, 2, chosen), np.float32)
    routed[:, 0] = np.argsort(rng.random((130, num_experts)))[:, :chosen]
    routed[:, 1, 0], routed[:, 1, 1] = 1, 0  # only the first choice counts
    wanted = np.empty_like(x)
    for row in range(len(x)):
        expert = int(routed[row, 0, 0])
        both = integer_linear(x[row : row + 1], gates[expert])
        gated = np.array(backend.activate(both, "silu"))
        wanted[row] = integer_linear(gated, downs[expert])[0] + residual[row]
    for count in (1, 7, 130):
        got = backend.experts.compute(x[:count], routed[:count], weights, residual[:count])
        assert_same_bits(np.array(got), wanted[:count])


WITH_VNNI = "+avxvnni"


@pytest.mark.parametrize(
    ("triple", "features"),
    [
        pytest.param("aarch64-unknown-linux-gnu", "", marks=pytest.mark.slow),
        pytest.param("x86_64-unknown-linux-gnu", WITH_VNNI, marks=pytest.mark.slow),
    ],
)
def test_instructions_of_other_cpus_have_the_bits_of_the_definition(
    triple: str, features: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """LLVM has the products of aarch64 before Armv8.2 for every CPU.

    AVX-512 has an encoding of AVX-VNNI's instructions.
    """
    from mie.ops_jit.compiler import Cpu, host_cpu
    from mie.ops_jit.kernels import dots

    host = host_cpu()
    if features == WITH_VNNI and not (host.has("avx512vnni") and host.has("avx512vl")):
        pytest.skip("this CPU has no AVX-512 VNNI")
    plain, other = dots.dot_of, Cpu(triple, "", features)
    monkeypatch.setattr(dots, "dot_of", lambda fmt, cpu: plain(fmt, other))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # kept kernels have other instructions
    backend: Any = load_backend("jit", config=EngineConfig(num_threads=1, activations="int8"))
    for form in (INT4, INT8, SEXTETS):
        rows, x = quantised(form, 70, 131), normal(14, 131)
        rows.codes[:8] = rows.codes.min()
        weight, wanted = loaded(backend, rows), integer_linear(x, rows)
        for count in range(1, 15):
            assert_same_bits(backend.linear(x[:count], weight), wanted[:count])


def test_products_with_one_order_of_codes_share_rounded_rows():
    from mie.ops_jit.products import multiply
    from mie.ops_jit.program import Program

    backend = backend_on("")
    offsets = Form(codes="int8", group=128, has_offsets=True)
    matrices = [loaded(backend, quantised(form, 16, 64)) for form in (INT4, INT4, INT8, offsets)]
    recorder, names = backend.recorder, []
    program = Program(lambda name: names.append(name) or 0, 1, 1)
    recorder.recording = program
    try:
        x = program.given(normal(1, 64))
        for matrix in matrices:
            multiply(recorder, x, matrix)
    finally:
        recorder.recording = None
    rounding = [name for name in names if name.startswith("round_rows")]
    assert rounding == ["round_rows[int4-g32-offsets]", "round_rows[int8-g32-words]"]
