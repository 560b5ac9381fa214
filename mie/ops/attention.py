"""Compute attention of a ragged batch over the paged KV cache.

`paged_attention` is the definition: gather and attend, one sequence at a time. `decode_attention`
computes the same for sequences with one query each, several sequences in one matrix product.
"""

import numpy as np

from mie.ops.activation import soft_cap as capped
from mie.ops.arrays import Bools, Floats, Ints
from mie.ops.kv_cache import Cache, gather_kv, take_blocks

QUERY_TILE = 128
"""Queries scored together. It bounds the scores to Hq * 128 * s for any chunk size."""

GATHER_BYTES = 1 << 19
"""Bytes of keys that `decode_attention` gathers at once. Keys and values fit a 1 MiB L2 cache."""


def paged_attention(
    q: Floats,
    k_cache: Cache,
    v_cache: Cache,
    block_tables: Ints,
    cu_seqlens_q: Ints,
    seq_lens: Ints,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Floats | None = None,
    *,
    max_queries: int = QUERY_TILE,
) -> Floats:
    """Return softmax(scale * q·Kᵀ)·V of each query over its sequence, as a new array [T, Hq, Dh].

    q [T, Hq, Dh]; caches [N, B, Hkv, Dh]; block_tables [S, M]; cu_seqlens_q [S + 1]; seq_lens [S].
    The last counts the tokens in the cache, including this step's.

    Query head h reads KV head h * Hkv // Hq (grouped-query attention: Ainslie et al., 2023,
    arXiv:2305.13245). Query i of a sequence with n queries and length s is at p = s - n + i. It
    sees the keys at max(0, p - window + 1) … p. ``soft_cap`` bounds the scaled scores. ``sinks``
    [Hq] are the scores of one more key of each head, with the value zero. Slots beyond a sequence's
    length are never read. With a quantised cache a query reads the stored keys and values, and so
    its own after rounding. At most ``max_queries`` queries are scored together. If it is 1, the
    shape of a query's products depends on its position alone.
    """
    out = np.empty_like(q)
    for s, seq_len in enumerate(seq_lens.tolist()):
        begin, end = int(cu_seqlens_q[s]), int(cu_seqlens_q[s + 1])
        for tile in range(begin, end, QUERY_TILE):
            tile_end = min(tile + QUERY_TILE, end)
            last = seq_len - (end - tile_end)  # position after the tile's last query
            first = last - (tile_end - tile)
            start = 0 if window is None else max(0, first - window + 1)
            keys = gather_kv(k_cache, block_tables[s], start, last, q.dtype)
            values = gather_kv(v_cache, block_tables[s], start, last, q.dtype)
            for row in range(tile, tile_end, max_queries):
                stop = min(row + max_queries, tile_end)
                seen_end = last - (tile_end - stop)  # position after the last of these queries
                seen_start = 0 if window is None else max(0, seen_end - (stop - row) - window + 1)
                seen = slice(seen_start - start, seen_end - start)
                mask = causal_mask(seen_end - (stop - row) - seen_start, stop - row, window)
                out[row:stop] = attend(
                    q[row:stop], keys[seen], values[seen], scale, mask, soft_cap, sinks
                )
    return out


def causal_mask(first: int, num_queries: int, window: int | None) -> Bools:
    """Return which keys the n queries at positions first … first + n - 1 see: [n, first + n]."""
    query = np.arange(first, first + num_queries)[:, None]
    key = np.arange(first + num_queries)
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    return visible


