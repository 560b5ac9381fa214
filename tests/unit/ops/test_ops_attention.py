"""Compare attention over the paged cache with float64 loops over queries, heads and keys.

Every cache here is NaN except in the slots of the sequences' own tokens, and every table continues
past its sequence with numbers that are no block ids.
"""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mie.ops import attention
from mie.ops.attention import attend, decode_attention, paged_attention
from mie.ops.kv_cache import INT4, QUANTIZED
from mie.ops.weights import int4_cache, quantised_cache

DTYPES = ("float32", "float64")
HEADS = [(1, 1), (4, 4), (4, 2), (4, 1), (6, 3)]  # Hq, Hkv: groups of 1 to 4.
STALE = (10**9, -(10**9), -1, 12_345, 0)

# float32 rounds scores of a few units to about 1e-6, and a weight's relative error is its score's
# absolute error. Values are of order 1.
ATOL = {"float32": 5e-6, "float64": 1e-13}


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The arguments of `paged_attention` by name."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    cu_seqlens_q: np.ndarray
    seq_lens: np.ndarray
    scale: float


def ragged(
    sequences: list[tuple[int, int]],
    *,
    block_size: int = 3,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    dtype: str = "float64",
    seed: int = 0,
    spread: float = 1.0,
) -> Batch:
    """Return a batch of (number of queries, length) sequences with scattered blocks."""
    rng = np.random.default_rng(seed)
    num_heads, num_kv_heads = heads
    needed = [-(-length // block_size) for _, length in sequences]
    num_blocks = sum(needed) + 2
    block_ids = rng.permutation(num_blocks).tolist()
    cache = np.full((2, num_blocks, block_size, num_kv_heads, head_dim), np.nan)
    tables = rng.choice(STALE, (len(sequences), max(needed, default=0) + 2))
    for row, ((_, length), count) in enumerate(zip(sequences, needed, strict=True)):
        mine = [block_ids.pop() for _ in range(count)]
        tables[row, :count] = mine
        for token in range(length):
            slot = cache[:, mine[token // block_size], token % block_size]
            slot[...] = rng.normal(0, spread, slot.shape)
    counts = [num_queries for num_queries, _ in sequences]
    batch = Batch(
        q=rng.normal(0, spread, (sum(counts), num_heads, head_dim)).astype(dtype),
        k_cache=cache[0].astype(dtype),
        v_cache=cache[1].astype(dtype),
        block_tables=tables,
        cu_seqlens_q=np.array([0, *np.cumsum(counts)], np.int64),
        seq_lens=np.array([length for _, length in sequences], np.int64),
        scale=head_dim**-0.5,
    )
    for array in vars(batch).values():
        if isinstance(array, np.ndarray):
            array.flags.writeable = False
    return batch


def one_query(batch: Batch, row: int, t: int, head: int, window: int | None) -> np.ndarray:
    """Return the attention [Dh] of query t of sequence ``row``."""
    end, length = int(batch.cu_seqlens_q[row + 1]), int(batch.seq_lens[row])
    block_size, num_kv_heads = batch.k_cache.shape[1:3]
    kv_head = head // (batch.q.shape[1] // num_kv_heads)
    position = length - (end - t)
    first = 0 if window is None else max(0, position - window + 1)
    slots = [
        (batch.block_tables[row, key // block_size], key % block_size, kv_head)
        for key in range(first, position + 1)
    ]
    keys = np.array([batch.k_cache[slot] for slot in slots], float)
    values = np.array([batch.v_cache[slot] for slot in slots], float)
    products = batch.scale * (keys * batch.q[t, head].astype(float)).sum(axis=1)
    weights = np.exp(products - products.max())
    return (weights[:, None] * values).sum(axis=0) / weights.sum()


def plain(batch: Batch, window: int | None = None) -> np.ndarray:
    out = np.full(batch.q.shape, np.nan)
    for row in range(len(batch.seq_lens)):
        for t in range(int(batch.cu_seqlens_q[row]), int(batch.cu_seqlens_q[row + 1])):
            for head in range(batch.q.shape[1]):
                out[t, head] = one_query(batch, row, t, head, window)
    return out


def paged(batch: Batch, window: int | None = None) -> np.ndarray:
    return paged_attention(**vars(batch), window=window)


def decode(batch: Batch) -> np.ndarray:
    arguments = {name: value for name, value in vars(batch).items() if name != "cu_seqlens_q"}
    return decode_attention(**arguments)


def check(got: np.ndarray, wanted: np.ndarray, dtype: str = "float64") -> None:
    assert got.dtype == dtype
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=ATOL[dtype])


# Decode, whole prompt, chunk of a prompt, a sequence without a query, a single token.
MIXED = [(1, 9), (5, 5), (3, 10), (0, 4), (1, 1), (4, 7)]
DECODES = [(1, 9), (1, 1), (1, 16), (1, 9), (1, 2)]


@pytest.mark.parametrize("spread", [1e-3, 30.0, 100.0])
def test_scores_of_any_size_are_stable(spread: float):
    """Products exceed 1e4, so exp would overflow without the shift."""
    sequences = [(4, 9), (1, 12), (1, 1)]
    batch = ragged(sequences, spread=spread)
    wanted = plain(batch)
    np.testing.assert_allclose(paged(batch), wanted, rtol=1e-10, atol=1e-10 * spread)
    decodes = ragged(DECODES, spread=spread)
    np.testing.assert_allclose(decode(decodes), plain(decodes), rtol=1e-10, atol=1e-10 * spread)


@given(
    lengths=st.lists(st.integers(1, 40), max_size=12),
    block_size=st.sampled_from([1, 2, 3, 4, 16]),
    heads=st.sampled_from(HEADS),
    head_dim=st.sampled_from([2, 6, 8]),
    num_bytes=st.sampled_from([1, 500, 4000, 1 << 19]),
    seed=st.integers(0, 1000),
)
def test_decode_attention_equals_paged_attention(
    lengths: list[int],
    block_size: int,
    heads: tuple[int, int],
    head_dim: int,
    num_bytes: int,
    seed: int,
):
    batch = ragged(
        [(1, length) for length in lengths],
        block_size=block_size,
        heads=heads,
        head_dim=head_dim,
        seed=seed,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "GATHER_BYTES", num_bytes)
        check(decode(batch), paged(batch))


@given(
    sequences=st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])),
        max_size=5,
    ),
    block_size=st.sampled_from([1, 2, 3, 16]),
    window=st.none() | st.integers(1, 25),
    tile=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_the_plain_loops(sequences, block_size, window, tile, seed):
    batch = ragged(sequences, block_size=block_size, heads=(2, 1), head_dim=4, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "QUERY_TILE", tile)
        check(paged(batch, window), plain(batch, window))


# Quantised caches give the results of the numbers that they represent.


@pytest.mark.parametrize("stored", QUANTIZED.values(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantised_cache_is_read_as_the_numbers_it_represents(stored: np.dtype, dtype: str):
    """Slots without a token have a scale of NaN."""
    for batch, compute in (
        (ragged(MIXED, dtype=dtype), paged),
        (ragged(MIXED, dtype=dtype), lambda batch: paged(batch, 4)),
        (ragged(DECODES, dtype=dtype), decode),
    ):
        numbers = (batch.k_cache, batch.v_cache)
        if stored == INT4:
            caches = [int4_cache.quantize(cache) for cache in numbers]
            k_cache, v_cache = (int4_cache.dequantize(cache, dtype) for cache in caches)
        else:
            caches = [quantised_cache.quantize(cache, stored) for cache in numbers]
            k_cache, v_cache = (quantised_cache.dequantize(cache, dtype) for cache in caches)
        wanted = compute(Batch(**{**vars(batch), "k_cache": k_cache, "v_cache": v_cache}))
        got = compute(Batch(**{**vars(batch), "k_cache": caches[0], "v_cache": caches[1]}))
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, wanted)
        assert np.isfinite(got).all()


def test_a_sink_is_one_more_score_whose_value_is_zero():
    rng = np.random.default_rng(3)
    q, sinks = rng.normal(0, 3, (2, 2, 4)), np.array([20.0, -3.0])
    keys, values = rng.normal(0, 3, (2, 5, 1, 4))
    weights = np.exp(q @ keys[:, 0].T)
    shares = weights / (weights.sum(axis=-1, keepdims=True) + np.exp(sinks)[:, None])
    got = attend(q, keys, values, 1.0, np.ones((2, 5), bool), sinks=sinks)
    np.testing.assert_allclose(got, shares @ values[:, 0], rtol=1e-12)
