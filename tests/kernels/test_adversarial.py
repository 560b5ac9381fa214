"""Run 500 random calls of attention and 500 of products, chosen to break them, against float64.

Attention gets prompts, chunks and decodes together, with numbers that make every maximum and every
unit of a quantised cache move late or often. Blocks share the keys of some prompts. Products get
quantised matrices whose sizes are around the ends of tiles, groups and slices, and rows that differ
by many powers of two or are not finite.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from emulated import needs_compiler
from test_few_rows import Attention, garbage, norm_of, normed
from test_kernels import (
    ERRORS,
    Shape,
    launcher_of,
    make_backend,
    make_batch,
    make_cache,
    normal,
    numbers_of_int4,
    operators_attention,
    wide,
)
from test_prefill import with_stale_entries
from test_prefill_splits import splits
from test_quantised_products import FORMS, matrix_of, rows_of, weights

from mie.ops import activation
from mie.ops.weights.quantised import dequantise
from mie.ops_gpu.attention import SPLIT_TOKENS
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.dispatch import LARGE_GROUP, LARGE_HEAD, MMA_STAGES
from mie.ops_gpu.few_rows import FewRows
from mie.ops_gpu.kv_cache import KVCache

pytestmark = needs_compiler

CALLS, SEEDS = 20, 25
PLAIN = (
    ("float32", 8, 2, "auto"),
    ("float32", 64, 7, "auto"),
    ("float32", 256, 1, "auto"),
    ("float16", 72, 16, "auto"),
    ("bfloat16", 40, 3, "auto"),
    ("float32", 8, 3, "int8"),
    ("float32", 64, 1, "fp8"),
    ("float16", 72, 2, "fp8"),
)
"""Shapes of the plain kernels: dtype, head_dim, group, cache. Each is a build."""

PLAIN_INT4 = (
    ("float32", 8, 3, "int4"),
    ("float32", 64, 7, "int4"),
    ("float32", 80, 1, "int4"),
    ("float16", 64, 4, "int4"),
    ("float16", 96, 2, "int4"),
    ("bfloat16", 128, 4, "int4"),
)
"""Shapes with a cache of four bits. It has plain kernels alone."""

MODES = ("forward", "reverse", "random", "checked")
Sequences = list[tuple[int, int]]
"""Number of queries and length of each sequence."""


def choose(rng: np.random.Generator, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def draw_shape(rng: np.random.Generator, plain: Sequence[Any]) -> Shape:
    """Return a shape of the kernels for tensor cores, or in a quarter of the calls a plain one.

    With shapes of four bits, all are plain.
    """
    window = choose(rng, None, None, 1, 15, 16, 17, 64, int(rng.integers(1, 600)))
    dtype, head_dim, group, stored = choose(rng, *plain)
    block_size = int(choose(rng, 1, 3, 16, rng.integers(1, 129)))
    if stored != "int4" and rng.random() < 0.75:
        dtype, head_dim = choose(rng, "float16", "bfloat16"), choose(rng, *MMA_STAGES)
        group = int(rng.integers(1, LARGE_GROUP + 1 if head_dim == LARGE_HEAD else 17))
        stored = choose(rng, "auto", "int8", "fp8")
        block_size = 16 * int(rng.integers(1, 9))
    return Shape(dtype, head_dim, group, int(rng.integers(1, 4)), block_size, window, stored)


def draw_sequences(rng: np.random.Generator) -> Sequences:
    """Return lengths around the ends of tiles and splits, with a long one among short ones."""
    sequences = []
    for _ in range(rng.integers(1, 7)):
        edge = int(choose(rng, 16, 64, 128, SPLIT_TOKENS, 2 * SPLIT_TOKENS)) + int(
            rng.integers(-1, 2)
        )
        length = int(choose(rng, 1, 2, edge, edge, rng.integers(1, 200)))
        num_queries = 1 if rng.random() < 0.75 else min(length, int(rng.integers(2, 40)))
        sequences.append((num_queries, length))
    if rng.random() < 0.3:
        sequences[0] = (1, int(rng.integers(1000, 1400)))
    return sequences


def make_hostile(rng: np.random.Generator, cache: KVCache, planes: np.ndarray, shape: Shape) -> int:
    """Change the numbers of the cache and of ``planes`` alike. Return which way was chosen.

    Only factors that are powers of two are used, because they are exact in every dtype.
    """
    kind = int(rng.integers(5))
    num_blocks, size = planes.shape[1:3]
    order = np.arange(num_blocks * size).reshape(num_blocks, size)
    if kind == 0:
        return kind
    exponents = {
        1: order % 7 - 3,  # from token to token
        2: -(order // size) % 6,  # from block to block
        3: np.where(order % 97 == 5, 5, -2),  # a few tokens outweigh all others
        4: np.full_like(order, -6),  # everything is tiny
    }[kind]
    factor = 2.0**exponents  # [N, B]
    planes *= factor[..., None, None]
    layout = factor[:, None, None, :]  # [N, 1, 1, B]
    if shape.stored == "int4":
        factors = cache.scales[0].view(np.float16).reshape(*cache.scales[0].shape, 2)
        factors *= layout[..., None, None].astype(np.float16)  # small ones are rounded
        planes[...] = numbers_of_int4(cache)
    elif shape.stored == "auto":
        layer = cache.layers[0]
        layer[...] = (wide(layer) * layout[..., None]).astype(layer.dtype)
    else:
        cache.scales[0][...] *= layout.astype(np.float32)
    return kind


def attend(rng: np.random.Generator, mode: str, plain: Sequence[Any] = PLAIN) -> str:
    """Compare each row of an attention with the operator. Return a description of it."""
    shape, sequences = draw_shape(rng, plain), draw_sequences(rng)
    is_deterministic = bool(rng.random() < 0.5)
    chip = Chip(num_multiprocessors=int(choose(rng, 1, 2, 8, 132)), shared_bytes=227 << 10)
    query_scale = float(choose(rng, 0.125, 1.0, 1.0, 8.0, 64.0))
    batch, num_blocks = make_batch(sequences, shape.block_size)
    cache, planes = make_cache(shape, batch, num_blocks)
    kind = make_hostile(rng, cache, planes, shape)
    called = f"{shape}, {sequences}, {is_deterministic}, {chip}, {query_scale}, numbers {kind}"
    num_tokens, num_heads = int(batch.cu_seqlens_q[-1]), shape.group * shape.num_kv_heads
    q = normal(shape.dtype, num_tokens, num_heads, shape.head_dim, seed=8)
    q = (q * query_scale).astype(q.dtype)
    backend = make_backend(mode, shape.dtype, is_deterministic, chip, shape.stored)
    stale_batch, stale_cache = with_stale_entries(batch, cache, shape.window)
    got = wide(backend.paged_attention(q, stale_cache, 0, stale_batch, shape.window))
    keys, values = planes
    wanted = operators_attention(q, planes, batch, shape)
    # Values of both signs may cancel, so the error is relative to their magnitudes.
    sizes = operators_attention(q, (keys, np.abs(values)), batch, shape)
    error = np.linalg.norm(got - wanted, axis=-1) / np.linalg.norm(sizes, axis=-1)
    # The rounding of a score, which is a sum in float32, becomes a relative error of its weight.
    norms = np.linalg.norm(wide(q), axis=-1).max(), np.linalg.norm(keys, axis=-1)
    largest_score = norms[0] * np.nanmax(norms[1]) * shape.head_dim**-0.5
    allowed = 2 * ERRORS[shape.dtype] + 2.0**-23 * largest_score
    assert (error < allowed).all(), f"{called}: worst {error.max()} of {allowed}"
    return called


PRODUCTS = (
    # dtype, form, whether rows are whole vectors
    ("float16", 0, True),
    ("float16", 1, False),
    ("float16", 6, True),
    ("bfloat16", 0, True),
    ("bfloat16", 4, False),
    ("float16", 7, True),
    ("bfloat16", 3, True),
    ("float32", 5, False),
)
"""Kinds of quantised matrices. Each is several builds."""


def gated_sizes(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Return the magnitudes in a gated product, to which an error is relative."""
    gate, up = np.split(x @ weight.T, 2, axis=1)
    largest_gate, largest_up = np.split(np.abs(x) @ np.abs(weight).T, 2, axis=1)
    return 1.1 * largest_gate * np.abs(up) + np.abs(activation.silu(gate)) * largest_up


