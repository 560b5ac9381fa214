"""Check that the methods of every backend equal the plain functions of `mie.ops`.

The tests are the same for all backends. A `Machine` copies arrays to a backend and back, and
`MACHINES` lists the machines. The plain functions run in float64 on the numbers that the backend
was given, so the difference is the backend's own rounding.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from compiled import HAS_NUMBA, fill_cache, needs_numba, planes_of
from emulated import HAS_COMPILER, needs_compiler
from hypothesis import given
from hypothesis import strategies as st
from step_batches import step_batch

from mie.config.engine import EngineConfig
from mie.errors import ConfigError
from mie.load.backends import load_backend
from mie.ops import activation, attention, kv_cache, linear, norm, rope, sampling
from mie.ops.backend import Backend, KVCacheShape, StepBatch
from mie.ops.layers import experts
from mie.ops.layers.operators import ExpertWeights
from mie.ops.sampling import RowControls, TokenMask


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A backend under test, and the copies of arrays to it and back."""

    backend: Backend
    dtype: str
    """The dtype that it computes in."""
    put: Callable[[np.ndarray], Any]
    """Return a host array as an array of the backend, with floats in its dtype."""
    get: Callable[[Any], np.ndarray]
    """Return a host copy of an array of the backend."""
    put_cache: Callable[[Any, np.ndarray], None]
    """Overwrite a whole KV cache with a host array [L, 2, N, B, Hkv, Dh]."""
    get_cache: Callable[[Any], np.ndarray]
    """Return a KV cache as a host array [L, 2, N, B, Hkv, Dh]."""
    memory_of: Callable[[Any], Any] = lambda embedding: embedding
    """Return the array that holds an embedding."""


def put_as(
    dtype: str, integers: str = "int64", make: Callable[[np.ndarray], Any] = np.array
) -> Callable[[np.ndarray], Any]:
    """Return a function that puts floats as ``dtype``, and others as ``integers``."""
    return lambda array: make(array.astype(dtype if array.dtype.kind == "f" else integers))


def numpy_machine(dtype: str, **settings: Any) -> Machine:
    return Machine(
        backend=load_backend("numpy", dtype, EngineConfig(**settings)),
        dtype=dtype,
        put=put_as(dtype),
        get=np.array,
        put_cache=lambda cache, planes: np.copyto(cache, planes, casting="same_kind"),
        get_cache=np.array,
    )


@functools.cache  # it loads every kernel once
def jit_machine() -> Machine:
    backend = load_backend("jit", "float32", EngineConfig(num_threads=2))
    machine = replace(numpy_machine("float32"), backend=backend)
    return replace(
        machine,
        put_cache=fill_cache,
        get_cache=planes_of,
        memory_of=lambda embedding: embedding.segments[0].memory,
    )


@functools.cache  # its launcher opens every kernel once
def gpu_machine(name: str) -> Machine:
    """Return the machine of a device, or of the emulator, whose arrays are NumPy's."""
    backend, make, get = load_backend(name, "float32"), np.array, np.array
    if name == "cupy":
        import cupy

        make, get = cupy.asarray, cupy.asnumpy
    put = put_as("float32", "int32", make)

    # On the device a layer is [N, 2, Hkv, B, Dh].
    def put_cache(cache: Any, planes: np.ndarray) -> None:
        for layer, own in zip(cache.layers, planes, strict=True):
            layer[...] = put(own.transpose(1, 0, 3, 2, 4))

    def get_cache(cache: Any) -> np.ndarray:
        return np.stack([get(layer).transpose(1, 0, 3, 2, 4) for layer in cache.layers])

    return Machine(
        backend=backend, dtype="float32", put=put, get=get, put_cache=put_cache, get_cache=get_cache
    )


MACHINES: dict[str, Callable[[], Machine]] = {
    "numpy-float32": lambda: numpy_machine("float32"),
    "numpy-float64": lambda: numpy_machine("float64"),
    "numpy-invariant-float32": lambda: numpy_machine("float32", batch_invariant=True),
    "jit-float32": jit_machine,
    "cupy-emulated-float32": lambda: gpu_machine("cupy-emulated"),
}
if os.environ.get("MIE_GPU_TESTS"):
    MACHINES["cupy-float32"] = lambda: gpu_machine("cupy")


NEEDS = {"jit-float32": needs_numba, "cupy-emulated-float32": needs_compiler}
"""Marks of the machines that need something that may be missing."""


