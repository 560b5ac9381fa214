"""Compare products with adapters of the CUDA kernels with their definition in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import DEVICE_MODES, ERRORS, cache_shape, make_backend, normal, wide

from mie.ops.activation import silu_mul
from mie.ops.adapters.low_rank import LowRank, SlotShape, low_rank
from mie.ops.backend import HeadWeights, StepBatch
from mie.ops.norm import rms_norm
from mie.ops.rope import rope
from mie.ops_gpu.cupy_backend import CupyBackend
from mie.ops_gpu.weights import CupyLinear

pytestmark = needs_compiler

NUM_INPUTS, EPS, MAX_RANK, HEAD = 40, 1e-6, 11, 16
RANKS = {1: (11, 1), 2: (0, 5), 3: (4, 0)}
"""Ranks of the adapters in both parts of the matrix, some above the eight warps of a block."""


def backend_of(mode: str, dtype: str, is_deterministic: bool = False) -> CupyBackend:
    """Return a backend that runs steps: the host uploads integers.

    A graph of a step would replay the operators of an earlier step.
    """
    uploaded = (np.uint8, np.int32)
    return make_backend(mode, dtype, is_deterministic, uploaded=uploaded, enforce_eager=True)


class Matrix:
    """A matrix of two parts of ``width`` outputs with three adapters."""

    def __init__(self, backend: CupyBackend, width: int) -> None:
        self.backend, self.width = backend, width
        dtype = backend.dtype.name
        self.weight = normal(dtype, 2 * width, NUM_INPUTS, seed=1)
        self.norm = normal(dtype, NUM_INPUTS, seed=2)
        self.plain = CupyLinear(parts=(self.weight,))
        counts = (width, width)
        shape = SlotShape(num_inputs=NUM_INPUTS, counts=counts, num_slots=3, max_rank=MAX_RANK)
        self.linear = backend.adapters.with_slots(self.plain, shape)
        rng = np.random.default_rng(3)
        self.changes: dict[int, list[LowRank | None]] = {0: [None, None]}
        for slot, ranks in RANKS.items():
            self.changes[slot] = [
                LowRank(
                    a=rng.normal(0, 1, (rank, NUM_INPUTS)).astype(np.float32),
                    b=rng.normal(0, 1, (width, rank)).astype(np.float32),
                    scale=0.5 + slot,
                )
                if rank
                else None
                for rank in ranks
            ]
            backend.adapters.put(self.linear, slot, self.changes[slot])

    def wanted(self, x: np.ndarray, slots: list[int]) -> np.ndarray:
        """Return the product in float64."""
        out = x @ wide(self.weight).T
        for row, slot in enumerate(slots):
            for part, change in enumerate(self.changes[slot]):
                if change is not None:
                    columns = slice(part * self.width, (part + 1) * self.width)
                    out[row, columns] += low_rank(x[row : row + 1], change)[0]
        return out


Compute = Callable[[StepBatch], Any]


def in_step(backend: CupyBackend, compute: Compute, slots: list[int]) -> np.ndarray:
    """Return the result of operators within a step of one prompt with these slots of tokens."""
    each = np.arange(len(slots))
    batch = StepBatch(
        token_ids=each,
        positions=each,
        slot_mapping=each,
        cu_seqlens_q=np.array([0, len(slots)]),
        seq_lens=np.array([len(slots)]),
        block_tables=np.zeros((1, 1), np.int64),
        logits_rows=each,
        num_decodes=0,
        adapters=np.array(slots),
    )
    return np.array(backend.run_step(compute, batch))


def slots_of(count: int) -> list[int]:
    """Return slots in runs of several lengths, some across the ends of blocks."""
    return ([0, 1, 1, 2, 3, 3, 3, 3, 3, 1, 0, 2] * 4)[:count]


def products(matrix: Matrix, linear: CupyLinear, x: np.ndarray) -> dict[str, Compute]:
    """Return the products of a backend by name."""
    backend, norm = matrix.backend, matrix.norm
    residual = normal(backend.dtype.name, len(x), 2 * matrix.width, seed=9)
    table, room = backend.load_rope(np.ones(HEAD // 2), 1.0, 300), cache_shape(1, 300, 1, HEAD)
    weights = HeadWeights(
        norm=norm,
        qkv=linear,
        q_norm=None,
        k_norm=None,
        num_heads=2 * matrix.width // HEAD - 2,
        num_kv_heads=1,
        head_dim=HEAD,
        eps=EPS,
    )

    def heads(batch: StepBatch) -> np.ndarray:
        cache = backend.new_kv_cache(room)
        q = backend.norm_heads(x, weights, table, cache, 0, batch)
        written = cache.layers[0][0, :, 0, : len(x)]  # keys and values
        return np.concatenate([q.reshape(len(x), -1), *written], axis=1)

    return {
        "linear": lambda _: backend.linear(x, linear),
        "residual": lambda _: backend.linear(x, linear, residual.copy()),
        "norm": lambda _: backend.norm_linear(x, norm, EPS, linear),
        "gated": lambda _: backend.norm_gate_up(x, norm, EPS, linear),
        "heads": heads,
    }


def check_products(
    mode: str, dtype: str, count: int, is_deterministic: bool, width: int = 24
) -> None:
    backend = backend_of(mode, dtype, is_deterministic)
    matrix, x = Matrix(backend, width), normal(dtype, count, NUM_INPUTS, seed=4)
    slots = slots_of(count)
    normed = rms_norm(wide(x), wide(matrix.norm), EPS)
    residual = wide(normal(dtype, count, 2 * width, seed=9))
    wanted = {
        "linear": matrix.wanted(wide(x), slots),
        "residual": matrix.wanted(wide(x), slots) + residual,
        "norm": matrix.wanted(normed, slots),
        "gated": silu_mul(matrix.wanted(normed, slots)),
    }
    table = wide(backend.load_rope(np.ones(HEAD // 2), 1.0, 300))
    qkv = wanted["norm"].reshape(count, -1, HEAD)
    rotated = rope(qkv[:, :-1], table[:count])
    wanted["heads"] = np.concatenate([rotated, qkv[:, -1:]], axis=1).reshape(count, -1)
    plain = products(matrix, matrix.plain, x)
    for name, compute in products(matrix, matrix.linear, x).items():
        got = in_step(backend, compute, slots)
        error = np.linalg.norm(wide(got) - wanted[name], axis=-1)
        # A change is added to a product that is rounded already.
        assert (error < 3 * ERRORS[dtype] * np.linalg.norm(wanted[name], axis=-1)).all(), name
        without = in_step(backend, plain[name], slots)
        rows = [row for row, slot in enumerate(slots) if slot == 0]
        assert got[rows].tobytes() == without[rows].tobytes(), name
        others = in_step(backend, compute, [slot if slot == 3 else 2 for slot in slots])
        rows = [row for row, slot in enumerate(slots) if slot == 3]
        assert got[rows].tobytes() == others[rows].tobytes(), name


@pytest.mark.parametrize(
    ("dtype", "mode", "count", "is_deterministic"),
    [
        ("float32", "checked", 12, False),
        *(
            pytest.param(dtype, mode, count, is_deterministic, marks=pytest.mark.slow)
            for dtype in ERRORS
            for mode in ("forward", "reverse", "random", "checked", *DEVICE_MODES)
            for count, is_deterministic in ((12, False), (30, False), (30, True))
            if is_deterministic or count == 12 or mode != "checked"  # NumPy's products are unmarked
        ),
    ],
)
def test_products_with_adapters_are_those_of_the_definition(
    mode: str, dtype: str, count: int, is_deterministic: bool
):
    """12 rows are multiplied by the kernels of few rows, and 30 by cuBLAS unless deterministic."""
    check_products(mode, dtype, count, is_deterministic)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES])
@pytest.mark.parametrize("dtype", ERRORS)
def test_a_rows_bits_do_not_depend_on_the_other_rows(mode: str, dtype: str):
    """Blocks have one row or eight, and a launch has up to 256."""
    backend = backend_of(mode, dtype, is_deterministic=True)
    matrix, count = Matrix(backend, 24), 270
    x, slots = normal(dtype, count, NUM_INPUTS, seed=4), (slots_of(48) * 6)[:270]
    together = {
        name: in_step(backend, compute, slots)
        for name, compute in products(matrix, matrix.linear, x).items()
    }
    for begin, end in ((0, 1), (3, 4), (250, 262), (255, 257), (7, 40)):
        alone = products(matrix, matrix.linear, x[begin:end])
        for name in ("linear", "norm", "gated"):
            got = in_step(backend, alone[name], slots[begin:end])
            assert got.tobytes() == together[name][begin:end].tobytes(), name


def test_a_slot_keeps_nothing_of_the_adapter_before():
    backend = backend_of("forward", "float32")
    matrix, x = Matrix(backend, 24), normal("float32", 5, NUM_INPUTS, seed=4)
    fresh = in_step(backend, lambda _: backend.linear(x, matrix.linear), [2] * 5)
    backend.adapters.put(matrix.linear, 1, matrix.changes[2])
    again = in_step(backend, lambda _: backend.linear(x, matrix.linear), [1] * 5)
    assert again.tobytes() == fresh.tobytes()
