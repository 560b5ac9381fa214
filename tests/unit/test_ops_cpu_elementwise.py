"""The operators between the products: equal to the plain ones bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from mie.ops import activation, rope, sampling
from mie.ops.backend import KVCacheShape, StepBatch
from mie.ops.sampling import RowControls
from mie.ops_cpu import elementwise
from mie.ops_cpu.attention_cache import new_cache
from mie.ops_cpu.elementwise import Rotation
from mie.ops_cpu.workers import Workers

rng = np.random.default_rng(5)


def batch_at(positions, slots):
    empty = np.empty(0, np.int64)
    return StepBatch(
        token_ids=empty,
        positions=np.array(positions),
        slot_mapping=np.array(slots),
        cu_seqlens_q=empty,
        seq_lens=empty,
        block_tables=empty,
        logits_rows=empty,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rotation_equals_rope_and_writes_to_the_slots(dtype):
    """Two layers and two steps: nothing is kept from one to the other that should not be."""
    shape = KVCacheShape(num_layers=2, num_blocks=5, block_size=3, num_kv_heads=2, head_dim=8)
    cache = new_cache(shape, np.dtype(dtype))
    table = rope.rope_table(10000.0 ** -(np.arange(4) / 4), 1.0, 40, dtype)
    rotation, expected = Rotation(), np.zeros(cache.shape, dtype)
    for positions, slots in (([4, 0, 39], [7, 0, 14]), ([5, 1, 2, 3], [8, 1, 2, 3])):
        batch = batch_at(positions, slots)
        for layer in (0, 1):
            qkv = rng.normal(size=(len(slots), 6 + 2 * 2, 8)).astype(dtype)
            qkv.flags.writeable = False
            got = rotation.write(qkv, table, cache, layer, batch)
            rotated = rope.rope(qkv[:, :8], table[positions])
            np.testing.assert_array_equal(got, rotated[:, :6])
            for token, slot in enumerate(slots):
                place = expected[layer, :, slot // 3, slot % 3]
                place[...] = rotated[token, 6:], qkv[token, 8:]
    np.testing.assert_array_equal(cache, expected)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", [(1, 6), (70, 2 * 1000), (3, 2 * 40_000)])
def test_silu_mul(dtype, shape):
    gate_up = rng.normal(0, 50, shape).astype(dtype)  # some so small that exp overflows
    got = elementwise.silu_mul(gate_up, Workers(2))
    np.testing.assert_array_equal(got, activation.silu_mul(gate_up))


@pytest.mark.parametrize("num_tokens", [10, 20_000])
def test_sample(num_tokens):
    logits = rng.normal(size=(9, num_tokens)).astype("float32")
    rows = [
        RowControls(temperature=i % 3, top_p=0.9, uniform=float(rng.random())) for i in range(9)
    ]
    assert elementwise.sample(logits, rows, Workers(2)) == sampling.sample(logits, rows)
    greedy = [RowControls()] * 9
    assert elementwise.sample(logits, greedy, Workers(2)) == sampling.sample(logits, greedy)
