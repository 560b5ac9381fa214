"""Compare routing and the products of experts with the NumPy operators.

test_kernels.py says which modes there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_few_rows import diagonal, garbage, integers
from test_kernels import DEVICE_MODES, check, dtype, launcher_of, make_backend, mode, normal, wide
from test_quantised_products import FORMS, matrix_of, rows_of, weights

from mie.errors import UnsupportedModelError
from mie.ops import activation
from mie.ops.activation import Activation
from mie.ops.layers import experts
from mie.ops.weights.quantised import Form
from mie.ops_gpu.arrays import DTYPES
from mie.ops_gpu.experts import most_tiles
from mie.ops_gpu.weights import CupyLinear

__all__ = ["dtype", "mode"]
pytestmark = needs_compiler

ACTIVATE = {
    "silu": activation.silu_mul,
    "gelu_tanh": activation.gelu_mul,
    "clamped_silu": activation.clamped_silu_mul,
}


def route(
    mode: Any,
    logits: np.ndarray,
    num_chosen: int,
    is_normalised: bool,
    bias: np.ndarray | None = None,
) -> np.ndarray:
    num_tokens, num_experts = logits.shape
    routed = garbage(mode, "float32", num_tokens, 2, num_chosen)
    element = {"float32": "float", "float16": "f16", "bfloat16": "bf16"}[logits.dtype.name]
    parameters = element if bias is None else f"{element}, true"
    kernel = launcher_of(mode).kernel("route.cu", f"route_tokens<{parameters}>")
    numbers = (num_tokens, num_experts, num_chosen, int(is_normalised))
    kernel((-(-num_tokens // 4),), (128,), (logits, bias, routed, *map(np.int32, numbers)))
    return routed


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "is_normalised"),
    [(1, 1, False), (3, 2, True), (40, 8, False), (130, 10, True)],
)
def test_tokens_are_routed(
    mode: str, dtype: str, num_experts: int, num_chosen: int, is_normalised: bool
):
    """Small integers give many ties. Both zeros are equal, and infinities have an order."""
    logits = integers(dtype, 9, num_experts)
    logits[1] = np.where(np.arange(num_experts) % 2, 0.0, -0.0)
    logits[2] = 20 * normal(dtype, num_experts)
    if num_experts > 1:
        logits[3, num_experts // 2] = -np.inf
    got = route(mode, logits, num_chosen, is_normalised)
    wanted = experts.route(wide(logits), num_chosen, is_normalised)
    assert got[:, 0].tolist() == wanted[:, 0].tolist()
    np.testing.assert_allclose(got[:, 1], wanted[:, 1], rtol=2e-6)


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(3, 2), (40, 8)])
def test_tokens_are_routed_by_sigmoids(mode: str, dtype: str, num_experts: int, num_chosen: int):
    """Experts without a bias tie in some rows. Sigmoids may all be tiny, or 0."""
    logits = 3 * normal(dtype, 9, num_experts)
    logits[0], logits[1], logits[2] = -15, -1e4, 2.5
    bias = np.where(np.arange(num_experts) % 3, 0.0, normal("float32", num_experts)).astype(
        logits.dtype
    )
    got = route(mode, logits, num_chosen, True, bias)
    wanted = experts.route_by_sigmoid(wide(logits), wide(bias), num_chosen)
    assert got[:, 0].tolist() == wanted[:, 0].tolist()
    np.testing.assert_allclose(got[:, 1], wanted[:, 1], rtol=2e-6)


def test_nan_comes_last(mode: str):
    logits = np.array([[np.nan, 1, np.nan, 2, -np.inf]], np.float32)
    for num_chosen in range(1, 6):
        got = route(mode, logits, num_chosen, True)
        assert got[0, 0].tolist() == [3, 1, 4, 0, 2][:num_chosen]


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "num_chosen"),
    [(1, 5, 2), (33, 1, 1), (70, 3, 2), (130, 40, 3), (300, 300, 1)],
)
@pytest.mark.parametrize("tile_rows", [8, 32])
def test_rows_are_sorted(
    mode: str, num_tokens: int, num_experts: int, num_chosen: int, tile_rows: int
):
    """Half of the experts are chosen rarely. Tiles past the last one are empty."""
    rng = np.random.default_rng([num_tokens, num_experts])
    odds = rng.uniform(0, 1, num_experts) ** 4 + 1e-9
    chosen = np.stack(
        [rng.choice(num_experts, num_chosen, False, odds / odds.sum()) for _ in range(num_tokens)]
    )
    routed = np.stack([chosen, np.ones_like(chosen)], axis=1).astype(np.float32)
    num_rows = chosen.size
    most = most_tiles(num_rows, num_experts, tile_rows)
    tokens, places, tiles = (np.full(n, -1, np.int32) for n in (num_rows, num_rows, 3 * most))
    numbers = map(np.int32, (num_tokens, num_chosen, tile_rows, most))
    args = (routed, tokens, places, tiles, *numbers)
    sort = launcher_of(mode).kernel("route.cu", "sort_rows")
    sort((num_experts,), (64,), args, shared_bytes=4 * num_experts)
    order, wanted = [], []
    for expert, pairs in experts.by_expert(chosen):
        for first in range(0, len(pairs), tile_rows):
            count = min(tile_rows, len(pairs) - first)
            wanted.append([expert, len(order) + first, count])
        order += pairs.tolist()
    assert tokens.tolist() == [pair // num_chosen for pair in order]
    assert places[order].tolist() == list(range(num_rows))
    got = tiles.reshape(-1, 3)
    assert got[: len(wanted)].tolist() == wanted
    assert not got[len(wanted) :, 2].any()
    assert len(wanted) <= most


def test_most_tiles():
    """One expert takes all other rows, and the others one each."""
    for number in (1, 2, 7):
        for num_rows in (1, 6, 8, 9, 100):
            others = min(number, num_rows) - 1
            needed = others + -(-(num_rows - others) // 8)
            assert needed <= most_tiles(num_rows, number, 8) <= min(needed + number, num_rows)


class Layer:
    """A layer of experts, and their weights in float64.

    The products with the router are our own kernels, too.
    """

    def __init__(
        self,
        mode: Any,
        dtype: str,
        number: int,
        sizes: tuple[int, int],
        form: Form | None = None,
        kind: Activation = "silu",
        has_bias: bool = False,
        num_chosen: int = 3,
    ) -> None:
        self.dtype, self.sizes, self.kind = dtype, sizes, kind
        self.backend = make_backend(mode, dtype, is_deterministic=True)
        depth, dim = sizes
        shapes = [(2 * dim, depth), (depth, dim)]
        self.matrices: list[list[np.ndarray]] = []
        self.biases: list[np.ndarray] = []
        loaded = []
        for at, shape in enumerate(shapes):
            parts: list[Any] = []
            own = []
            for expert in range(number):
                seed = 2 * expert + at
                if form is None:
                    own.append(
                        (normal(dtype, *shape, seed=seed) / depth**0.5).astype(DTYPES[dtype])
                    )
                    parts.append(own[-1])
                else:
                    rows = rows_of(form, *shape, seed=seed)
                    own.append(weights(rows))
                    parts.append(matrix_of(rows))
            bias = normal(dtype, number, shape[0], seed=30 + at)
            self.matrices.append([wide(each) for each in own])
            self.biases.append(wide(bias) * has_bias)
            loaded.append(
                [
                    CupyLinear(parts=(part,), bias=bias[e] if has_bias else None)
                    for e, part in enumerate(parts)
                ]
            )
        router = normal(dtype, number, depth, seed=99)
        self.weights = self.backend.experts.load(
            router=CupyLinear(parts=(router,)),
            gate_up=loaded[0],
            down=loaded[1],
            number=number,
            num_chosen=num_chosen,
            is_normalised=True,
            activation=kind,
        )

    def compute(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        self.routed = self.backend.experts.route(x, self.weights).copy()
        parts = x, self.routed, self.weights, residual.copy()
        y: np.ndarray = self.backend.experts.compute(*parts)
        return y

    def wanted(self, x: np.ndarray, residual: np.ndarray) -> np.ndarray:
        """Return the operator's result for the backend's own routing."""

        def compute(expert: int, rows: np.ndarray) -> np.ndarray:
            h = ACTIVATE[self.kind](rows @ self.matrices[0][expert].T + self.biases[0][expert])
            h = wide(h.astype(DTYPES[self.dtype]))
            return h @ self.matrices[1][expert].T + self.biases[1][expert]

        return experts.experts(wide(x), wide(self.routed), compute, wide(residual))

    def check(self, num_tokens: int, scale: float = 1.0) -> None:
        x = (scale * normal(self.dtype, num_tokens, self.sizes[0])).astype(DTYPES[self.dtype])
        residual = normal(self.dtype, num_tokens, self.sizes[0], seed=1)
        got = self.compute(x, residual)
        check(got, self.wanted(x, residual), self.dtype)


CASES = [
    # experts, (D, F), activation, biases
    (4, (40, 24), "silu", False),
    (7, (33, 17), "clamped_silu", True),
    (3, (520, 72), "gelu_tanh", True),
]


@pytest.mark.parametrize(
    ("number", "sizes", "kind", "has_bias", "num_tokens"), diagonal(CASES, [1, 5, 70])
)
def test_experts(
    mode: str,
    dtype: str,
    number: int,
    sizes: tuple[int, int],
    kind: Activation,
    has_bias: bool,
    num_tokens: int,
):
    Layer(mode, dtype, number, sizes, None, kind, has_bias).check(num_tokens)


@pytest.mark.parametrize(
    ("form", "sizes", "num_tokens"),
    [
        (FORMS[0], (200, 48), 3),
        (FORMS[1], (64, 24), 40),
        (FORMS[2], (136, 16), 1),
        (FORMS[3], (90, 33), 20),
        (FORMS[7], (192, 32), 60),  # MXFP4 is int8 in groups of 32, whose codes are exact
    ],
)
def test_quantised_experts(
    mode: str, dtype: str, form: Form, sizes: tuple[int, int], num_tokens: int
):
    Layer(mode, dtype, 4, sizes, form, "clamped_silu", True).check(num_tokens, 0.1)


@pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES])
@pytest.mark.parametrize("form", [None, FORMS[1]])
def test_a_rows_bits_do_not_depend_on_the_other_rows(mode: str, dtype: str, form: Form | None):
    """Blocks take 8 rows of an expert, or 32, by the number of tokens."""
    layer = Layer(mode, dtype, 3, (64, 32), form)
    x, residual = normal(dtype, 70, 64), normal(dtype, 70, 64, seed=1)
    alone = [layer.compute(x[t : t + 1], residual[t : t + 1]).tobytes() for t in range(0, 70, 9)]
    for end in (10, 70):
        together = layer.compute(x[:end], residual[:end])
        some = [row.tobytes() for row in together[::9]]
        assert some == alone[: len(some)]


@pytest.mark.parametrize(
    ("num_tokens", "rows"), [pytest.param(2, 8, marks=pytest.mark.slow), (40, 32)]
)
def test_experts_with_many_tokens_read_their_weights_once_for_32(num_tokens: int, rows: int):
    """Three experts get 3 * num_tokens rows. Each launched tile reads an expert's weights once."""
    layer = Layer("forward", "float16", 3, (64, 32))
    layer.compute(normal("float16", num_tokens, 64), normal("float16", num_tokens, 64))
    launches = layer.backend.launcher.launches  # type: ignore[attr-defined]
    tiles = [grid[0] for name, grid in launches if name.startswith("experts_")]
    assert tiles == [most_tiles(3 * num_tokens, 3, rows)] * 2


def test_experts_of_several_forms_are_refused():
    backend = make_backend("forward", "float16")
    some = [CupyLinear(parts=(matrix_of(rows_of(form, 32, 64)),)) for form in FORMS[:2]]
    with pytest.raises(UnsupportedModelError, match="several forms"):
        backend.experts.load(gate_up=some, down=some)
    [part] = some[0].parts
    with pytest.raises(UnsupportedModelError, match="several forms"):
        backend.experts.load(gate_up=[CupyLinear(parts=(part, part)), *some[:1]], down=some[:1])


@pytest.mark.parametrize("gate_dim", [1, 40])
def test_sigmoid_mul(mode: str, dtype: str, gate_dim: int):
    x, gate = normal(dtype, 5, 40), 9 * normal(dtype, 5, gate_dim, seed=1)
    gate[0, 0] = -200  # exp overflows
    got = make_backend(mode, dtype).sigmoid_mul(x, gate.astype(x.dtype))
    check(got, wide(x) * activation.sigmoid(wide(gate.astype(x.dtype))), dtype)
