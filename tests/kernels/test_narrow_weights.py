"""Compare weights whose scales have 8 or 16 bits, and whose codes have 6, with their definition.

test_kernels.py says which modes there are.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import test_cupy_integers as integers
from emulated import needs_compiler
from quantised_rows import FORMS, columns, quantised
from test_few_rows import garbage
from test_kernels import check, dtype, make_backend, mode, normal, wide
from test_quantised_products import matrix_of, products

from mie.checkpoint.gguf.blocks import FORMS as GGUF_FORMS
from mie.ops.weights.quantised import Form, QuantisedRows, dequantise
from mie.ops_gpu.arrays import DTYPES
from mie.ops_gpu.weights import CupyLinear, packed_bytes

__all__ = ["dtype", "mode"]
pytestmark = needs_compiler


def six(group: int, scale_bits: Any, has_offsets: bool = False) -> Form:
    return Form(
        codes="int8", group=group, has_offsets=has_offsets, scale_bits=scale_bits, has_six_bits=True
    )


SIX = [
    six(16, 8),
    six(32, 8, True),
    six(32, 16),
    six(64, 32, True),
    six(128, 32),
    six(16, 32, True),
]
ALL_FORMS = [*FORMS, *SIX]
Q4_0, Q4_1, Q4_K = (GGUF_FORMS[kind] for kind in ("Q4_0", "Q4_1", "Q4_K"))


def precise(form: Form, num_rows: int, least: int) -> QuantisedRows:
    """Return rows whose scales, offsets and units have all of their bits."""
    rows = quantised(form, num_rows, columns(form, least))
    rng = np.random.default_rng(7)
    planes = rows.kept()
    for name in ("scales", "offsets", "scale_units", "offset_units"):
        if name in planes and planes[name].dtype != np.int8:
            of_all = rng.normal(size=planes[name].shape) * 2.0 ** rng.integers(-9, 3)
            planes[name] = of_all.astype(planes[name].dtype)
    return QuantisedRows.of_kept(form, planes)


@pytest.mark.parametrize("form", ALL_FORMS, ids=str)
def test_every_weight_has_the_bits_of_the_definition(dtype: str, form: Form):
    """Rows of an embedding are weights, and so is each product with a unit vector."""
    rows = precise(form, 40, 330 - form.group % 32)
    matrix, depth = matrix_of(rows), rows.shape[1]
    wanted = dequantise(rows).astype(DTYPES[dtype])
    backend = make_backend("forward", dtype)
    gathered = backend.embed(np.arange(39, -1, -1, dtype=np.int32), matrix)
    assert np.ascontiguousarray(gathered[::-1]).tobytes() == wanted.tobytes()
    places = np.arange(3, depth, 29)
    x = np.eye(depth, dtype=DTYPES[dtype])[places]
    out = garbage("forward", dtype, len(x), 40)
    products("forward").linear(x, matrix, out)
    np.testing.assert_array_equal(out, wanted[:, places].T)


@pytest.mark.parametrize("form", SIX, ids=str)
def test_every_code_of_six_bits(form: Form):
    rows = precise(form, 32, 256)
    low = 0 if form.has_offsets else -32
    rows.codes[...] = (np.arange(rows.codes.size).reshape(rows.shape) * 7 % 64 + low).astype(
        np.int8
    )
    gathered = make_backend("forward", "float32").embed(
        np.arange(32, dtype=np.int32), matrix_of(rows)
    )
    assert gathered.tobytes() == dequantise(rows).tobytes()


@pytest.mark.parametrize(
    ("form", "num_rows"), [(SIX[0], 3), (SIX[1], 11), (SIX[2], 18), (Q4_K, 2), (Q4_0, 9)]
)
def test_products(mode: str, dtype: str, form: Form, num_rows: int):
    rows = precise(form, 50, 1100)
    x = normal(dtype, num_rows, rows.shape[1])
    out = garbage(mode, dtype, num_rows, 50)
    products(mode).linear(x, matrix_of(rows), out)
    check(out, wide(x) @ wide(dequantise(rows)).T, dtype)


@pytest.mark.parametrize("form", [Q4_1, SIX[1], SIX[0]], ids=str)
def test_narrow_scales_change_no_bit_of_a_result(dtype: str, form: Form):
    """The same matrix with float32 scales and codes of 8 bits has the same products."""
    rows = precise(form, 48, 700)
    plain = replace(form, scale_bits=32, has_six_bits=False)
    same = QuantisedRows(form=plain, codes=rows.codes, scales=rows.scales, offsets=rows.offsets)
    assert packed_bytes(rows.shape, form) < packed_bytes(rows.shape, plain)
    for count in (2, 12, 40):
        x = normal(dtype, count, rows.shape[1])
        results = []
        for each in (rows, same):
            weight = CupyLinear(parts=(matrix_of(each),))
            results.append(make_backend("forward", dtype).linear(x, weight).tobytes())
        assert results[0] == results[1]


@pytest.mark.parametrize(
    ("form", "num_rows"), [(SIX[0], 3), (SIX[1], 65), (SIX[2], 9), (SIX[4], 16), (Q4_K, 70)]
)
def test_integer_products(mode: str, dtype: str, form: Form, num_rows: int):
    rows = precise(form, 70, 560 + form.group + 9)
    x = integers.hostile(dtype, num_rows, rows.shape[1])
    got = integers.backend_of(mode, dtype).linear(x, integers.matrix_of(rows))
    integers.assert_same_bits(got, integers.defined(x, rows))


@pytest.mark.parametrize("form", [SIX[0], SIX[1], Q4_K], ids=str)
@pytest.mark.parametrize("is_few", [True, False])
def test_experts(mode: str, dtype: str, form: Form, is_few: bool):
    """Each expert has its own codes, scales and units."""
    matrices = [precise(form, 40, 512) for _ in range(3)]
    for i, rows in enumerate(matrices):
        rows.codes[...] = np.roll(rows.codes, i + 1, axis=0)
    scaled = [
        QuantisedRows.of_kept(
            form, {k: v * 2**i if v.dtype == np.float32 else v for k, v in rows.kept().items()}
        )
        for i, rows in enumerate(matrices)
    ]
    backend = make_backend(mode, dtype, is_deterministic=True)
    loaded = backend.experts.load(
        router=None,
        gate_up=[CupyLinear(parts=(matrix_of(rows),)) for rows in scaled],
        down=[CupyLinear(parts=(matrix_of(rows),)) for rows in scaled],
        number=3,
        num_chosen=1,
        is_normalised=True,
        activation="silu",
    )
    num_tokens = 6 if is_few else 60
    routed = np.stack([np.arange(num_tokens) % 3, np.ones(num_tokens)], axis=1)
    routed = routed.astype(np.float32).reshape(num_tokens, 2, 1)
    x = (normal(dtype, num_tokens, 512) / 1024).astype(DTYPES[dtype])
    at = backend.experts.sorted_rows(x, routed, 3, 8 if is_few or dtype == "float32" else 32)
    got = backend.experts.multiply("linear", at, at.rows, loaded.gate_up, "test", 40)
    for token in range(num_tokens):
        wanted = wide(x[token]) @ wide(dequantise(scaled[token % 3])).T
        check(got[at.places[token]], wanted, dtype)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("Q4_K", 4.75), ("Q5_K", 6.75), ("Q6_K", 6.625), ("Q4_0", 4.5), ("Q4_1", 5), ("Q8_0", 8.5),
     ("Q5_0", 6.5), ("Q5_1", 7), ("Q2_K", 5.25), ("Q3_K", 4.625), ("IQ4_XS", 8.375)],
)  # fmt: skip
def test_types_of_gguf_take_few_bits(kind: str, bits: float):
    assert 8 * packed_bytes((1024, 2048), GGUF_FORMS[kind]) == bits * 1024 * 2048
