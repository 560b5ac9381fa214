"""The operators between the products: equal to the plain ones bit for bit."""

import numpy as np
import pytest
from step_batches import partial_batch

from mie.ops import activation, rope
from mie.ops.backend import KVCacheShape
from mie.ops_cpu import elementwise
from mie.ops_cpu.elementwise import Rotation
from mie.ops_cpu.kv_cache import new_cache
from mie.ops_cpu.workers import Workers

rng = np.random.default_rng(5)


def batch_at(positions, slots):
    return partial_batch(positions=np.array(positions), slot_mapping=np.array(slots))


def assert_same_bits(got, expected):
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert got.tobytes() == expected.tobytes()


@pytest.fixture(params=["alone", "shared"])
def sharing(request, monkeypatch):
    """Threads share the least work, in pieces of some rows; or the most is done by one."""
    most = 0 if request.param == "shared" else 1 << 40
    monkeypatch.setattr(elementwise, "ROPE_WORTH_SHARING", most)
    monkeypatch.setattr(elementwise, "SILU_WORTH_SHARING", most)
    monkeypatch.setattr(elementwise, "PIECE_BYTES", 1 << 12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("table_bytes", [0, 1 << 20])
def test_rotation_equals_rope_and_writes_to_the_slots(dtype, table_bytes, sharing, monkeypatch):
    """Two layers and three steps: nothing is kept from one to the other that should not be."""
    monkeypatch.setattr(elementwise, "TABLE_BYTES", table_bytes)
    shape = KVCacheShape(num_layers=2, num_blocks=30, block_size=3, num_kv_heads=2, head_dim=10)
    cache = new_cache(shape, np.dtype(dtype))
    table = rope.rope_table(10000.0 ** -(np.arange(5) / 5), 1.0, 90, dtype)
    rotation, expected = Rotation(Workers(2)), np.zeros(cache.shape, dtype)
    for num_tokens in (3, 70, 1):
        positions, slots = rng.integers(90, size=num_tokens), rng.permutation(90)[:num_tokens]
        batch = batch_at(positions, slots)
        for layer in (0, 1):
            qkv = rng.normal(size=(num_tokens, 6 + 2 * 2, 10)).astype(dtype)
            qkv[0, ::2] = 0.0  # zeros have signs
            got = rotation.write(qkv.copy(), table, cache, layer, batch)
            rotated = rope.rope(qkv[:, :8], table[positions])
            assert_same_bits(got, rotated[:, :6])
            for token, slot in enumerate(slots):
                place = expected[layer, :, slot // 3, slot % 3]
                place[...] = rotated[token, 6:], qkv[token, 8:]
    assert_same_bits(cache, expected)


def test_silu_equals_the_plain_operator(sharing):
    gate_up = rng.normal(0, 30, (50, 48)).astype("float32")
    got = elementwise.silu_mul(gate_up, Workers(2))
    assert_same_bits(got, activation.silu_mul(gate_up))
