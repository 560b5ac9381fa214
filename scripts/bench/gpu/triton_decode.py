"""Decode with paged attention in Triton, a peer that reads mie's own cache.

The kernel knows groups of query heads and splits the keys. It needs torch and Triton, and is
imported only where the benchmark runs it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from mie.arithmetic import ceil_div

CONFIGS = [
    triton.Config({"TOKENS": tokens}, num_warps=warps, num_stages=stages)
    for tokens, warps, stages in ((32, 4, 3), (64, 4, 3), (64, 8, 3), (128, 4, 2), (128, 8, 3))
]


class PagedDecode:
    """One query for each of S sequences. Each sequence is split every ``split_tokens`` tokens."""

    def __init__(
        self, q: Any, kv: Any, tables: Any, lengths: Any, longest: int, split_tokens: int
    ) -> None:
        """Prepare the inputs.

        They are q [S, Hq, Dh], a cache kv [N, 2, Hkv, B, Dh], and int32 tables [S, M] and lengths
        [S].
        """
        self.q, self.tables, self.lengths = q, tables, lengths
        self.split_tokens = split_tokens
        num_seqs, num_heads, head_dim = q.shape
        self.num_splits = ceil_div(longest, split_tokens)
        options = {"dtype": torch.float32, "device": q.device}
        self.partial = torch.empty(num_seqs, num_heads, self.num_splits, head_dim, **options)
        self.lse = torch.empty(num_seqs, num_heads, self.num_splits, **options)
        self.out = torch.empty_like(q)
        self.group = num_heads // kv.shape[2]

    def __call__(self, kv: Any) -> Any:
        """Return the result [S, Hq, Dh], in the same memory every time."""
        num_seqs, num_heads, head_dim = self.q.shape
        num_kv_heads, block_size = kv.shape[2:4]
        attend_split[num_seqs, num_kv_heads, self.num_splits](
            self.q,
            kv,
            self.tables,
            self.lengths,
            self.partial,
            self.lse,
            math.log2(math.e) / math.sqrt(head_dim),
            self.tables.shape[1],
            num_kv_heads,
            self.num_splits,
            self.split_tokens,
            GROUP=self.group,
            HEADS=max(16, triton.next_power_of_2(self.group)),
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
        )
        merge_splits[num_seqs * num_heads,](
            self.partial,
            self.lse,
            self.out,
            self.num_splits,
            SPLITS=triton.next_power_of_2(self.num_splits),
            HEAD_DIM=head_dim,
        )
        return self.out


@triton.autotune(CONFIGS, key=["GROUP", "HEAD_DIM", "num_kv_heads", "num_splits", "split_tokens"])
@triton.jit
def attend_split(
    q,
    kv,
    tables,
    lengths,
    partial,
    lse,
    scale,
    table_width,
    num_kv_heads,
    num_splits,
    split_tokens,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Attend over one split of one sequence, with the query heads of one KV head.

    Scores are in base 2.
    """
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = split * split_tokens
    end = tl.minimum(begin + split_tokens, tl.load(lengths + seq))
    heads = tl.arange(0, HEADS)
    dims = tl.arange(0, HEAD_DIM)
    rows = (seq * num_kv_heads + kv_head) * GROUP + heads  # of [S * Hq]
    is_head = heads < GROUP
    queries = tl.load(
        q + rows[:, None] * HEAD_DIM + dims[None, :], mask=is_head[:, None], other=0.0
    )
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, HEAD_DIM], tl.float32)
    for start in range(begin, end, TOKENS):
        tokens = start + tl.arange(0, TOKENS)
        is_token = tokens < end
        blocks = tl.load(tables + seq * table_width + tokens // BLOCK_SIZE, mask=is_token, other=0)
        places = (blocks.to(tl.int64) * 2 * num_kv_heads + kv_head) * BLOCK_SIZE
        places = (places + tokens % BLOCK_SIZE) * HEAD_DIM
        keys = tl.load(kv + places[None, :] + dims[:, None], mask=is_token[None, :], other=0.0)
        scores = tl.where(is_token[None, :], tl.dot(queries, keys) * scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        keep = tl.exp2(top - new_top)
        places += num_kv_heads * BLOCK_SIZE * HEAD_DIM
        values = tl.load(kv + places[:, None] + dims[None, :], mask=is_token[:, None], other=0.0)
        acc = acc * keep[:, None] + tl.dot(weights.to(values.dtype), values)
        total = total * keep + tl.sum(weights, 1)
        top = new_top
    cells = rows * num_splits + split
    is_empty = begin >= end
    tl.store(lse + cells, tl.where(is_empty, float("-inf"), top + tl.log2(total)), mask=is_head)
    acc = acc / tl.where(is_empty, 1.0, total)[:, None]
    tl.store(partial + cells[:, None] * HEAD_DIM + dims[None, :], acc, mask=is_head[:, None])


@triton.jit
def merge_splits(partial, lse, out, num_splits, SPLITS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Merge the splits of one head of one sequence by their log-sum-exps."""
    row = tl.program_id(0)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    cells = row * num_splits + splits
    logs = tl.load(lse + cells, mask=splits < num_splits, other=float("-inf"))
    weights = tl.exp2(logs - tl.max(logs, 0))
    parts = tl.load(
        partial + cells[:, None] * HEAD_DIM + dims[None, :],
        mask=(splits < num_splits)[:, None],
        other=0.0,
    )
    merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + row * HEAD_DIM + dims, merged.to(out.dtype.element_ty))
