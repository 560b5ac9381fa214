"""Compare the products of few rows with NumPy in float64, and their bits for every number of rows.

test_kernels.py says which modes there are.
"""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import DEVICE_MODES, check, dtype, launcher_of, mode, normal, wide

from mie.ops import activation, norm, rope
from mie.ops_gpu.arrays import DTYPES
from mie.ops_gpu.chip import EMULATED_CHIP
from mie.ops_gpu.few_rows import FewRows, Heads, Norm, shape_named

__all__ = ["dtype", "mode"]
pytestmark = needs_compiler

EPS = 1e-5
SIZES = [(1, 1), (33, 40), (96, 24), (520, 17), (1100, 33), (1100, 200)]
"""(K, N): one element, K and N that are no multiples of a load or a tile, several slices of K, and
more sets of tiles than blocks, whose rows are kept if there are few."""


def diagonal(cases: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Return all cases with all numbers of rows, of which `make test` takes one for each case."""
    return [
        pytest.param(
            *(each if isinstance(each, tuple) else (each,)),
            count,
            marks=[pytest.mark.slow] if i % len(counts) != j else [],
        )
        for i, each in enumerate(cases)
        for j, count in enumerate(counts)
    ]


def garbage(mode: Any, dtype: str, *shape: int) -> np.ndarray:
    """Return an array that the kernels have yet to write."""
    array = np.empty(shape, DTYPES[dtype])
    launcher_of(mode).mark_uninitialised(array)
    return array


def integers(dtype: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Return numbers whose products sum without rounding in any order."""
    return np.random.default_rng([seed, *shape]).integers(-3, 4, shape).astype(DTYPES[dtype])


def norm_of(dtype: str, depth: int) -> Norm:
    return Norm(weight=normal(dtype, depth, seed=5), eps=EPS)


def normed(x: np.ndarray, by: Norm) -> np.ndarray:
    """Return the normalised rows in float64, rounded to the rows' dtype as the kernels round."""
    return wide(norm.rms_norm(wide(x), wide(by.weight), by.eps).astype(x.dtype))


@pytest.mark.parametrize(("depth", "width", "num_rows"), diagonal(SIZES, [35, 9, 1]))
def test_sums_of_integers_are_exact(mode: str, dtype: str, depth: int, width: int, num_rows: int):
    x, weight = integers(dtype, num_rows, depth), integers(dtype, width, depth, seed=1)
    bias = integers(dtype, width, seed=2)
    out = garbage(mode, dtype, num_rows, width)
    products = FewRows(launcher_of(mode), EMULATED_CHIP)
    products.linear(x, weight, out, bias=bias)
    wanted = wide(x) @ wide(weight).T + wide(bias)
    assert out.tobytes() == wanted.astype(DTYPES[dtype]).tobytes()
    residual = integers(dtype, num_rows, width, seed=3)
    out = residual.copy()
    products.linear(x, weight, out, is_added=True)
    wanted += wide(residual) - wide(bias)
    assert out.tobytes() == wanted.astype(DTYPES[dtype]).tobytes()


@pytest.mark.parametrize(("depth", "width", "num_rows"), diagonal(SIZES, [3, 16]))
def test_normalised_rows_are_multiplied(
    mode: str, dtype: str, depth: int, width: int, num_rows: int
):
    x, weight, bias = (
        30 * normal(dtype, num_rows, depth),
        normal(dtype, width, depth, seed=1),
        normal(dtype, width, seed=2),
    )
    x, by = x.astype(DTYPES[dtype]), norm_of(dtype, depth)
    out = garbage(mode, dtype, num_rows, width)
    FewRows(launcher_of(mode), EMULATED_CHIP).linear(x, weight, out, bias=bias, norm=by)
    check(out, normed(x, by) @ wide(weight).T + wide(bias), dtype)


@pytest.mark.parametrize(("depth", "dim", "num_rows"), diagonal(SIZES, [2, 13]))
def test_gates(mode: str, dtype: str, depth: int, dim: int, num_rows: int):
    x, weight = normal(dtype, num_rows, depth), normal(dtype, 2 * dim, depth, seed=1)
    bias, by = normal(dtype, 2 * dim, seed=2), norm_of(dtype, depth)
    if dim > 1:
        bias[0] = -200  # exp overflows
    out = garbage(mode, dtype, num_rows, dim)
    FewRows(launcher_of(mode), EMULATED_CHIP).gated(x, weight, out, bias=bias, norm=by)
    gate_up = normed(x, by) @ wide(weight).T + wide(bias)
    check(out, activation.silu_mul(gate_up), dtype)


class Attention:
    """Query, key and value heads of some tokens, one of which is padding."""

    def __init__(self, dtype: str, head_dim: int, num_rows: int, depth: int = 40) -> None:
        self.num_heads, self.num_kv_heads, self.size, self.head_dim = 3, 2, 4, head_dim
        rng = np.random.default_rng(head_dim)
        self.x = normal(dtype, num_rows, depth)
        self.weight = normal(dtype, 7 * head_dim, depth, seed=1)
        self.bias = normal(dtype, 7 * head_dim, seed=2)
        self.positions = rng.integers(0, 50, num_rows).astype(np.int32)
        self.slots = rng.permutation(40)[:num_rows].astype(np.int32)
        self.slots[num_rows // 2] = -1
        inv_freq = 10000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
        self.table = rope.rope_table(inv_freq, 1.0, 50, np.float32)
        self.norm = norm_of(dtype, depth)
        self.matrix: Any = None  # a quantised one instead of ``weight``
        self.head_norms: list[Any] = [None, None]

    def compute(self, mode: Any, rows: slice = slice(None)) -> tuple[np.ndarray, np.ndarray]:
        """Return queries and cache."""
        x, dtype = self.x[rows], self.x.dtype.name
        q = garbage(mode, dtype, len(x), self.num_heads, self.head_dim)
        kv = np.zeros((10, 2, self.num_kv_heads, self.size, self.head_dim), x.dtype)
        batch: Any = SimpleNamespace(positions=self.positions[rows], slot_mapping=self.slots[rows])
        q_norm, k_norm = self.head_norms
        to = Heads(q=q, kv=kv, rope_table=self.table, batch=batch, q_norm=q_norm, k_norm=k_norm)
        weight = self.weight if self.matrix is None else self.matrix
        FewRows(launcher_of(mode), EMULATED_CHIP).heads(
            x, weight, to, bias=self.bias, norm=self.norm
        )
        return q, kv

    def wanted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return both in float64."""
        qkv = normed(self.x, self.norm) @ wide(self.weight).T + wide(self.bias)
        qkv = qkv.reshape(len(self.x), -1, self.head_dim)
        for heads, by in zip((slice(3), slice(3, 5)), self.head_norms, strict=True):
            if by is not None:
                qkv[:, heads] = norm.rms_norm(qkv[:, heads], wide(by), EPS)
        rotated = rope.rope(qkv[:, :5], wide(self.table[self.positions]))
        kv = np.zeros((10, 2, self.num_kv_heads, self.size, self.head_dim))
        for token, slot in enumerate(self.slots.tolist()):
            if slot >= 0:
                kv[slot // self.size, 0, :, slot % self.size] = rotated[token, 3:]
                kv[slot // self.size, 1, :, slot % self.size] = qkv[token, 5:]
        return rotated[:, :3], kv


@pytest.mark.parametrize(("head_dim", "num_rows"), diagonal([8, 24, 64], [4, 21]))
def test_heads_are_rotated_and_written(mode: str, dtype: str, head_dim: int, num_rows: int):
    attention = Attention(dtype, head_dim, num_rows)
    for got, wanted in zip(attention.compute(mode), attention.wanted(), strict=True):
        check(got, wanted, dtype)


def test_an_infinite_value_spoils_no_other(dtype: str):
    """Values are not rotated: zero times infinity would be NaN."""
    attention = Attention(dtype, 8, 1)
    attention.slots[0] = 5
    attention.bias[-8:] = 0
    attention.bias[-1] = np.inf
    _, kv = attention.compute("forward")
    assert kv[1, 1, 1, 1, -1] == np.inf
    assert np.isfinite(wide(kv[1, 1, 1, 1, :-1])).all()


@pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES])
@pytest.mark.parametrize("depth", [33, 520])
def test_a_rows_bits_do_not_depend_on_the_other_rows(mode: str, dtype: str, depth: int):
    """The other rows are large, infinite or NaN, and the row is at each place."""
    products, by = FewRows(launcher_of(mode), EMULATED_CHIP), norm_of(dtype, depth)
    x, weight = normal(dtype, 40, depth), normal(dtype, 34, depth, seed=1)
    x[1] *= 100
    x[2] = np.inf
    x[3, 0] = np.nan

    def linear(rows: np.ndarray, by: Norm | None) -> np.ndarray:
        out = np.ones((len(rows), 34), rows.dtype)
        products.linear(rows, weight, out, norm=by, is_added=True)
        return out

    def gated(rows: np.ndarray) -> np.ndarray:
        out = garbage(mode, dtype, len(rows), 17)
        products.gated(rows, weight, out, norm=by)
        return out

    computations = [lambda rows: linear(rows, None), lambda rows: linear(rows, by), gated]
    for compute in computations:
        alone = [compute(x[row : row + 1]).tobytes() for row in range(40)]
        for num_rows in [*range(1, 17), 40]:
            together = compute(x[:num_rows])
            assert [row.tobytes() for row in together] == alone[:num_rows]
        backwards = compute(np.ascontiguousarray(x[::-1]))
        assert [row.tobytes() for row in backwards[::-1]] == alone


@pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES])
def test_a_rows_heads_do_not_depend_on_the_other_rows(mode: str, dtype: str):
    attention = Attention(dtype, 24, 33)
    whole, cache = attention.compute(mode)
    written = np.zeros_like(cache)
    for row in range(33):
        q, kv = attention.compute(mode, slice(row, row + 1))
        assert q.tobytes() == whole[row : row + 1].tobytes()
        written += kv
    assert wide(written).tobytes() == wide(cache).tobytes()


SHAPES = (
    "<f16, f16, 64, false, 32, 1, false, true>",
    "<bf16, bf16, 64, false, 32, 2, false, true>",
    "<f16, f16, 64, false, 32, 4, false, true>",
    "<float, float, 64, false, 32, 1, false, true>",
    "<f16, nibbles, 32, false, 32, 1, false, true>",
    "<f16, nibbles, 32, true, 8, 2, false, true>",
    "<bf16, sextets, 16, false, 8, 4, false, true>",
    "<f16, int8, 16, true, 32, 1, false, true>",
    "<float, int8, 64, false, 16, 1, false, true>",
)


@pytest.mark.slow
def test_python_and_the_kernels_agree_on_shapes(tmp_path: Path):
    """Both compute the stages of a ring and their bytes."""
    lines = [
        f"{{ using S = ProductShape{shape}; int* to = out + {4 * i}; to[0] = S::STAGES; "
        "to[1] = S::WEIGHT_BYTES; to[2] = S::X_BYTES; to[3] = S::INPUTS; }"
        for i, shape in enumerate(SHAPES)
    ]
    includes = ["mie_cuda", "quantized", "weights", "arrivals", "few_rows"]
    head = "".join(f'#include "{name}.cuh"\n' for name in includes)
    path = tmp_path / "shapes.cu"
    path.write_text(f"{head}__global__ void shapes(int* out) {{ {' '.join(lines)} }}")
    out = np.zeros((len(SHAPES), 4), np.int32)
    launcher_of("forward").kernel(str(path), "shapes")((1,), (1,), (out,))
    for parameters, numbers in zip(SHAPES, out.tolist(), strict=True):
        shape = shape_named(parameters)
        x_bytes = shape.rows * shape.row_bytes
        assert numbers == [shape.stages, shape.weight_bytes, x_bytes, shape.inputs], parameters


def test_large_numbers_keep_their_range(dtype: str):
    """Squares of the rows and sums of the products exceed float16, whose results do not."""
    x, weight = np.full((2, 64), 6e4), np.ones((16, 64))
    x[1] = -6e4
    weight[:, 32:] = -1
    weight[0, 63] = 0
    x, weight = x.astype(DTYPES[dtype]), weight.astype(DTYPES[dtype])
    products, ones = FewRows(launcher_of("forward"), EMULATED_CHIP), np.ones(64, DTYPES[dtype])
    out = garbage("forward", dtype, 2, 16)
    products.linear(x, weight, out)
    assert wide(out).tolist() == (wide(x) @ wide(weight).T).astype(x.dtype).tolist()
    products.linear(x, weight, out, norm=Norm(weight=ones, eps=EPS))
    np.testing.assert_allclose(wide(out), [[1] + [0] * 15, [-1] + [0] * 15], atol=1e-5)
