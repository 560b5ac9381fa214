"""Compare attention with sinks (gpt-oss) or soft caps (Gemma 2) with the NumPy operator.

Every kernel of attention has both.

test_kernels.py says which modes there are.
"""

from __future__ import annotations

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import (
    DEVICE_MODES,
    SPLIT_TOKENS,
    Shape,
    attend,
    make_backend,
    make_batch,
    make_cache,
    mode,
    normal,
    some,
    wide,
)

from mie.ops_gpu.arrays import DTYPES
from mie.ops_gpu.chip import Chip

__all__ = ["mode"]
pytestmark = needs_compiler

SHAPES = [
    Shape("float16", 64, 8, 1, 16),
    Shape("bfloat16", 128, 9, 1, 32, 18, "int8"),
    Shape("float32", 24, 3, 2, 5),
    Shape("float16", 80, 2, 2, 8, 40, "fp8"),
    Shape("bfloat16", 64, 7, 2, 16, 128),
    Shape("float32", 64, 4, 1, 16, None, "int8"),
]
MANY_BLOCKS = Chip(num_multiprocessors=16, shared_bytes=228 << 10)


def sinks_of(shape: Shape) -> np.ndarray:
    """Return scores around those of the keys. The first head's outweighs all keys."""
    sinks = 3 * normal(shape.dtype, shape.group * shape.num_kv_heads, seed=3)
    sinks[0] = 40
    return sinks.astype(DTYPES[shape.dtype])


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("shape", some(SHAPES, 2))
def test_decodes(mode: str, shape: Shape, is_deterministic: bool):
    """Some sequences are one split, and others several, which are merged."""
    lengths = [1, 17, 65, 2 * SPLIT_TOKENS + 69]
    sequences = [(1, length) for length in lengths]
    attend(mode, shape, sequences, is_deterministic, sinks=sinks_of(shape))


@pytest.mark.parametrize("shape", some(SHAPES, 2))
def test_prompts(mode: str, shape: Shape):
    sequences = [(6, 6), (3, 140), (17, 33), (33, 65)]
    attend(mode, shape, sequences, sinks=sinks_of(shape))


@pytest.mark.parametrize("shape", some([SHAPES[0], SHAPES[4]]))
def test_a_chunk_whose_keys_blocks_share(mode: str, shape: Shape):
    attend(mode, shape, [(2, 900)], chip=MANY_BLOCKS, sinks=sinks_of(shape))


@pytest.mark.parametrize("mode", ["forward", *DEVICE_MODES])
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_sinks(mode: str, dtype: str, is_deterministic: bool):
    """A sink of infinity takes all. One of -infinity takes nothing, as if there were none."""
    shape = Shape(dtype, 64, 2, 1, 16)
    batch, num_blocks = make_batch([(1, 40), (1, 700), (9, 30)], shape.block_size)
    cache, _ = make_cache(shape, batch, num_blocks)
    q = normal(dtype, 11, 2, 64)
    backend = make_backend(mode, dtype, is_deterministic)
    sinks = np.array([np.inf, -np.inf], DTYPES[dtype])
    got = wide(backend.paged_attention(q, cache, 0, batch, None, sinks=sinks))
    without = wide(backend.paged_attention(q, cache, 0, batch, None))
    assert not got[:, 0].any()
    assert got[:, 1].tobytes() == without[:, 1].tobytes()


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("shape", some(SHAPES[2:] + SHAPES[:2], 6))
def test_soft_caps(mode: str, shape: Shape, is_deterministic: bool):
    """Scores are spread, so that the cap bounds some and leaves others nearly as they are."""
    sequences = [(1, 1), (1, 65), (1, 2 * SPLIT_TOKENS + 69), (3, 140), (17, 33)]
    attend(mode, shape, sequences, is_deterministic, query_scale=3.0, soft_cap=2.0)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]])
def test_soft_caps_where_blocks_share_keys(mode: str, shape: Shape):
    attend(mode, shape, [(2, 900)], chip=MANY_BLOCKS, query_scale=3.0, soft_cap=2.0)