def machine_params(values: Mapping[str, Any]) -> list[Any]:
    """Return one pytest parameter per machine."""
    return [
        pytest.param(value, id=name, marks=[NEEDS[name]] if name in NEEDS else [])
        for name, value in values.items()
    ]


# Allowed (relative, absolute) differences from float64, by operator and dtype. Inputs are standard
# normal, so results are of order 1 (sqrt(K) after a product). The kernels sum in another order than
# NumPy, round the attention's scale times log2(e), and use exp2 for exp. The float32 bounds leave
# room for these roundings. tests/kernels/test_kernels.py has float16 and bfloat16.
TOLERANCES: dict[tuple[str, str], tuple[float, float]] = {
    # Rows are copied, nothing is computed.
    ("exact", "float32"): (0, 0),
    ("exact", "float64"): (0, 0),
    # A sum of up to 64 products and two additions. Terms cancel, so the bound is absolute: 66
    # roundings of at most 6e-8, of terms that sum to about 50, rarely reach a tenth of that.
    ("linear", "float32"): (0, 2e-5),
    ("linear", "float64"): (0, 5e-14),
    # A mean of squares (no cancellation), a root, a quotient, two products.
    ("rms_norm", "float32"): (2e-6, 0),
    ("rms_norm", "float64"): (5e-15, 0),
    # Two products that may cancel; cos and sin are rounded to the dtype once.
    ("rope", "float32"): (0, 1e-6),
    ("rope", "float64"): (0, 2e-15),
    # exp is accurate to a few units in the last place. A sum, a quotient and a product follow.
    ("silu_mul", "float32"): (1e-6, 0),
    ("silu_mul", "float64"): (4e-15, 0),
    # The exponent is a polynomial of the gate, and its error grows with it.
    ("gelu_mul", "float32"): (4e-5, 1e-30),
    ("gelu_mul", "float64"): (1e-13, 1e-30),
    # An absolute error of a score (about 1e-6) is a relative error of its weight.
    ("paged_attention", "float32"): (0, 5e-6),
    ("paged_attention", "float64"): (0, 1e-13),
    # Computed in float64 from logits that are exact in either dtype.
    ("top_logprobs", "float32"): (1e-14, 0),
    ("top_logprobs", "float64"): (1e-14, 0),
}

Check = Callable[[str, Any, np.ndarray], None]


@pytest.fixture(params=machine_params(MACHINES))
def machine(request: pytest.FixtureRequest) -> Machine:
    return request.param()