def attend(
    q: Floats,
    keys: Floats,
    values: Floats,
    scale: float,
    mask: Bools,
    soft_cap: float | None = None,
    sinks: Floats | None = None,
) -> Floats:
    """Compute masked attention of one sequence, as a new array [n, Hq, Dh].

    q [n, Hq, Dh]; keys, values [s, Hkv, Dh]; mask [n, s], True where a query sees a key. Every
    query sees at least one key. Vaswani et al., 2017, arXiv:1706.03762, equation 1. Sinks: Xiao et
    al., 2023, arXiv:2309.17453; learnt ones are gpt-oss's.
    """
    n, num_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    # [n, Hq, Dh] -> [Hkv, n * G, Dh]: the queries that share a KV head become rows of one matrix.
    rows = q.reshape(n, num_kv_heads, group, head_dim).swapaxes(0, 1)
    scores = rows.reshape(num_kv_heads, n * group, head_dim) @ keys.transpose(1, 2, 0)
    scores *= scale
    if soft_cap is not None:
        scores = capped(scores, soft_cap)
    scores = scores.reshape(num_kv_heads, n, group, -1)
    np.copyto(scores, -np.inf, where=~mask[None, :, None, :])
    largest = scores.max(axis=-1, keepdims=True)
    scores -= largest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += sink_weights(sinks.reshape(num_kv_heads, 1, group, 1), largest)
    out = scores.reshape(num_kv_heads, n * group, -1) @ values.swapaxes(0, 1)
    out = out.reshape(num_kv_heads, n, group, head_dim) / total
    attended: Floats = out.swapaxes(0, 1).reshape(n, num_heads, head_dim)
    return attended


def sink_weights(sinks: Floats, largest: Floats) -> Floats:
    """Return the weights of sinks beside scores that had their largest one subtracted."""
    with np.errstate(over="ignore"):  # infinity: the sink takes all
        weights: Floats = np.exp(sinks - largest)
    return weights


def decode_attention(
    q: Floats,
    k_cache: Cache,
    v_cache: Cache,
    block_tables: Ints,
    seq_lens: Ints,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Floats | None = None,
) -> Floats:
    """Compute `paged_attention` of S sequences with one query each: [S, Hq, Dh].

    q [S, Hq, Dh]; the rest as in `paged_attention`. Sequences are sorted by the number of keys that
    they read. As many as fit the CPU cache are batched and padded to the longest.
    """
    out = np.empty_like(q)
    num_heads, head_dim = q.shape[1:]
    block_size, num_kv_heads = k_cache.shape[1:3]
    rows = q.reshape(-1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    block_bytes = block_size * num_kv_heads * head_dim * q.itemsize
    starts = np.zeros_like(seq_lens) if window is None else np.maximum(0, seq_lens - window)
    first_blocks = starts // block_size
    counts = -(-seq_lens // block_size) - first_blocks  # blocks that each sequence sees
    order = np.argsort(-counts, kind="stable")
    begin = 0
    while begin < order.size:
        num_blocks = int(counts[order[begin]])
        chosen = order[begin : begin + max(1, GATHER_BYTES // (num_blocks * block_bytes))]
        # A sequence with fewer blocks repeats its last one. Both products below are masked.
        index = np.minimum(np.arange(num_blocks), counts[chosen][:, None] - 1)
        blocks = block_tables[chosen[:, None], first_blocks[chosen][:, None] + index]
        gathered = (chosen.size, num_blocks * block_size, num_kv_heads, head_dim)
        keys = take_blocks(k_cache, blocks, q.dtype).reshape(gathered)
        values = take_blocks(v_cache, blocks, q.dtype).reshape(gathered)
        scores = (rows[chosen] * scale) @ keys.transpose(0, 2, 3, 1)
        if soft_cap is not None:
            scores = capped(scores, soft_cap)
        ends = seq_lens[chosen] - first_blocks[chosen] * block_size
        for i, end in enumerate(ends.tolist()):
            start = int(starts[chosen[i]] - first_blocks[chosen[i]] * block_size)
            for hidden in (slice(start), slice(end, None)):
                scores[i, ..., hidden] = -np.inf
                values[i, hidden] = 0.0  # an unwritten slot may hold NaN, and 0 * NaN is NaN
        largest = scores.max(axis=-1, keepdims=True)
        scores -= largest
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total += sink_weights(sinks.reshape(num_kv_heads, -1, 1), largest)
        attended = scores @ values.swapaxes(1, 2)
        attended /= total
        out[chosen] = attended.reshape(chosen.size, num_heads, head_dim)
        begin += chosen.size
    return out