def multiply(rng: np.random.Generator, mode: str) -> str:
    """Compare each row of a product with a quantised matrix with float64. Return a description."""
    dtype, number, is_vector = choose(rng, *PRODUCTS)
    form, kind = FORMS[number], choose(rng, "linear", "linear", "linear", "gated", "heads")
    depth = int(choose(rng, 16, 64, 128, 512, 1024, rng.integers(1, 1300))) + int(
        rng.integers(-1, 2)
    )
    depth = max(8, depth // 8 * 8) if is_vector else max(1, depth | 1)
    width = int(choose(rng, 16, 32, 64, 160, rng.integers(1, 300))) + int(rng.integers(-1, 2))
    num_rows = int(choose(rng, 1, 1, 2, 8, 9, 16, 17, rng.integers(1, 70)))
    head_dim = int(choose(rng, 32, 64, 96))
    if kind == "gated":  # its halves begin with a tile
        width = max(16, width // 16 * 16)
    if kind == "heads":  # there are 40 slots
        num_rows = min(num_rows, 40)
    seed, hostile = int(rng.integers(1 << 30)), int(rng.integers(5))
    chip = Chip(
        num_multiprocessors=int(choose(rng, 1, 2, 8, 132)),
        shared_bytes=int(choose(rng, 0, 99 << 10, 227 << 10)),
    )
    called = f"{kind} {dtype} {form} {(depth, width, num_rows, head_dim)} {chip} {hostile} {seed}"
    widths = {"linear": width, "gated": 2 * width, "heads": 7 * head_dim}
    rows = rows_of(form, widths[kind], depth, seed)
    if hostile == 1:  # groups without a weight
        rows.scales[rng.random(rows.scales.shape) < 0.5] = 0
    if hostile == 2:  # only the ends of the range
        ends = rows.codes.astype(np.float32).min(), rows.codes.astype(np.float32).max()
        rows.codes[...] = np.where(rng.random(rows.shape) < 0.5, *ends).astype(rows.codes.dtype)
    matrix, x = matrix_of(rows), normal(dtype, num_rows, depth, seed=seed % 1000)
    if hostile == 3:  # rows of all magnitudes
        powers = rng.integers(-12, 5, (num_rows, 1)) * (5 if dtype == "bfloat16" else 1)
        x = (wide(x) * 2.0**powers).astype(x.dtype)
    spoilt = num_rows if hostile != 4 else int(rng.integers(num_rows))
    x[spoilt : spoilt + 1] = choose(rng, np.nan, np.inf)
    some, by = FewRows(launcher_of(mode), chip), norm_of(dtype, depth)
    is_added, has_norm = bool(rng.random() < 0.3), bool(rng.random() < 0.5)
    with np.errstate(all="ignore"):
        if kind == "heads":
            attention = Attention(dtype, head_dim, num_rows, depth)
            attention.x, attention.weight, attention.matrix = x, dequantise(rows), matrix
            gots = attention.compute(mode)[:1]  # the cache's slots have no order of rows
            wanteds = attention.wanted()[:1]
            sizes = [np.abs(normed(x, by)) @ np.abs(weights(rows)).T + np.abs(wide(attention.bias))]
        elif kind == "gated":
            out = garbage(mode, dtype, num_rows, width)
            some.gated(x, matrix, out, norm=by)
            gots, wanteds = [out], [activation.silu_mul(normed(x, by) @ weights(rows).T)]
            sizes = [gated_sizes(normed(x, by), weights(rows))]
        else:
            before = normal(dtype, num_rows, width, seed=3)
            out = before.copy() if is_added else garbage(mode, dtype, num_rows, width)
            some.linear(x, matrix, out, norm=by if has_norm else None, is_added=is_added)
            inputs = normed(x, by) if has_norm else wide(x)
            base = wide(before) if is_added else np.zeros_like(wide(before))
            gots, wanteds = [out], [inputs @ weights(rows).T + base]
            sizes = [np.abs(inputs) @ np.abs(weights(rows)).T + np.abs(base)]
    others = np.arange(num_rows) != spoilt
    for got, wanted, size in zip(gots, wanteds, sizes, strict=True):
        got, wanted = (wide(each).reshape(num_rows, -1) for each in (got, wanted))
        error = np.linalg.norm(got[others] - wanted[others], axis=-1)
        assert (error <= 2 * ERRORS[dtype] * np.linalg.norm(size[others], axis=-1)).all(), called
        if spoilt < num_rows and kind == "linear":
            assert not np.isfinite(got[spoilt]).all(), called
    return called


def run_calls(
    seed: int, count: int, modes: tuple[str, ...] = MODES, call: Callable[..., str] = attend
) -> list[str]:
    """Make ``count`` calls of one seed and describe them."""
    rng, called = np.random.default_rng([seed, 77]), []
    for number in range(count):
        mode, shared = choose(rng, *modes), rng.random() < 0.3
        how = splits(int(rng.integers(2, 7)), int(rng.integers(1, 3))) if shared else nullcontext()
        try:
            with how:
                called.append(call(rng, mode))
        except Exception as error:
            raise AssertionError(f"seed {seed}, call {number}, {mode}") from error
    return called


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 1), *(pytest.param(seed, CALLS, marks=pytest.mark.slow) for seed in range(SEEDS))],
)
@pytest.mark.parametrize("call", [attend, multiply])
def test_random_calls_agree_with_float64(seed: int, count: int, call: Callable[..., str]):
    assert len(run_calls(seed, count, call=call)) == count


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_calls_over_four_bits_agree_with_float64(seed: int):
    call = partial(attend, plain=PLAIN_INT4)
    assert len(run_calls(seed, CALLS, call=call)) == CALLS
