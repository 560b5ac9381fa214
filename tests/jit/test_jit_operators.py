"""Compare every operator of the compiled backend with `mie.ops`, in every format and at odd sizes.

The plain functions run in float64 on the numbers that the backend was given. Its own rounding is
bounded by theory where sums are products, and by a few roundings elsewhere.
"""

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from compiled import CACHES, EACH_CACHE, fill_cache, jit_backend, needs_numba, planes_of, scales_of
from numpy.typing import NDArray
from step_batches import step_batch

from mie.ops import activation, attention, norm, rope
from mie.ops.backend import KVCacheShape, StepBatch
from mie.ops.kv_cache import HALVES
from mie.ops.weights.quantised_cache import LARGEST, dequantize, quantize

pytestmark = needs_numba

Array = NDArray[Any]

WEIGHTS = {"float32": np.dtype(np.float32), **HALVES}
BFLOAT16 = HALVES["bfloat16"]
ROUNDING = 2.0**-24


def normal(*shape: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def wide(array: Array) -> NDArray[np.float64]:
    return array.astype(np.float64)


# Products.

NUM_ROWS = (0, 1, 2, 5, 6, 7, 11, 12, 13, 31, 96, 97, 200)
"""Around the sizes of tiles (6), of widening (12) and of blocks (96)."""
SIZES = [(1, 1), (6, 20), (20, 6), (80, 96), (96, 80), (1, 65), (65, 1), (100, 130), (130, 48)]
LONG = [(511, 17), (512, 33), (513, 16), (1030, 96)]
"""Inputs and outputs. A pass has 512 inputs."""


@pytest.mark.parametrize(
    ("dtype", "has_bias", "has_residual"),
    [
        *[(dtype, 1, 1) for dtype in WEIGHTS],
        ("float32", 0, 0),
        ("float16", 1, 0),
        ("bfloat16", 0, 1),
    ],
)
def test_products_of_any_size(dtype: str, has_bias: int, has_residual: int):
    """Each sum is off by at most K + 3 roundings of the sum of its terms' magnitudes."""
    backend = jit_backend()
    for num_inputs, num_outputs in SIZES + LONG:
        matrix = normal(num_outputs, num_inputs, seed=1).astype(WEIGHTS[dtype])
        bias = normal(num_outputs, seed=2).astype(WEIGHTS[dtype]) if has_bias else None
        weight = backend.load_linear((num_outputs, num_inputs), [matrix], bias)
        assert weight.segments[0].format == dtype, "it is kept as it is"
        for num_rows in NUM_ROWS:
            x = normal(num_rows, num_inputs)
            residual = normal(num_rows, num_outputs, seed=3) if has_residual else None
            got = backend.linear(x, weight, residual)
            assert got.shape == (num_rows, num_outputs)
            parts = [0.0 if each is None else wide(each) for each in (bias, residual)]
            wanted = wide(x) @ wide(matrix).T + sum(parts)
            terms = np.abs(wide(x)) @ np.abs(wide(matrix)).T + sum(map(np.abs, parts))
            error = np.abs(got - wanted)
            where = (num_inputs, num_outputs, num_rows)
            assert (error <= (num_inputs + 3) * ROUNDING * terms).all(), where


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_fused_gate_equals_its_parts_bit_for_bit(dtype: str, has_bias: bool):
    backend = jit_backend()
    for num_inputs, width in [(1, 1), (20, 6), (100, 130), (24, 16), (30, 80), (520, 112)]:
        matrix = normal(2 * width, num_inputs, seed=1).astype(WEIGHTS[dtype])
        bias = normal(2 * width, seed=2) if has_bias else None
        weight = backend.load_linear((2 * width, num_inputs), [matrix], bias)
        norm_weight = backend.load_vector(normal(num_inputs, seed=3))
        for num_rows in (0, 1, 5, 13, 97):
            x = normal(num_rows, num_inputs)
            fused = backend.norm_gate_up(x, norm_weight, 1e-5, weight)
            normed = backend.rms_norm(x, norm_weight, 1e-5)
            parts = backend.activate(backend.linear(normed, weight), "silu")
            np.testing.assert_array_equal(fused, parts)


def test_parts_of_different_dtypes_become_float32():
    backend = jit_backend()
    q, k, v = normal(33, 20, seed=1).astype(BFLOAT16), normal(7, 20), normal(9, 20, seed=2)
    v = v.astype(np.float16)
    fused = backend.load_linear((49, 20), iter([q[:30], q[30:], k, v]))
    assert fused.segments[0].format == "float32"
    got = backend.linear(np.eye(20, dtype=np.float32), fused)
    wanted = np.concatenate([each.astype(np.float32) for each in (q, k, v)]).T
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", WEIGHTS)
def test_all_finite_numbers_of_16_bits_are_widened_exactly(dtype: str):
    """Embeddings and products widen with different code."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        numbers = bits.view(WEIGHTS[dtype]) if dtype != "float32" else bits.view(np.float16)
        numbers = numbers.astype(WEIGHTS[dtype])
        exact = numbers.astype(np.float32)
    finite = np.isfinite(exact)
    numbers, exact = numbers[finite], exact[finite]
    backend, width = jit_backend(), 20
    rows = len(numbers) // width
    matrix = numbers[: rows * width].reshape(rows, width)
    table = backend.load_embedding(matrix.shape, [matrix])
    wanted = exact[: rows * width].reshape(rows, width)
    for chosen in (np.arange(rows), np.array([rows - 1, 0, 0, 5])):
        np.testing.assert_array_equal(backend.embed(chosen, table), wanted[chosen])
    for num_rows in (2, 20):  # with and without widening once for all rows
        unit = np.eye(width, dtype=np.float32)[:num_rows]
        got = backend.linear(unit, backend.tie_linear(table))
        np.testing.assert_array_equal(got, wanted.T[:num_rows])


def test_infinities_and_nans_stay_in_their_rows_and_outputs():
    backend = jit_backend()
    x, matrix = normal(30, 40), normal(50, 40, seed=1)
    x[3, 5], x[17, 39], x[29, 0] = np.nan, np.inf, -np.inf
    matrix[7, 6], matrix[49, 2] = np.nan, np.inf
    got = backend.linear(x, backend.load_linear((50, 40), [matrix]))
    with np.errstate(invalid="ignore"):
        wanted = x @ matrix.T
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(wanted))
    finite = np.isfinite(wanted)
    assert finite.sum() == 27 * 48
    np.testing.assert_allclose(got[finite], wanted[finite], atol=2e-5)


# Rows.


@pytest.mark.parametrize("width", [1, 2, 6, 15, 16, 17, 20, 80, 96, 1000])
@pytest.mark.parametrize("num_rows", [1, 9, 33])
def test_norms_and_gates_of_any_width(width: int, num_rows: int):
    backend = jit_backend()
    x, weight = normal(num_rows, width), normal(width, seed=1)
    got = backend.rms_norm(x, weight, 1e-5)
    np.testing.assert_allclose(got, norm.rms_norm(wide(x), wide(weight), 1e-5), rtol=2e-6)
    heads = normal(num_rows, 7, width)
    own = heads.copy()
    backend.head_norm(own, 2, 5, weight, 1e-6)
    wanted = norm.rms_norm(wide(heads[:, 2:5]), wide(weight), 1e-6)
    np.testing.assert_allclose(own[:, 2:5], wanted, rtol=2e-6)
    np.testing.assert_array_equal(own[:, [0, 1, 5, 6]], heads[:, [0, 1, 5, 6]])
    gates = 4 * normal(num_rows, 2 * width, seed=2)
    got = backend.activate(gates, "silu")
    np.testing.assert_allclose(got, activation.silu_mul(wide(gates)), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "definition", "rtol"),
    [
        ("silu", activation.silu_mul, 1e-6),
        ("gelu_tanh", activation.gelu_mul, 1e-5),
        ("clamped_silu", activation.clamped_silu_mul, 1e-5),
    ],
)
def test_the_gate_of_any_number(name: str, definition: Callable[..., Any], rtol: float):
    """Far below zero the exact result is too small to matter, and the kernel's may be zero."""
    gates = np.concatenate(
        [np.linspace(-150, 150, 3001), [0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38]]
    ).astype(np.float32)
    both = np.stack([gates, np.ones_like(gates)], axis=1)
    got = jit_backend().activate(both, name)[:, 0]
    with np.errstate(over="ignore"):
        wanted = definition(wide(both))[:, 0]
    np.testing.assert_allclose(got, wanted, rtol=rtol, atol=1e-36)
    assert got[gates == 0].tolist() == [0.0] * np.count_nonzero(gates == 0)


def test_the_gate_of_infinities_and_nans_is_that_of_numpy():
    special = np.array([np.inf, -np.inf, np.nan, 0.0, 1.0, -100.0], np.float32)
    both = np.array([*itertools.product(special, special)], np.float32)
    with np.errstate(all="ignore"):
        wanted = activation.silu_mul(both)
    got = jit_backend().activate(both, "silu")
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-36)