def check(machine: Machine, operator: str, got: Any, wanted: np.ndarray) -> None:
    got = machine.get(got)
    rtol, atol = TOLERANCES[operator, machine.dtype]
    assert got.shape == wanted.shape
    assert got.dtype == machine.dtype
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Return standard normal numbers that float32 holds exactly, as float64."""
    rng = np.random.default_rng([seed, *shape])
    return rng.normal(size=shape).astype(np.float32).astype(np.float64)


def in_blocks(matrix: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    """Yield the matrix in blocks of rows; a block is spoiled once the next one is asked for."""
    for start in range(0, len(matrix), rows):
        block = matrix[start : start + rows].copy()
        yield block
        block.fill(77.0)


# Weights.

STORED = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16)} | {
    "BF16": np.dtype(ml_dtypes.bfloat16)
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("rows_in_block", [1, 3, 100])
def test_a_checkpoint_is_widened_exactly(machine: Machine, stored: str, rows_in_block: int):
    """Multiplying the identity returns the loaded matrix, and rounds nothing."""
    backend, dtype = machine.backend, STORED[stored]
    matrix, bias = (100 * normal(7, 5)).astype(dtype), (100 * normal(7, seed=1)).astype(dtype)
    loaded = backend.load_linear((7, 5), in_blocks(matrix, rows_in_block))
    unit = machine.put(np.eye(5))
    check(machine, "exact", backend.linear(unit, loaded), matrix.astype(np.float64).T)
    biased = backend.load_linear((7, 5), in_blocks(matrix, rows_in_block), bias)
    nothing = machine.put(np.zeros((1, 5)))
    check(machine, "exact", backend.linear(nothing, biased), bias.astype(np.float64)[None])
    table = backend.load_embedding((7, 5), in_blocks(matrix, rows_in_block))
    everything = machine.put(np.arange(7))
    check(machine, "exact", backend.embed(everything, table), matrix.astype(np.float64))


@pytest.mark.parametrize("stored", STORED)
def test_the_extremes_of_a_dtype_survive(machine: Machine, stored: str):
    """These are the largest, the smallest normal and the smallest subnormal number."""
    info = ml_dtypes.finfo(STORED[stored])
    values = np.array([info.max, -info.max, info.tiny, info.smallest_subnormal, 0.0])
    matrix = values.astype(STORED[stored])[:, None]
    table = machine.backend.load_embedding((5, 1), [matrix])
    got = machine.get(machine.backend.embed(machine.put(np.arange(5)), table))
    assert got[:, 0].tolist() == [float(value) for value in matrix[:, 0]]


def test_a_fused_matrix_contains_its_parts_side_by_side(machine: Machine):
    q, k = normal(6, 4, seed=1), normal(3, 4, seed=2)
    fused = machine.backend.load_linear((9, 4), iter([q[:4], q[4:], k]))
    x = normal(5, 4)
    wanted = linear.linear(x, np.concatenate([q, k]).T)
    check(machine, "linear", machine.backend.linear(machine.put(x), fused), wanted)


def test_a_tied_head_shares_the_embeddings_memory(machine: Machine):
    matrix, x = normal(11, 6, seed=3), normal(4, 6)
    embedding = machine.backend.load_embedding((11, 6), [matrix])
    head = machine.backend.tie_linear(embedding)
    check(machine, "linear", machine.backend.linear(machine.put(x), head), x @ matrix.T)
    machine.memory_of(embedding)[...] *= 2
    check(machine, "linear", machine.backend.linear(machine.put(x), head), x @ (2 * matrix.T))


# Operators.


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33])
def test_embed_and_take_rows(machine: Machine, num_tokens: int):
    matrix = normal(10, 8)
    table = machine.backend.load_embedding((10, 8), [matrix])
    token_ids = np.random.default_rng(0).integers(0, 10, num_tokens)
    x = machine.backend.embed(machine.put(token_ids), table)
    check(machine, "exact", x, linear.embed(token_ids, matrix))
    rows = np.array([0, num_tokens - 1, 0] if num_tokens else [], np.int64)
    taken = machine.backend.take_rows(x, machine.put(rows))
    check(machine, "exact", taken, matrix[token_ids[rows]])


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 33])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_linear(machine: Machine, num_tokens: int, has_bias: bool, has_residual: bool):
    x, matrix = normal(num_tokens, 64), normal(24, 64, seed=1)
    bias = normal(24, seed=2) if has_bias else None
    residual = normal(num_tokens, 24, seed=3) if has_residual else None
    weight = machine.backend.load_linear((24, 64), [matrix], bias)
    own_residual = None if residual is None else machine.put(residual)
    own_x = machine.put(x)
    y = machine.backend.linear(own_x, weight, own_residual)
    check(machine, "linear", y, linear.linear(x, matrix.T, bias, residual))
    check(machine, "exact", own_x, x)


@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_rms_norm(machine: Machine, num_tokens: int):
    x, weight = normal(num_tokens, 48), normal(48, seed=1)
    own_x = machine.put(x)
    y = machine.backend.rms_norm(own_x, machine.backend.load_vector(weight), 1e-5)
    check(machine, "rms_norm", y, norm.rms_norm(x, weight, 1e-5))
    check(machine, "exact", own_x, x)


def test_head_norm_changes_its_heads_and_no_other(machine: Machine):
    qkv, weight = normal(5, 8, 16), normal(16, seed=1)
    own = machine.put(qkv)
    machine.backend.head_norm(own, 4, 6, machine.backend.load_vector(weight), 1e-6)
    wanted = qkv.copy()
    wanted[:, 4:6] = norm.rms_norm(qkv[:, 4:6], weight, 1e-6)
    check(machine, "rms_norm", own, wanted)
    others = [0, 1, 2, 3, 6, 7]
    np.testing.assert_array_equal(machine.get(own)[:, others], qkv[:, others])


@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_silu_mul(machine: Machine, num_tokens: int):
    gate_up = 4 * normal(num_tokens, 40)
    y = machine.backend.activate(machine.put(gate_up), "silu")
    check(machine, "silu_mul", y, activation.silu_mul(gate_up))


# The options that only some families need, which a backend computes or refuses.


def test_gelu_mul(machine: Machine):
    gate_up = 4 * normal(33, 40)
    gate_up[0, :4] = [-1e30, -60, 60, 1e4]
    y = machine.backend.activate(machine.put(gate_up), "gelu_tanh")
    wanted = activation.gelu_mul(gate_up)
    check(machine, "gelu_mul", y, wanted)
    tanh = np.tanh((2 / np.pi) ** 0.5 * (gate_up[1:, :20] + 0.044715 * gate_up[1:, :20] ** 3))
    by_definition = gate_up[1:, :20] / 2 * (1 + tanh) * gate_up[1:, 20:]
    np.testing.assert_allclose(wanted[1:], by_definition, atol=1e-14)


@pytest.mark.parametrize("activation_name", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize("width", [20, 48])
def test_norm_gate_up(machine: Machine, activation_name: Any, is_normed: bool, width: int):
    x, weight, matrix = normal(5, 32), normal(32, seed=1), normal(2 * width, 32, seed=2)
    backend, normed = machine.backend, norm.rms_norm(x, weight, 1e-5) if is_normed else x
    activate = activation.silu_mul if activation_name == "silu" else activation.gelu_mul
    own = backend.load_vector(weight) if is_normed else None
    loaded = backend.load_linear(matrix.shape, [matrix.astype(np.float32)])
    y = backend.norm_gate_up(machine.put(x), own, 1e-5, loaded, activation_name)
    wanted = activate(normed @ matrix.astype(np.float32).astype(np.float64).T)
    np.testing.assert_allclose(machine.get(y), wanted, rtol=1e-4, atol=1e-4)


def sparse_layer(backend: Backend, width: int, is_normalised: bool) -> tuple[Any, ...]:
    """Return the experts of a layer as a backend loads them, and their matrices in float64."""
    router, num_experts, hidden = normal(5, 32), 5, 32
    gate_up = normal(num_experts, 2 * width, hidden, seed=1) / 6
    down = normal(num_experts, hidden, width, seed=2) / width**0.5
    router[3] = router[1]  # so that two experts tie for every token

    def load(matrix: Any) -> Any:
        return backend.load_linear(matrix.shape, [matrix.astype(np.float32)])

    weights = backend.experts.load(
        router=load(router),
        gate_up=[*map(load, gate_up)],
        down=[*map(load, down)],
        number=num_experts,
        num_chosen=3,
        is_normalised=is_normalised,
        activation="silu",
    )
    return weights, *(
        each.astype(np.float32).astype(np.float64) for each in (router, gate_up, down)
    )


@pytest.mark.parametrize("is_normalised", [True, False])
@pytest.mark.parametrize("width", [20, 48])
@pytest.mark.parametrize("num_tokens", [1, 7, 200])
def test_experts(machine: Machine, is_normalised: bool, width: int, num_tokens: int):
    backend, x, residual = machine.backend, normal(num_tokens, 32), normal(num_tokens, 32, seed=5)
    weights, router, gate_up, down = sparse_layer(backend, width, is_normalised)
    own = machine.put(x)
    routed = backend.experts.route(own, weights)
    y = machine.get(backend.experts.compute(own, routed, weights, machine.put(residual)))
    wanted = experts.route(machine.get(own) @ router.T, 3, is_normalised)
    np.testing.assert_allclose(machine.get(routed), wanted, rtol=1e-4, atol=1e-5)
    shares = np.exp(x @ router.T)
    for token in range(num_tokens):
        chosen = np.argsort(-shares[token], kind="stable")[:3]
        total = shares[token, chosen if is_normalised else slice(None)].sum()
        parts = [
            shares[token, e]
            / total
            * activation.silu_mul((x[token] @ gate_up[e].T)[None])
            @ down[e].T
            for e in chosen
        ]
        np.testing.assert_allclose(y[token], residual[token] + sum(parts)[0], atol=2e-4)


@pytest.mark.parametrize(("number", "num_chosen"), [(5, 2), (33, 4)])
def test_a_router_with_sigmoids(machine: Machine, number: int, num_chosen: int):
    backend, x = machine.backend, normal(70, 32)
    router, bias = normal(number, 32, seed=3), normal(number, seed=4)
    router[1], bias[1] = router[3], bias[3]  # two experts tie for every token
    x[5] *= 100  # the sigmoids are 0 and 1
    weights = ExpertWeights(
        router=backend.load_linear(router.shape, [router.astype(np.float32)]),
        gate_up=None,
        down=None,
        number=number,
        num_chosen=num_chosen,
        is_normalised=True,
        activation="silu",
        bias=backend.load_vector(bias),
    )
    own = machine.put(x)
    routed = machine.get(backend.experts.route(own, weights))
    wanted = experts.route_by_sigmoid(
        machine.get(own) @ router.astype(np.float32).T.astype(np.float64), bias, num_chosen
    )
    np.testing.assert_allclose(routed, wanted, rtol=1e-4, atol=1e-5)


def test_an_expert_does_not_depend_on_the_other_tokens(machine: Machine):
    backend, x = machine.backend, normal(130, 32)
    if backend.numerics().get("batch_invariant") != 1:
        return
    weights, *_ = sparse_layer(backend, 48, True)

    def results(rows: slice) -> np.ndarray:
        own, residual = machine.put(x[rows]), machine.put(np.ones((len(x[rows]), 32)))
        routed = backend.experts.route(own, weights)
        return np.array(machine.get(backend.experts.compute(own, routed, weights, residual)))

    together = results(slice(None))
    for rows in (slice(0, 1), slice(17, 20), slice(29, 130)):
        np.testing.assert_array_equal(results(rows), together[rows])


@pytest.mark.parametrize("width", [20, 48])
def test_clamped_silu_mul(machine: Machine, width: int):
    gate_up = 9 * normal(33, 2 * width)
    y = machine.backend.activate(machine.put(gate_up), "clamped_silu")
    check(machine, "gelu_mul", y, activation.clamped_silu_mul(gate_up))
    gate, up = np.minimum(gate_up[:, :width], 7), np.clip(gate_up[:, width:], -7, 7)
    wanted = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    np.testing.assert_allclose(activation.clamped_silu_mul(gate_up), wanted)


def test_norm_add(machine: Machine):
    x, residual, weight = normal(33, 40), normal(33, 40, seed=2), normal(40, seed=1)
    own = machine.put(x), machine.backend.load_vector(weight), 1e-5, machine.put(residual)
    y = machine.backend.norm_add(*own)
    check(machine, "linear", y, norm.rms_norm(x, weight, 1e-5) + residual)


def test_soft_cap(machine: Machine):
    x = 20 * normal(3, 37)
    y = machine.backend.soft_cap(machine.put(x), 15.0)
    check(machine, "linear", y, 15 * np.tanh(x / 15))


def test_head_norm_of_a_whole_projection(machine: Machine):
    qkv, weight = normal(5, 8, 16), normal(4 * 16, seed=1)
    own = machine.put(qkv)
    machine.backend.head_norm(own, 2, 6, machine.backend.load_vector(weight), 1e-6)
    wanted = qkv.copy()
    wanted[:, 2:6] = norm.rms_norm(qkv[:, 2:6].reshape(5, 64), weight, 1e-6).reshape(5, 4, 16)
    check(machine, "rms_norm", own, wanted)


def test_scaled_embeddings(machine: Machine):
    table = normal(11, 16).astype(np.float32)
    embedding = machine.backend.load_embedding(table.shape, [table])
    y = machine.backend.embed(machine.put(np.array([3, 3, 10])), embedding, 2.5)
    check(machine, "rms_norm", y, 2.5 * table[[3, 3, 10]].astype(np.float64))


# The cache. Block size 4, three KV heads, two layers.

SHAPE = KVCacheShape(num_layers=2, num_blocks=40, block_size=4, num_kv_heads=3, head_dim=8)
INV_FREQ = np.array([10000.0 ** (-j / 4) for j in range(4)])


def batch_of(sequences: list[tuple[int, int]], seed: int = 0) -> StepBatch:
    return step_batch(sequences, SHAPE.block_size, SHAPE.num_blocks, seed)


def put_batch(machine: Machine, batch: StepBatch) -> StepBatch:
    arrays = {name: array for name, array in vars(batch).items() if isinstance(array, np.ndarray)}
    return replace(batch, **{name: machine.put(array) for name, array in arrays.items()})


def filled_cache(batch: StepBatch, seed: int = 0) -> np.ndarray:
    """Return planes with numbers for the batch's sequences, and NaN in every other slot."""
    planes = np.full((2, 2, SHAPE.num_blocks, SHAPE.block_size, 3, 8), np.nan)
    content = normal(*planes.shape, seed=seed)
    for table, length in zip(batch.block_tables, batch.seq_lens.tolist(), strict=True):
        for position in range(length):
            slot = (table[position // SHAPE.block_size], position % SHAPE.block_size)
            planes[:, :, slot[0], slot[1]] = content[:, :, slot[0], slot[1]]
    return planes


BATCHES = {
    "one decode": [(1, 9)],
    "decodes": [(1, 9), (1, 1), (1, 16), (1, 4)],
    "one prompt": [(6, 6)],
    "chunks": [(3, 10), (7, 7), (2, 12)],
    "decodes, then chunks": [(1, 5), (1, 13), (4, 4), (5, 11)],
    "chunks, then decodes": [(4, 4), (1, 13), (5, 11), (1, 5)],
}


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("scaling", [1.0, 1.2])
def test_rope_write_kv(machine: Machine, sequences: list[tuple[int, int]], scaling: float):
    batch = batch_of(sequences)
    num_tokens, num_heads = len(batch.positions), 6
    qkv = normal(num_tokens, num_heads + 6, 8)
    table = rope.rope_table(INV_FREQ, scaling, 20, "float64")
    rotated = rope.rope(qkv[:, : num_heads + 3], table[batch.positions])
    planes = np.zeros((2, 2, SHAPE.num_blocks, SHAPE.block_size, 3, 8))
    kv_cache.write_kv(  # type: ignore[call-arg]
        rotated[:, num_heads:], qkv[:, num_heads + 3 :], *planes[1], batch.slot_mapping
    )

    cache = machine.backend.new_kv_cache(SHAPE)
    machine.put_cache(cache, np.zeros_like(planes))
    own_table = machine.backend.load_rope(INV_FREQ, scaling, 20)
    q = machine.backend.rope_write_kv(
        machine.put(qkv), own_table, cache, 1, put_batch(machine, batch)
    )
    check(machine, "rope", q, rotated[:, :num_heads])
    check(machine, "rope", machine.get_cache(cache), planes)
    values = machine.get_cache(cache)[:, 1]
    np.testing.assert_array_equal(values, planes[:, 1])


def attend(
    machine: Machine,
    batch: StepBatch,
    window: int | None,
    seed: int = 0,
    sinks: np.ndarray | None = None,
) -> None:
    """Compare one call, in the layer of the highest number."""
    planes, q = filled_cache(batch, seed), normal(len(batch.positions), 6, 8, seed=seed)
    wanted = attention.paged_attention(
        q,
        planes[1, 0],
        planes[1, 1],
        batch.block_tables,
        batch.cu_seqlens_q,
        batch.seq_lens,
        8**-0.5,
        window,
        sinks=sinks,
    )
    cache = machine.backend.new_kv_cache(SHAPE)
    machine.put_cache(cache, planes)
    own_q = machine.put(q)
    own = None if sinks is None else machine.backend.load_vector(sinks)
    got = machine.backend.paged_attention(
        own_q, cache, 1, put_batch(machine, batch), window, sinks=own
    )
    check(machine, "paged_attention", got, wanted)
    check(machine, "exact", own_q, q)
    np.testing.assert_array_equal(machine.get_cache(cache), planes.astype(machine.dtype))


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [None, 1, 3, 9, 16, 100])
def test_paged_attention(machine: Machine, sequences: list[tuple[int, int]], window: int | None):
    attend(machine, batch_of(sequences), window)


@pytest.mark.parametrize("sequences", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [None, 3])
def test_attention_sinks(machine: Machine, sequences: list[tuple[int, int]], window: int | None):
    sinks = np.array([0.5, -3.0, 2.0, 300.0, -300.0, 0.0])
    attend(machine, batch_of(sequences), window, sinks=sinks)


@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_sink_counts_once_over_a_long_context(machine: Machine, num_queries: int):
    """Contexts are attended in parts, and a sink is in none of them."""
    shape = KVCacheShape(num_layers=1, num_blocks=70, block_size=16, num_kv_heads=2, head_dim=8)
    planes, q = normal(1, 2, 70, 16, 2, 8), 3 * normal(num_queries, 4, 8, seed=1)
    sinks, length = np.array([7.0, 0.0, 3.0, 9.0]), 1100
    positions = np.arange(length - num_queries, length)
    batch = StepBatch(
        token_ids=positions,
        positions=positions,
        slot_mapping=positions,
        cu_seqlens_q=np.array([0, num_queries]),
        seq_lens=np.array([length]),
        block_tables=np.arange(70)[None],
        logits_rows=np.array([0]),
    )
    tables, starts, lengths = batch.block_tables, batch.cu_seqlens_q, batch.seq_lens
    wanted = attention.paged_attention(
        q, planes[0, 0], planes[0, 1], tables, starts, lengths, 8**-0.5, sinks=sinks
    )
    cache, own = machine.backend.new_kv_cache(shape), machine.backend.load_vector(sinks)
    machine.put_cache(cache, planes)
    got = machine.backend.paged_attention(
        machine.put(q), cache, 0, put_batch(machine, batch), None, sinks=own
    )
    check(machine, "paged_attention", got, wanted)


def test_a_sink_is_a_key_whose_value_is_zero():
    q, keys, values = normal(1, 2, 8), normal(3, 1, 8, seed=1), normal(3, 1, 8, seed=2)
    more = np.concatenate([keys, np.ones((1, 1, 8))]), np.concatenate([values, np.zeros((1, 1, 8))])
    visible = np.ones((1, 4), bool)
    wanted = attention.attend(q, *more, 0.3, visible)
    sinks = 0.3 * q[0].sum(-1)
    got = attention.attend(q, keys, values, 0.3, visible[:, :3], sinks=sinks)
    np.testing.assert_allclose(got, wanted)


@pytest.mark.parametrize("name", machine_params({name: name for name in MACHINES}))
@given(
    sequences=st.lists(
        st.one_of(
            st.integers(1, 18).map(lambda length: (1, length)),
            st.tuples(st.integers(1, 8), st.integers(0, 8)).map(lambda s: (s[0], sum(s))),
        ),
        min_size=1,
        max_size=6,
    ),
    window=st.none() | st.integers(1, 20),
    seed=st.integers(0, 1000),
)
def test_paged_attention_of_any_batch(
    name: str, sequences: list[tuple[int, int]], window: int | None, seed: int
):
    attend(MACHINES[name](), batch_of(sequences, seed), window, seed)


@pytest.mark.parametrize(
    "pairs", [[(2, 5)], [(0, 1), (1, 2)], [(1, 2), (0, 1)], [(3, 4), (4, 3)], [(6, 7), (6, 8)]]
)
def test_move_blocks_copies_keys_and_values_in_every_layer(
    machine: Machine, pairs: list[tuple[int, int]]
):
    planes = normal(2, 2, SHAPE.num_blocks, SHAPE.block_size, 3, 8)
    cache = machine.backend.new_kv_cache(SHAPE)
    machine.put_cache(cache, planes)
    src, dst = zip(*pairs, strict=True)
    machine.backend.move_blocks(cache, cache, src, dst)
    wanted = planes.copy()
    for source, destination in pairs:
        wanted[:, :, destination] = planes[:, :, source]
    check(machine, "exact", machine.get_cache(cache), wanted)


def test_blocks_return_from_the_host_unchanged(machine: Machine):
    """Blocks are exported, overwritten, and imported to other blocks, byte for byte."""
    backend, host_shape = machine.backend, replace(SHAPE, num_blocks=4)
    planes = normal(2, 2, SHAPE.num_blocks, SHAPE.block_size, 3, 8)
    cache, host = backend.new_kv_cache(SHAPE), backend.new_host_cache(host_shape)
    machine.put_cache(cache, planes)
    before = machine.get_cache(cache).copy()
    backend.move_blocks(cache, host, (1, 5, 0), (3, 0, 2))
    machine.put_cache(cache, np.full_like(planes, 7.0))
    backend.move_blocks(host, cache, (0, 2, 3), (6, 4, 1))
    after = machine.get_cache(cache)
    for source, target in ((5, 6), (0, 4), (1, 1)):
        assert after[:, :, target].tobytes() == before[:, :, source].tobytes()
    untouched = [block for block in range(SHAPE.num_blocks) if block not in (6, 4, 1)]
    assert (after[:, :, untouched] == 7.0).all()


def test_a_new_cache_has_the_requested_size(machine: Machine):
    planes = machine.get_cache(machine.backend.new_kv_cache(SHAPE))
    assert planes.shape == (2, 2, SHAPE.num_blocks, SHAPE.block_size, 3, 8)
    assert planes.nbytes == planes.size * machine.backend.kv_dtype.itemsize
    assert np.isfinite(planes).all()


# Tokens.

CONTROLS = [
    RowControls(),
    RowControls(temperature=0.7, uniform=0.4),
    RowControls(temperature=1.0, uniform=0.9, top_k=5),
    RowControls(temperature=1.3, uniform=0.2, top_p=0.6),
    RowControls(temperature=1.3, uniform=0.7, min_p=0.1),
    RowControls(banned_ids=np.arange(0, 60, 2)),
    RowControls(allowed_ids=np.array([3, 17, 44]), temperature=1.0, uniform=0.5),
    RowControls(allowed=TokenMask(np.array([-(2**31), 5], np.int32))),  # tokens 31, 32 and 34
    RowControls(
        allowed=TokenMask(np.array([0x0F0F0F0F, 0x00F0F0F0], np.int32)),
        banned_ids=np.arange(0, 60, 3),
        bias=(np.array([1]), np.array([2.0])),
        temperature=1.0,
        uniform=0.5,
    ),
    RowControls(bias=(np.array([9]), np.array([50.0]))),
    RowControls(repetition_penalty=1.7, seen_ids=np.arange(20)),
    RowControls(
        presence_penalty=1.0,
        frequency_penalty=0.5,
        output_ids=np.array([1, 2]),
        output_counts=np.array([3, 1]),
    ),
    RowControls(forced_id=12),
]


def test_sample(machine: Machine):
    logits = 4 * normal(len(CONTROLS), 60)
    tokens = machine.backend.sample(machine.put(logits), CONTROLS)
    assert tokens == sampling.sample(logits, CONTROLS)
    assert all(type(token) is int for token in tokens)


def test_greedy_ties_go_to_the_lowest_id(machine: Machine):
    logits = machine.put(np.array([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]]))
    assert machine.backend.sample(logits, [RowControls()] * 2) == [1, 0]


