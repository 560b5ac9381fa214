"""Check that quantised matrices give the products of their dequantised weights."""

from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
from quantised_rows import FORMS, columns, in_blocks, quantised

from mie.config.engine import EngineConfig
from mie.load.backends import load_backend
from mie.ops.backend import Backend
from mie.ops.weights.quantised import Form, QuantisedRows, dequantise, linear_quantised

MACHINES: dict[str, Callable[[], Backend]] = {
    "numpy": lambda: load_backend("numpy"),
    "numpy-invariant": lambda: load_backend("numpy", config=EngineConfig(batch_invariant=True)),
    "numpy-float64": lambda: load_backend("numpy", "float64"),
}


@pytest.fixture(params=MACHINES)
def backend(request: pytest.FixtureRequest) -> Backend:
    return MACHINES[request.param]()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_weights_are_the_dequantised_ones_bit_for_bit(backend: Backend, form: Form):
    """The identity's product is the matrix, whose last group is short unless there are units."""
    rows = quantised(form, 70, columns(form, 2 * form.group + 9))
    num_rows, num_columns = rows.shape
    wanted = dequantise(rows)
    for size in (1, 33, 100):
        matrix = backend.load_linear(rows.shape, in_blocks(rows, size), None, [(num_rows, form)])
        dtype = np.float64 if "float64" in str(backend.numerics()["dtype"]) else np.float32
        got = backend.linear(np.eye(num_columns, dtype=dtype), matrix)
        assert got.dtype == dtype
        assert (wanted == got.T).all()
    table = backend.load_embedding(rows.shape, in_blocks(rows, 33), form)
    token_ids = np.array([69, 0, 33, 0])
    assert (backend.embed(token_ids, table) == wanted[token_ids]).all()
    assert backend.embed(token_ids[:0], table).shape == (0, num_columns)
    head = backend.tie_linear(table)
    assert (wanted == backend.linear(np.eye(num_columns, dtype=dtype), head).T).all()
    assert wanted.nbytes > backend.weight_bytes(rows.shape, form) >= rows.nbytes


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_blocks_are_joined_and_put_in_order(form: Form):
    rows = quantised(form, 10, columns(form, 2 * form.group + 9))
    order = np.random.default_rng(1).permutation(10)
    blocks = [rows.take(slice(0, 4)), rows.take(slice(4, 10))]
    got = QuantisedRows.joined(blocks).take(order)
    kept = QuantisedRows.of_kept(form, got.kept())
    for each in (got, kept):
        assert (dequantise(each) == dequantise(rows)[order]).all()


def test_parts_of_a_fused_matrix_have_their_own_forms(backend: Backend):
    """The borders of parts lie inside tiles."""
    int4, int8 = FORMS[3], FORMS[8]
    q, v = quantised(int4, 70, 65, seed=1), quantised(int8, 30, 65, seed=2)
    k = np.random.default_rng(3).normal(size=(30, 65)).astype(np.float32)
    x, bias, residual = (
        np.random.default_rng(4).normal(size=shape).astype(backend.numerics()["dtype"])
        for shape in ((5, 65), 130, (5, 130))
    )
    blocks = chain(in_blocks(q, 40), [k], in_blocks(v, 40))
    matrix = backend.load_linear((130, 65), blocks, bias, [(70, int4), (30, None), (30, int8)])
    weights = np.concatenate([dequantise(q), k, dequantise(v)]).astype(np.float64)
    wanted = x @ weights.T + bias + residual
    got = backend.linear(x, matrix, residual.copy())
    np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-5)
    np.testing.assert_allclose(
        linear_quantised(x, q, bias[:70], residual[:, :70]), wanted[:, :70], rtol=0, atol=2e-5
    )


@pytest.mark.parametrize("num_columns", [200, 2100])
def test_a_row_has_the_same_bits_beside_any_others(num_columns: int):
    rows = quantised(FORMS[0], 130, num_columns)
    x = np.random.default_rng(1).normal(size=(19, num_columns)).astype(np.float32)
    machine = MACHINES["numpy-invariant"]()
    matrix = machine.load_linear(rows.shape, [rows], None, [(130, rows.form)])
    wanted = machine.linear(x, matrix)
    np.testing.assert_allclose(wanted, x @ dequantise(rows).T, rtol=0, atol=1e-4)
    for first in range(len(x)):
        for last in range(first + 1, len(x) + 1):
            assert (machine.linear(x[first:last], matrix) == wanted[first:last]).all()