def test_a_norm_of_infinities_and_nans_is_that_of_numpy():
    x = normal(6, 20)
    x[1, 3], x[2, 19], x[3, 0], x[4] = np.nan, np.inf, -np.inf, 1e-30
    with np.errstate(all="ignore"):
        wanted = norm.rms_norm(x, np.ones(20, np.float32), 1e-6)
    got = jit_backend().rms_norm(x, np.ones(20, np.float32), 1e-6)
    np.testing.assert_allclose(got, wanted, rtol=2e-6)


# The cache.

BLOCK_SIZES = (1, 3, 4, 8, 16, 24, 32)
HEAD_DIMS = (2, 6, 16, 20, 64, 80, 96, 128)


def cache_of(shape: KVCacheShape, dtype: str) -> Any:
    from mie.ops_jit.memory import JitCache

    return JitCache.new(shape, CACHES[dtype])


def shape_of(batch: StepBatch, block_size: int, num_kv_heads: int, head_dim: int) -> KVCacheShape:
    """Return the shape of a cache with two layers for a batch, and two blocks to spare."""
    return KVCacheShape(
        num_layers=2,
        num_blocks=sum(-(-length // block_size) for length in batch.seq_lens.tolist()) + 2,
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


SPECIAL = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-140), 3e38, -3e38, 2.0**-95, 65519.0, 65520.0]
SPECIAL += [-65504.0, np.nan, np.inf, -np.inf, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, 448.0, 464.0]


def hard_vectors(num: int, head_dim: int, seed: int) -> NDArray[np.float32]:
    """Return vectors whose numbers are hard to round: ties, tiny, huge, infinite and NaN ones."""
    rng = np.random.default_rng([seed, num, head_dim])
    vectors = rng.normal(size=(num, head_dim)).astype(np.float32)
    for i, kind in enumerate(rng.integers(0, 8, num)):
        at = rng.integers(head_dim)
        if kind == 0:
            vectors[i, at] = rng.choice(SPECIAL)
        elif kind == 1:
            vectors[i] *= np.float32(2.0 ** rng.integers(-145, 120))
        elif kind == 2:  # the scale is a power of two, so quotients are ties
            vectors[i] = np.clip(rng.integers(-254, 255, head_dim) / 2, -127, 127)
            vectors[i, at] = 127.0
        elif kind == 3:  # ties of E4M3, subnormal ones too
            vectors[i] = rng.integers(-64, 65, head_dim) * 2.0 ** rng.integers(-11, 2)
            vectors[i, at] = 448.0
        elif kind == 4:
            vectors[i] = rng.choice([0.0, -0.0], head_dim)
        elif kind == 5:  # ties of bfloat16 and float16
            bits = vectors[i].view(np.uint32) & np.uint32(0xFFFF0000)
            bits |= rng.choice(np.array([0x7FFF, 0x8000, 0x8001], np.uint32))
            vectors[i] = bits.view(np.float32)
        elif kind == 6:
            halves = vectors[i].astype(np.float16).astype(np.float32)
            vectors[i] = halves * np.float32(1 + 2.0**-11)
    return vectors


def same_bits(got: Array, wanted: Array) -> bool:
    """Return whether two arrays have the same bits, except for those of NaNs."""
    assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
    equal = np.ascontiguousarray(got).view(kind) == np.ascontiguousarray(wanted).view(kind)
    if got.dtype != np.int8:
        equal |= np.isnan(got.astype(np.float32)) & np.isnan(wanted.astype(np.float32))
    return bool(equal.all())


@pytest.mark.parametrize("stored", EACH_CACHE)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_keys_and_values_are_rounded_exactly_as_defined(stored: str, head_dim: int):
    """Elements and scales have the bits of `quantize`, and no other slot changes.

    The query heads have the same vectors as the key heads. So the rotated queries are the rotated
    keys before they are rounded.
    """
    backend, num_heads = jit_backend(), 3
    inv_freq = 1 / 100.0 ** np.linspace(0, 1, head_dim // 2)
    table = backend.load_rope(inv_freq, 1.25, 40)
    for block_size in BLOCK_SIZES[HEAD_DIMS.index(head_dim) % 2 :: 2]:
        batch = step_batch([(1, 7), (30, 30), (3, 36), (1, 1), (17, 29)], block_size, 200, 1)
        shape = replace(shape_of(batch, block_size, num_heads, head_dim), num_blocks=200)
        num_tokens = len(batch.positions)
        vectors = hard_vectors(2 * num_tokens * num_heads, head_dim, block_size)
        keys, values = vectors.reshape(2, num_tokens, num_heads, head_dim)
        qkv = np.concatenate([keys, keys, values], axis=1)
        cache = cache_of(shape, stored)
        before = planes_of(cache)
        before[...] = np.random.default_rng(2).integers(0, 9, before.shape)
        scales = None
        if CACHES[stored] in LARGEST:
            scales = np.full((*before.shape[:-1],), 5.0, np.float32)
        fill_cache(cache, before, scales)
        q = backend.rope_write_kv(qkv.copy(), table, cache, 1, batch)
        with np.errstate(invalid="ignore", over="ignore"):
            wanted_q = rope.rope(
                wide(keys), rope.rope_table(inv_freq, 1.25, 40, "float64")[batch.positions]
            )
            stored_keys, stored_values = (quantize(each, CACHES[stored]) for each in (q, values))
        size = np.abs(np.where(np.isfinite(keys), keys, 0)).max(axis=-1, keepdims=True)
        allowed = 4 * ROUNDING * size.astype(np.float64) + 1e-44
        usual = np.isfinite(keys).all(axis=-1) & (size[..., 0] < 1e38)
        assert (np.abs(q[usual] - wanted_q[usual]) <= allowed[usual]).all()
        blocks, offsets = np.divmod(batch.slot_mapping, block_size)
        planes = before.copy()
        planes[1, 0, blocks, offsets] = stored_keys.elements
        planes[1, 1, blocks, offsets] = stored_values.elements
        assert same_bits(planes_of(cache), planes), block_size
        if scales is not None:
            scales[1, 0, blocks, offsets] = stored_keys.scales
            scales[1, 1, blocks, offsets] = stored_values.scales
            assert same_bits(scales_of(cache), scales), block_size


# Attention.


def attend(
    sequences: list[tuple[int, int]],
    *,
    stored: str = "float32",
    block_size: int = 16,
    num_kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 16,
    window: int | None = None,
    seed: int = 0,
) -> None:
    """Compare one call with the definition. Slots of nobody are NaN, as far as they can be."""
    num_blocks = sum(-(-length // block_size) for _, length in sequences) + 2
    batch = step_batch(sequences, block_size, num_blocks, seed)
    shape = shape_of(batch, block_size, num_kv_heads, head_dim)
    content = normal(2, 2, num_blocks, block_size, num_kv_heads, head_dim, seed=seed)
    cache, quantized = cache_of(shape, stored), quantize(content, CACHES[stored])
    numbers = dequantize(quantized, np.float64)
    planes, scales = quantized.elements.copy(), quantized.scales
    used = np.zeros((num_blocks, block_size), bool)
    for table, length in zip(batch.block_tables, batch.seq_lens.tolist(), strict=True):
        each = np.arange(length)
        used[table[each // block_size], each % block_size] = True
    if scales is None:
        planes[:, :, ~used] = np.nan
    else:
        scales = scales.copy()
        scales[:, :, ~used] = np.nan
    fill_cache(cache, planes, scales)
    q = normal(len(batch.positions), num_kv_heads * group, head_dim, seed=seed + 1)
    own = q.copy()
    got = jit_backend().paged_attention(own, cache, 1, batch, window)
    wanted = attention.paged_attention(
        wide(q), numbers[1, 0], numbers[1, 1], batch.block_tables, batch.cu_seqlens_q,
        batch.seq_lens, head_dim**-0.5, window,
    )  # fmt: skip
    np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-6)
    assert same_bits(own, q), "the queries are not changed"


MIXED = [(1, 9), (5, 5), (1, 1), (7, 70), (1, 64), (50, 120), (1, 65), (2, 3)]


@pytest.mark.parametrize("stored", EACH_CACHE)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_attention_with_any_block_size(stored: str, block_size: int):
    for window in (None, 1, 5, 66):
        attend(MIXED, stored=stored, block_size=block_size, window=window, seed=block_size)


@pytest.mark.parametrize("stored", EACH_CACHE)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_with_any_head_size(stored: str, head_dim: int):
    for block_size in (4, 16):
        attend(MIXED, stored=stored, block_size=block_size, head_dim=head_dim, window=None)
        attend(MIXED, stored=stored, block_size=block_size, head_dim=head_dim, window=33)


@pytest.mark.parametrize("group", [1, 2, 3, 8, 32, 71])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_attention_with_any_group(group: int, num_kv_heads: int):
    for head_dim, block_size in [(20, 8), (64, 32)]:
        attend(
            MIXED, group=group, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size
        )


LENGTHS = (511, 512, 513, 1023, 1024, 1025, 1100)
"""Around the ends of parts, which have 512 positions."""


@pytest.mark.parametrize(
    "stored", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), "int8"]
)
@pytest.mark.parametrize("window", [None, 1, 64, 65, 511, 512, 513, 700])
def test_attention_over_several_parts(stored: str, window: int | None):
    block_size = 24 if stored == "bfloat16" or window in (1, 511, 700) else 16
    decodes = [(1, length) for length in LENGTHS]
    chunks = [(3, 513), (40, 1030), (600, 600), (2, 1024)]
    sequences = [*decodes[:3], *chunks[:2], *decodes[3:], *chunks[2:]]
    attend(sequences, stored=stored, block_size=block_size, group=2, window=window)


@pytest.mark.parametrize("stored", ["float32", pytest.param("fp8", marks=pytest.mark.slow)])
def test_attention_hides_no_nan(stored: str):
    """A NaN in a key or a value, or in a query, reaches the result, and no other sequence's."""
    block_size, head_dim, lengths = 8, 20, [40, 1100, 17]
    for num_queries in (1, 3):
        sequences = [(num_queries, length) for length in lengths]
        batch = step_batch(sequences, block_size, 200)
        shape = replace(shape_of(batch, block_size, 2, head_dim), num_blocks=200)
        content = normal(2, 2, 200, block_size, 2, head_dim)
        clean = normal(len(batch.positions), 4, head_dim, seed=1)
        for what, row, number in itertools.product(
            ("query", "key", "value"), (0, 1), (np.nan, np.inf, -np.inf)
        ):
            q, spoiled = clean.copy(), content.copy()
            if what == "query":
                q[row * num_queries, 1, 3] = number
            else:
                slot = batch.block_tables[row, 5 // block_size], 5 % block_size
                spoiled[1, int(what == "value"), slot[0], slot[1], 1, 3] = number
            with np.errstate(invalid="ignore"):
                kept = quantize(spoiled, CACHES[stored])
                numbers = dequantize(kept, np.float64)
                wanted = attention.paged_attention(
                    wide(q), numbers[1, 0], numbers[1, 1], batch.block_tables, batch.cu_seqlens_q,
                    batch.seq_lens, head_dim**-0.5,
                )  # fmt: skip
            cache = cache_of(shape, stored)
            fill_cache(cache, kept.elements, kept.scales)
            got = jit_backend().paged_attention(q, cache, 1, batch, None)
            damage = (what, row, number, num_queries)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted), str(damage))
            finite = np.isfinite(wanted)
            assert finite[-num_queries:].all()
            np.testing.assert_allclose(got[finite], wanted[finite], atol=5e-6)
            if what == "query":
                others = np.ones(len(q), bool)
                others[row * num_queries] = False
                assert finite[others].all()


def test_scores_beyond_the_range_of_exponentials():
    """One key takes all the weight, in any part."""
    block_size, head_dim = 16, 16
    for best in (0, 300, 511, 512, 1000, 1039):
        batch = step_batch([(1, 1040), (8, 1040)], block_size, 132)
        content = normal(1, 2, 132, block_size, 1, head_dim)
        for row in range(2):
            slot = batch.block_tables[row, best // block_size], best % block_size
            content[0, 0, slot[0], slot[1]] = 1e4
        cache = cache_of(replace(shape_of(batch, block_size, 1, head_dim), num_layers=1), "float32")
        fill_cache(cache, content)
        q = np.ones((9, 2, head_dim), np.float32)
        got = jit_backend().paged_attention(q, cache, 0, batch, None)
        for token in range(9):
            row = int(token > 0)
            if token > 0 and best > 1040 - 8 + token - 1:
                continue
            slot = batch.block_tables[row, best // block_size], best % block_size
            np.testing.assert_allclose(got[token, 0], content[0, 1, slot[0], slot[1], 0], rtol=1e-6)


# Logits.


def fixed_logits(size: int) -> NDArray[np.float32]:
    """Return logits with 16 bits, from -32 to 32, that no library computes."""
    return ((np.arange(size) * 7919 % 32_771 - 16_385) / 512).astype(np.float32)


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 64, 300, 5000])
def test_log_probabilities_are_those_of_exact_sums(size: int):
    logits = fixed_logits(size)
    if size > 2:
        logits[1] = -np.inf
    largest = float(logits.max())
    total = math.log(math.fsum(math.exp(each - largest) for each in logits.tolist()))
    ids, logprobs, _ = jit_backend().top_logprobs(logits[None], 0, size // 2, -1)
    wanted = [float(logits[i]) - largest - total for i in ids]
    np.testing.assert_allclose(logprobs, wanted, rtol=1e-15, atol=1e-15)


def test_log_probabilities_of_a_nan_are_nans():
    logits = np.array([[0.0, np.nan, 1.0], [0.0, np.inf, 1.0]], np.float32)
    for row in range(2):
        assert np.isnan(jit_backend().top_logprobs(logits, row, 0, 0)[1]).all()


def test_log_probabilities_have_the_same_bits_on_every_cpu():
    found = [jit_backend().top_logprobs(fixed_logits(n)[None], 0, 0, 0)[1] for n in range(1, 999)]
    bits = np.array(found, np.float64).tobytes()
    assert hashlib.sha256(bits).hexdigest()[:16] == "01d3c41be7a2bb17"


# Blocks.


def test_a_cache_has_the_bytes_that_it_announces():
    from mie.ops_jit.jit_backend import JitBackend
    from mie.ops_jit.layout import REGION

    for stored, head_dim in itertools.product(("auto", "int8", "fp8", "int4"), (6, 16, 20, 40)):
        backend = JitBackend(num_threads=1, kv_cache_dtype=stored)
        shape = KVCacheShape(
            num_layers=2, num_blocks=REGION, block_size=3, num_kv_heads=2, head_dim=head_dim
        )
        cache = backend.new_kv_cache(shape)
        scale_bytes = 0 if cache.scales is None else cache.scales.nbytes
        assert cache.elements.nbytes + scale_bytes == backend.kv_cache_bytes(shape)


# Sizes that no model has, but a file can name.


def test_huge_sizes_get_the_memory_that_they_need():
    backend = jit_backend()
    attend([(1, 9), (20, 20)], head_dim=4096, group=1, num_kv_heads=1)
    attend([(1, 9), (2, 20)], head_dim=2, group=4000, num_kv_heads=1)
    width = 270_000
    rows = [normal(1, width, seed=seed) for seed in range(3)]
    table = backend.load_embedding((3, width), rows)
    got = backend.embed(np.array([2, 0, 1, 1]), table)
    np.testing.assert_array_equal(got, np.concatenate([rows[2], rows[0], rows[1], rows[1]]))


def test_a_huge_vocabulary():
    backend = jit_backend()
    num_tokens, width = (1 << 18) + 5, 6
    matrix = normal(num_tokens, width)
    table = backend.load_embedding((num_tokens, width), [matrix])
    chosen = np.array([num_tokens - 1, 0, 1 << 18])
    np.testing.assert_array_equal(backend.embed(chosen, table), matrix[chosen])
    x = normal(3, width, seed=1)
    got = backend.linear(x, backend.tie_linear(table))
    np.testing.assert_allclose(got, wide(x) @ wide(matrix).T, atol=2e-5)
