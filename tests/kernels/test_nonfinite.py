"""Check that attention hides no NaN: queries, keys and values that are NaN or infinite.

Where NumPy's result is NaN, so is the kernel's. Where it is infinite, the kernel's is not finite.
All other numbers agree. There is one exception: a warp whose first scores are all -infinity gives
NaN, while NumPy gives these tokens the weight 0.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import (
    DEVICE_MODES,
    ERRORS,
    SPLIT_TOKENS,
    Shape,
    in_turn,
    make_backend,
    make_batch,
    make_cache,
    normal,
    operators_attention,
    some,
    wide,
)
from test_prefill_splits import splits

from mie.ops_gpu.chip import Chip

pytestmark = [needs_compiler, pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES])]

PLAIN = Shape("float32", 8, 2, 3, 4)
PLAIN_INT8 = Shape("float32", 8, 3, 2, 5, None, "int8")
FLOAT16, BFLOAT16, INT8 = (
    Shape(dtype, 64, 3, 2, 16, None, stored)
    for dtype, stored in [("float16", "auto"), ("bfloat16", "auto"), ("float16", "int8")]
)
BFLOAT16_FP8 = Shape("bfloat16", 64, 3, 1, 16, None, "fp8")
SHAPES = [PLAIN, PLAIN_INT8, FLOAT16, BFLOAT16, INT8, BFLOAT16_FP8]

FEW_BLOCKS = Chip(num_multiprocessors=3, shared_bytes=0)
LONG = SPLIT_TOKENS + 69
LENGTHS = [17, LONG, 40]
"""A warp has only one token of the first sequence. The second is cut into parts. The third stays
finite."""

Damage = tuple[str, int, slice, float]
"""The changed array, the sequence, the tokens, and their new number."""


def damages(shape: Shape) -> Iterator[Damage]:
    is_quantized = shape.stored != "auto"
    for sequence in (0, 1):
        last = slice(LENGTHS[sequence] - 1, LENGTHS[sequence])
        numbers = (np.nan, np.inf, -np.inf)
        yield from (("query", sequence, slice(0), number) for number in numbers)
        for tokens in (slice(3, 4), slice(0, min(64, LENGTHS[sequence] - 3)), last):
            for what in ("keys", "values"):
                # A quantised cache represents infinity as NaN.
                for number in numbers[:1] if is_quantized else numbers:
                    yield what, sequence, tokens, number
        if not is_quantized:
            yield "keys", sequence, slice(0, LENGTHS[sequence]), -np.inf  # no weight is above 0


def compare(mode: str, shape: Shape, num_queries: int, is_deterministic: bool) -> None:
    sequences = [(num_queries, length + num_queries - 1) for length in LENGTHS]
    batch, num_blocks = make_batch(sequences, shape.block_size)
    cache, planes = make_cache(shape, batch, num_blocks)
    num_heads = shape.group * shape.num_kv_heads
    q = normal(shape.dtype, 3 * num_queries, num_heads, shape.head_dim, seed=8)
    q[..., 5] = np.where(np.arange(num_heads) % 2, 1, -1)
    backend = make_backend(mode, shape.dtype, is_deterministic, FEW_BLOCKS, shape.stored)
    changed = [q, planes, cache.layers[0], *(cache.scales or [])]
    before = [array.copy() for array in changed]
    for damage in damages(shape):
        what, sequence, tokens, number = damage
        for array, old in zip(changed, before, strict=True):
            array[...] = old
        if what == "query":
            q[sequence * num_queries, 1, 5] = number
            q[sequence * num_queries, 2] = number
        for token in range(tokens.start or 0, tokens.stop):
            block = batch.block_tables[sequence, token // shape.block_size]
            offset, plane = token % shape.block_size, int(what == "values")
            if cache.scales:
                cache.scales[0][block, plane, :, offset] = np.nan
                planes[plane, block, offset] = np.nan
            else:
                cache.layers[0][block, plane, :, offset, 5] = number
                planes[plane, block, offset, :, 5] = number
        got = wide(backend.paged_attention(q, cache, 0, batch, None))
        with np.errstate(invalid="ignore"):
            wanted = operators_attention(q, planes, batch, shape)
        is_finite = np.isfinite(wanted)
        assert is_finite[-num_queries:].all()
        assert np.isnan(got[np.isnan(wanted)]).all(), damage
        assert not np.isfinite(got[~is_finite]).any(), damage
        if what == "keys" and np.isinf(number):
            rows = slice(sequence * num_queries, (sequence + 1) * num_queries)
            is_finite[rows] &= np.isfinite(got[rows])
        assert np.isfinite(got[is_finite]).all(), damage
        got, wanted = (np.where(is_finite, x, 0) for x in (got, wanted))
        error = np.linalg.norm(got - wanted, axis=-1)
        assert (error <= 2 * ERRORS[shape.dtype] * np.linalg.norm(wanted, axis=-1)).all(), damage


@pytest.mark.parametrize(("shape", "is_deterministic"), in_turn(SHAPES, step=3))
def test_decode_hides_no_nan(mode: str, shape: Shape, is_deterministic: bool):
    compare(mode, shape, 1, is_deterministic)


@pytest.mark.parametrize("shape", some([PLAIN, PLAIN_INT8, INT8, BFLOAT16_FP8, FLOAT16, BFLOAT16]))
def test_prefill_hides_no_nan(mode: str, shape: Shape):
    compare(mode, shape, 3, is_deterministic=False)


@pytest.mark.parametrize("shape", some([FLOAT16, BFLOAT16, INT8]))
def test_split_prefill_hides_no_nan(mode: str, shape: Shape):
    """The second sequence has a split for every tile of 64 keys, the first and last have one."""
    with splits(6, 1):
        compare(mode, shape, 3, is_deterministic=False)
