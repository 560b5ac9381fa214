"""Which kernel attends: two tables, first match wins.

For the sequences with one query:

| dtype             | head_dim         | group  | block_size | may stream | kernel              |
| ----------------- | ---------------- | ------ | ---------- | ---------- | ------------------- |
| float16, bfloat16 | 64, 128          | 1 … 16 | 16, 32, …  | yes        | paged_decode_stream |
| float16, bfloat16 | 64, 128          | 1 … 16 | 16, 32, …  | no         | paged_decode_mma    |
| any               | 8, 16, 24, … 256 | any    | any        | any        | paged_decode        |

The first two take query heads by tiles of eight: one for groups up to 8, else two. For the others:

| dtype             | head_dim         | group  | block_size | kernel            |
| ----------------- | ---------------- | ------ | ---------- | ----------------- |
| float16, bfloat16 | 64, 128          | any    | any        | paged_prefill_mma |
| any               | 8, 16, 24, … 256 | any    | any        | paged_prefill     |

The KV cache has the dtype of the queries.
"""

from dataclasses import dataclass
from typing import Literal

from mie.ops_gpu.arrays import ceil_div

WARPS = 4

TILE_TOKENS = 16 * WARPS
"""Tokens that a block of the tensor-core kernels takes at a time, 16 a warp."""

MMA_STAGES = {64: 4, 128: 3}
"""The head sizes of the tensor-core kernels, and the tiles in a decoding warp's ring: 16 and 24 KB
a warp, so that two blocks or more fit a multiprocessor of an H200."""


@dataclass(frozen=True, kw_only=True)
class DecodeKernel:
    """How to launch one."""

    kind: Literal["stream", "mma", "plain"]
    parameters: str
    """Its template parameters."""
    shared_bytes: int
    head_tiles: int = 0


def decode_kernel(
    element: str, head_dim: int, group: int, block_size: int, *, may_stream: bool
) -> DecodeKernel:
    """The kernel for queries and a cache of the element type ("float", "f16", "bf16").

    ``may_stream``: there is no window, and a result may depend on its batch in its last bits.
    """
    is_short = element in ("f16", "bf16")
    if is_short and head_dim in MMA_STAGES and group <= 16 and block_size % 16 == 0:
        stages, head_tiles = MMA_STAGES[head_dim], ceil_div(group, 8)
        ring_bytes = WARPS * stages * 2 * 16 * 2 * head_dim  # keys and values of 16 tokens
        merge_bytes = 4 * WARPS * 8 * head_tiles * (head_dim + 2)  # in the same memory, afterwards
        return DecodeKernel(
            kind="stream" if may_stream else "mma",
            parameters=f"<{element}, {head_dim}, {head_tiles}, {WARPS}, {stages}>",
            shared_bytes=max(ring_bytes, merge_bytes),
            head_tiles=head_tiles,
        )
    merge_floats = WARPS * group * (head_dim + 2)
    return DecodeKernel(
        kind="plain",
        parameters=f"<{element}, {head_dim}, {group}, {WARPS}>",
        shared_bytes=4 * (group * head_dim + merge_floats),
    )


@dataclass(frozen=True, kw_only=True)
class PrefillKernel:
    """How to launch one."""

    name: str
    parameters: str
    rows: int
    """(Token, query head) pairs of a block."""
    shared_bytes: int


def prefill_kernel(element: str, head_dim: int) -> PrefillKernel:
    """The kernel for queries and a cache of the element type."""
    parameters = f"<{element}, {head_dim}>"
    if element in ("f16", "bf16") and head_dim in MMA_STAGES:
        return PrefillKernel(
            name="paged_prefill_mma",
            parameters=parameters,
            rows=64,
            shared_bytes=2 * 2 * 64 * 2 * head_dim,  # two tiles of 64 keys and values
        )
    itemsize = 4 if element == "float" else 2
    query_bytes = 4 * (16 * head_dim + WARPS * 32)  # 16 rows, and each warp's weights of 32 keys
    key_bytes = 2 * 32 * (head_dim * itemsize + 4)  # keys and values, each row a bank longer
    return PrefillKernel(
        name="paged_prefill",
        parameters=parameters,
        rows=16,
        shared_bytes=query_bytes + key_bytes,
    )
