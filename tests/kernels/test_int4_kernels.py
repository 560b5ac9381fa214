"""Compare the cache of 4-bit codes of the CUDA kernels with its definition, bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
from emulated import needs_compiler
from test_kernels import DEVICE_MODES, Shape, attend, cache_shape, content_of_int4, make_backend

from mie.ops.weights.int4_cache import quantize
from mie.ops_gpu.attention import SPLIT_TOKENS

pytestmark = needs_compiler

FACES = (np.nan, np.inf, -np.inf, 65504.0, 3e38, 1e-30, -0.0)


def hard_vectors(num: int, head_dim: int) -> np.ndarray:
    """Return float32 vectors with ties, constants, and tiny, huge and non-finite numbers."""
    rng = np.random.default_rng(head_dim)
    vectors = rng.normal(size=(num, head_dim)).astype(np.float32)
    for i, vector in enumerate(vectors):
        kind, at = i % 8, rng.integers(head_dim)
        if kind == 1:
            vector[at] = rng.choice(FACES)
        elif kind == 2:
            vector *= np.float32(2.0 ** rng.integers(-60, 30))
        elif kind == 3:  # rotated: one number, and so a scale of 0
            vector[:] = 0
            vector[at // 32 * 32] = rng.choice([8.0, -3.0])
        elif kind == 4:  # the scale is a power of two, so quotients are ties
            vector[:] = rng.integers(0, 31, head_dim) / 2
            vector[:2] = 0, 15
        elif kind == 5:  # a scale that float16 rounds, and subnormal ones
            vector *= np.float32(2.0**-17)
        elif kind == 6:  # offsets far larger than the scale
            vector[:] = 3e4 + vector
    return vectors


@pytest.mark.parametrize("mode", ["forward", "checked", *DEVICE_MODES])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        ("float32", 80),
        *(pytest.param("float32", size, marks=pytest.mark.slow) for size in (8, 32, 64, 256)),
        *(pytest.param(dtype, 64, marks=pytest.mark.slow) for dtype in ("float16", "bfloat16")),
    ],
)
def test_keys_and_values_are_rounded_exactly_as_defined(mode: str, dtype: str, head_dim: int):
    """The query heads have the vectors of the key heads. In float32 the rotated queries are the
    keys before they are rounded.
    """
    num_tokens, num_heads, size = 24, 5, 2  # a warp takes a key head and a value head
    backend = make_backend(mode, dtype, stored="int4")
    cache = backend.new_kv_cache(cache_shape(17, size, num_heads, head_dim))
    inv_freq = 1 / 100.0 ** np.linspace(0, 1, head_dim // 2)
    table = backend.load_rope(inv_freq, 1.25, 40)
    with np.errstate(over="ignore"):
        vectors = hard_vectors(2 * num_tokens * num_heads, head_dim).astype(backend.dtype)
    keys, values = vectors.reshape(2, num_tokens, num_heads, head_dim)
    rng = np.random.default_rng(1)
    slots = rng.permutation(17 * size)[:num_tokens].astype(np.int32)
    slots[::7] = -1
    positions = rng.integers(0, 40, num_tokens).astype(np.int32)
    batch = SimpleNamespace(positions=positions, slot_mapping=slots)
    queries = backend.rope_write_kv(np.concatenate([keys, keys, values], 1), table, cache, 0, batch)

    kept = slots >= 0
    blocks, offsets = np.divmod(slots[kept], size)
    content = content_of_int4(cache)
    untouched = np.ones((17, 2, num_heads, size), bool)
    untouched[blocks, :, :, offsets] = False
    assert not content.codes[untouched].any()
    assert not cache.scales[0][untouched].view(np.uint32).any()
    written = [values] if dtype != "float32" else [values, queries]
    for plane, vectors in zip((1, 0), written, strict=False):
        wanted = quantize(vectors[kept].astype(np.float32))
        got = content.codes[blocks, plane, :, offsets], content.factors[blocks, plane, :, offsets]
        np.testing.assert_array_equal(got[0], wanted.codes)
        assert got[1].tobytes() == wanted.factors.tobytes()
        assert np.isnan(wanted.factors).any()
        assert (wanted.factors[..., 0, :] == 0).any()


@pytest.mark.parametrize("mode", ["forward", "checked", *DEVICE_MODES])
def test_decodes_and_prompts_read_four_bits(mode: str):
    """The head has two whole groups and half of one. A decode is merged from splits."""
    shape = Shape("float32", 80, 3, 2, 5, None, "int4")
    attend(mode, shape, [(1, SPLIT_TOKENS + 9), (17, 33), (1, 1)], is_deterministic=True)
