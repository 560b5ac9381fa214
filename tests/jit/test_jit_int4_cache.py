"""Compare the compiled cache of 4-bit codes with its definition, bit for bit where it rounds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from compiled import heads_of, jit_backend, needs_numba, set_heads
from numpy.typing import NDArray
from step_batches import step_batch
from test_jit_operators import MIXED, hard_vectors, normal, same_bits, shape_of

from mie.ops import attention
from mie.ops.backend import StepBatch
from mie.ops.kv_cache import INT4, head_bytes
from mie.ops.weights.int4_cache import Int4Cache, dequantize, quantize

if TYPE_CHECKING:
    from mie.ops_jit.memory import JitCache

pytestmark = needs_numba

CASES = [(2, 16), (6, 3), (16, 32), (20, 16), (32, 8), (64, 16), (80, 24), (80, 48), (128, 1)]
CASES += [(256, 16)]
"""Sizes of heads and of blocks."""


def batch_of(sequences: list[tuple[int, int]], block_size: int) -> StepBatch:
    num_blocks = sum(-(-length // block_size) for _, length in sequences) + 2
    return step_batch(sequences, block_size, num_blocks, 1)


def new_cache(batch: StepBatch, block_size: int, num_kv_heads: int, head_dim: int) -> JitCache:
    from mie.ops_jit.memory import JitCache

    return JitCache.new(shape_of(batch, block_size, num_kv_heads, head_dim), INT4)


def padded(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def content_of(cache: JitCache) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Return the codes [L, 2, N, B, Hkv, padded Dh] and the factors [L, 2, N, B, Hkv, 2, G]."""
    size, dim = cache.shape.block_size, padded(cache.shape.head_dim)
    codes = heads_of(cache, cache.elements)  # L, 2, Hkv, N, bytes
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1)
    outer = codes.shape[:-1]
    rows = nibbles.reshape(*outer, size, dim // 16, 8, 2).swapaxes(-1, -2)
    both = rows.reshape(*outer, size, dim).copy()
    if size % 16 == 0:  # a word of 8 channels of each position
        panels = nibbles.reshape(*outer, size // 16, dim // 8, 16, 8)
        keys = np.moveaxis(panels, -3, -2)  # positions first
        both[:, 0] = keys.reshape(*outer, size, dim)[:, 0]
    factors = heads_of(cache, cache.scales).reshape(*outer, 2, -1, size)
    return np.moveaxis(both, 2, 4), np.moveaxis(np.moveaxis(factors, -1, -3), 2, 4)


def fill(cache: JitCache, content: Int4Cache) -> None:
    """Overwrite all codes and factors. The order is the inverse of `content_of`'s."""
    size, head_dim = cache.shape.block_size, cache.shape.head_dim
    dim = padded(head_dim)
    codes = np.stack([content.codes & 15, content.codes >> 4], axis=-1).reshape(content.shape)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, dim - head_dim)])
    codes = np.moveaxis(codes, 4, 2)  # L, 2, Hkv, N, B, Dh
    outer = codes.shape[:-2]
    rows = codes.reshape(*outer, size, dim // 16, 2, 8)
    both = (rows[..., 0, :] | rows[..., 1, :] << 4).reshape(*outer, -1)
    if size % 16 == 0:
        words = np.moveaxis(codes.reshape(*outer, size // 16, 16, dim // 8, 4, 2), -4, -3)
        both[:, 0] = (words[..., 0] | words[..., 1] << 4).reshape(*outer, -1)[:, 0]
    set_heads(cache.elements, both)
    factors = np.moveaxis(np.moveaxis(content.factors, 4, 2), -3, -1)
    set_heads(cache.scales, factors.reshape(*outer, -1))


@pytest.mark.parametrize(("head_dim", "block_size"), CASES)
def test_keys_and_values_are_rounded_exactly_as_defined(head_dim: int, block_size: int):
    """Codes and factors have the bits of `quantize`, and no other slot changes.

    The query heads have the same vectors as the key heads. So the rotated queries are the keys
    before they are rounded.
    """
    backend, num_heads = jit_backend(), 3
    inv_freq = 1 / 100.0 ** np.linspace(0, 1, head_dim // 2)
    table = backend.load_rope(inv_freq, 1.25, 40)
    batch = batch_of([(1, 7), (30, 30), (3, 36), (1, 1), (17, 29)], block_size)
    cache = new_cache(batch, block_size, num_heads, head_dim)
    shape = (2, 2, cache.shape.num_blocks, block_size, num_heads, head_dim)
    old = quantize(normal(*shape))
    fill(cache, old)
    num_tokens = len(batch.positions)
    vectors = hard_vectors(2 * num_tokens * num_heads, head_dim, block_size)
    keys, values = vectors.reshape(2, num_tokens, num_heads, head_dim)
    qkv = np.concatenate([keys, keys, values], axis=1)
    rotated = backend.rope_write_kv(qkv.copy(), table, cache, 1, batch)
    blocks, offsets = np.divmod(batch.slot_mapping, block_size)
    for plane, vectors in enumerate((rotated, values)):
        new = quantize(vectors)
        old.codes[1, plane, blocks, offsets] = new.codes
        old.factors[1, plane, blocks, offsets] = new.factors
    codes, factors = content_of(cache)
    wanted = np.stack([old.codes & 15, old.codes >> 4], axis=-1).reshape(old.shape)
    np.testing.assert_array_equal(codes[..., :head_dim], wanted)
    assert not codes[..., head_dim:].any()
    assert same_bits(factors, old.factors)
    assert np.isnan(factors).any(), "some vectors have no scale"


@pytest.mark.parametrize(("head_dim", "block_size"), CASES)
def test_attention_sees_the_numbers_of_the_definition(head_dim: int, block_size: int):
    """Slots of nobody are NaN. Decodes of long contexts are merged from parts."""
    for window, group in ((None, 3), (33, 2)):
        sequences = [*MIXED, (1, 1100), (3, 530)] if head_dim in (64, 80) else MIXED
        batch = batch_of(sequences, block_size)
        cache = new_cache(batch, block_size, 2, head_dim)
        num_blocks = cache.shape.num_blocks
        content = quantize(normal(2, 2, num_blocks, block_size, 2, head_dim))
        numbers = dequantize(content, np.float64)
        used = np.zeros((num_blocks, block_size), bool)
        for table, length in zip(batch.block_tables, batch.seq_lens.tolist(), strict=True):
            each = np.arange(length)
            used[table[each // block_size], each % block_size] = True
        content.factors[:, :, ~used] = np.nan
        fill(cache, content)
        q = normal(len(batch.positions), 2 * group, head_dim, seed=2)
        got = jit_backend().paged_attention(q.copy(), cache, 1, batch, window)
        wanted = attention.paged_attention(
            q.astype(np.float64), numbers[1, 0], numbers[1, 1], batch.block_tables,
            batch.cu_seqlens_q, batch.seq_lens, head_dim**-0.5, window,
        )  # fmt: skip
        np.testing.assert_allclose(got, wanted, rtol=0, atol=5e-6)


@pytest.mark.slow
def test_a_chunk_attends_like_decodes_bit_for_bit():
    """The parts of a long decode are merged like the parts of a chunk."""
    block_size, head_dim, length = 16, 64, 1100
    whole = batch_of([(length, length)], block_size)
    cache = new_cache(whole, block_size, 1, head_dim)
    fill(cache, quantize(normal(2, 2, cache.shape.num_blocks, block_size, 1, head_dim)))
    q, backend = normal(length, 2, head_dim, seed=2), jit_backend()
    wanted = backend.paged_attention(q.copy(), cache, 0, whole, None)
    for last in (511, 512, 513, 1024, 1025, 1100):
        one = replace(
            whole,
            positions=np.array([last - 1]),
            token_ids=np.array([0]),
            slot_mapping=whole.slot_mapping[last - 1 : last],
            cu_seqlens_q=np.array([0, 1]),
            seq_lens=np.array([last]),
        )
        got = backend.paged_attention(q[last - 1 : last].copy(), cache, 0, one, None)
        assert same_bits(got[0], wanted[last - 1]), last


def test_a_nan_reaches_its_own_sequence_only():
    block_size, head_dim, lengths = 16, 64, [40, 600, 17]
    batch = batch_of([(1, length) for length in lengths], block_size)
    for plane, number in itertools.product((0, 1), (np.nan, np.inf, -np.inf)):
        cache = new_cache(batch, block_size, 2, head_dim)
        content = normal(2, 2, cache.shape.num_blocks, block_size, 2, head_dim)
        block, offset = batch.block_tables[1, 20], 5
        content[0, plane, block, offset, 1, 40] = number
        fill(cache, quantize(content))
        q = normal(3, 4, head_dim)
        got = np.isnan(jit_backend().paged_attention(q, cache, 0, batch, None))
        wanted = np.zeros_like(got)
        wanted[1, 2:, 32 * plane :] = True  # the second group of channels, if it is a value
        np.testing.assert_array_equal(got, wanted)


def test_a_block_that_was_exported_and_imported_has_its_bytes():
    """Files of a disk cache keep codes and factors, and another block stays as it is."""
    backend, shape = jit_backend(), (2, 2, 20, 16, 2, 64)
    batch = batch_of([(1, 16 * 18)], 16)
    source, target = (new_cache(batch, 16, 2, 64) for _ in range(2))
    fill(source, quantize(normal(*shape)))
    (data,) = backend.export_blocks(source, [17])
    assert len(data) == 2 * 2 * 16 * 2 * head_bytes(INT4, 64)
    backend.import_block(target, 3, data)
    backend.move_blocks(target, target, [3], [19])
    for got, wanted in zip(content_of(target), content_of(source), strict=True):
        assert same_bits(got[:, :, 3], wanted[:, :, 17])
        assert same_bits(got[:, :, 19], wanted[:, :, 17])
        got[:, :, [3, 19]] = 0
        assert not got.any()