@pytest.mark.parametrize("num_top", [0, 1, 5, 1000, -1])
def test_top_logprobs(machine: Machine, num_top: int):
    logits = 4 * normal(4, 60)
    for row, token_id in ((0, 7), (3, int(logits[3].argmax()))):
        ids, logprobs, rank = machine.backend.top_logprobs(
            machine.put(logits), row, token_id, num_top
        )
        wanted = sampling.top_logprobs(logits[row], token_id, num_top)
        assert (ids, rank) == (wanted[0], wanted[2])
        rtol, atol = TOLERANCES["top_logprobs", machine.dtype]
        np.testing.assert_allclose(logprobs, wanted[1], rtol=rtol, atol=atol)


def test_run_step_returns_the_result_of_forward(machine: Machine):
    batch, matrix = batch_of([(2, 3), (1, 1)]), normal(10, 5)
    batch = replace(batch, token_ids=np.array([7, 3, 9]))
    table = machine.backend.load_embedding((10, 5), [matrix])
    seen: list[StepBatch] = []

    def forward(given: StepBatch) -> Any:
        seen.append(given)
        x = machine.backend.embed(given.token_ids, table)
        return machine.backend.take_rows(x, given.logits_rows)

    got = machine.backend.run_step(forward, put_batch(machine, batch))
    check(machine, "exact", got, matrix[[3, 9]])
    assert seen


# The object itself.


def test_two_backends_live_side_by_side():
    x, matrix = normal(3, 16), normal(5, 16, seed=1)
    missing = {"jit-float32": not HAS_NUMBA, "cupy-emulated-float32": not HAS_COMPILER}
    available = [name for name in MACHINES if not missing.get(name)]
    machines = [MACHINES[name]() for name in available]
    weights = [machine.backend.load_linear((5, 16), [matrix]) for machine in machines]
    for machine, weight in zip(machines, weights, strict=True):
        check(machine, "linear", machine.backend.linear(machine.put(x), weight), x @ matrix.T)


def test_an_unsupported_dtype_of_numpy_is_refused():
    with pytest.raises(ConfigError, match=r"float8.*choose auto, float32, float64, bfloat16 or"):
        load_backend("numpy", "float8")
    with pytest.raises(ConfigError, match="'abacus' is not available; choose from: auto, jit"):
        load_backend("abacus")
    assert load_backend("numpy").kv_dtype.itemsize == 4
