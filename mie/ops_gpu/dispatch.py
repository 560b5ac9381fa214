"""Select the attention kernel by two tables, in which the first match wins.

Types have the names that the kernels use: "float", "f16", "bf16". A cache has the type of the
queries, or, if quantised, "int8", "e4m3" or "int4x8". For sequences with one query:

| dtype     | head_dim         | group  | block_size | KV dtype   | kernel              |
| --------- | ---------------- | ------ | ---------- | ---------- | ------------------- |
| f16, bf16 | 64, 80, … 128    | 1 … 16 | 16, 32, …  | not int4x8 | paged_decode_stream |
| f16, bf16 | 256              | 1 … 8  | 16, 32, …  | not int4x8 | paged_decode_stream |
| any       | 8, 16, 24, … 256 | any    | any        | any        | paged_decode        |

The tensor cores process tiles of eight query heads: one for groups up to 8, else two. For the other
sequences:

| dtype     | head_dim         | group  | block_size | KV dtype   | kernel            |
| --------- | ---------------- | ------ | ---------- | ---------- | ----------------- |
| f16, bf16 | 64, 80, … 128, 256 | any  | any        | dtype's    | paged_prefill_mma |
| f16, bf16 | 64, 80, … 128, 256 | any  | 16, 32, …  | int8, e4m3 | paged_prefill_mma |
| any       | 8, 16, 24, … 256 | any    | any        | any        | paged_prefill     |
"""

import math
from dataclasses import dataclass
from typing import Literal

from mie.base.arithmetic import ceil_div

WARPS = 4

TILE_TOKENS = 16 * WARPS
"""Number of tokens that a block of the tensor-core kernels takes at a time, 16 for each warp."""

SPLIT_TOKENS = 256
"""Minimum tokens of a sequence that one block of a split decode attends to, a multiple of 16."""

MAX_SPLITS = 32
"""Maximum splits of a sequence. The splits of a longer sequence have more tokens.

The splits of a decode depend on the sequence's length and window alone, so its result does not
depend on its batch. 32 splits of 4 KV heads are nearly as many blocks as an H200 has
multiprocessors. More would take more memory for partial results, for which every sequence of a step
needs room.
"""

MMA_STAGES = {64: 4, 80: 4, 96: 3, 112: 3, 128: 3, 256: 2}
"""The head sizes of the tensor-core kernels, and the number of tiles in a decoding warp's ring.

A ring takes 16 to 24 KB a warp, so at least two blocks fit a multiprocessor of an H200. With heads
of 256 it takes 32 KB, and one block fits. Tiles of a quantised cache take half of that, so twice as
many are in flight.
"""

LARGE_HEAD, LARGE_GROUP = 256, 8
"""A head for whose second tile of query heads a decoding warp has no registers, and its group."""

LARGE_HEAD_BYTES = 131 << 10
"""Shared memory that a multiprocessor needs to decode with this head on tensor cores.

Chips of the consumer's kind (sm_86, sm_89, sm_120) have 100 KB.
"""

KEPT_BYTES = 24
"""Bytes of shared memory in which a tensor-core prefill keeps integers beside its tiles.

The positions of its rows take four bytes each besides.
"""

WIDE_HEADS = (64, 80, 96, 128)
"""The head sizes of which a prefilling warp has registers for 32 rows, with a cache in 16 bits."""

QUANTIZED = ("int8", "e4m3")
"""Elements of a quantised cache that tensor cores multiply."""


@dataclass(frozen=True, kw_only=True)
class DecodeKernel:
    """How to launch a decode kernel."""

    kind: Literal["stream", "plain"]
    parameters: str
    """Template parameters of the kernel."""
    shared_bytes: int
    head_tiles: int = 0


def decode_kernel(
    element: str,
    head_dim: int,
    group: int,
    block_size: int,
    *,
    stored: str,
    is_capped: bool = False,
    shared_bytes: int = LARGE_HEAD_BYTES,
) -> DecodeKernel:
    """Return the decode kernel for queries of type ``element`` and a cache of type ``stored``.

    ``is_capped`` means that scores have a soft cap. A multiprocessor has ``shared_bytes`` of shared
    memory.
    """
    is_large = head_dim == LARGE_HEAD
    if (
        _suits_cores(element, stored)
        and head_dim in MMA_STAGES
        and group <= (LARGE_GROUP if is_large else 16)
        and not (is_large and shared_bytes < LARGE_HEAD_BYTES)
        and block_size % 16 == 0
    ):
        stages, head_tiles = MMA_STAGES[head_dim], ceil_div(group, 8)
        row_bytes = 2 * head_dim
        if stored in QUANTIZED:
            stages, row_bytes = 2 * stages, head_dim + 4  # elements and a scale
        return DecodeKernel(
            kind="stream",
            parameters=_parameters(element, stored, is_capped, head_dim, head_tiles, WARPS, stages),
            shared_bytes=WARPS * stages * 2 * 16 * row_bytes,  # keys and values of 16 tokens
            head_tiles=head_tiles,
        )
    merge_floats = WARPS * group * (head_dim + 2)
    return DecodeKernel(
        kind="plain",
        parameters=_parameters(element, stored, is_capped, head_dim, group, WARPS),
        shared_bytes=4 * (group * head_dim + merge_floats),
    )


@dataclass(frozen=True, kw_only=True)
class PrefillKernel:
    """How to launch a prefill kernel."""

    name: str
    parameters: str
    rows: int
    """Number of (token, query head) pairs of a block."""
    shared_bytes: int
    blocks_per_multiprocessor: int = 0
    """Maximum number of blocks on a multiprocessor, given the registers of a kernel with splits."""


def prefill_kernel(
    element: str,
    head_dim: int,
    block_size: int,
    *,
    stored: str,
    is_capped: bool = False,
    is_wide: bool = False,
) -> PrefillKernel:
    """Return the prefill kernel for queries of type ``element`` and a cache of type ``stored``.

    ``is_capped`` means that scores have a soft cap. A warp of an ``is_wide`` kernel has 32 rows
    instead of 16, where there is such a kernel. The bits of a row are the same.
    """
    is_quantized = stored in QUANTIZED
    # Four scales of a quantised cache are fetched at a time, so they must be in one block.
    if (
        not _suits_cores(element, stored)
        or head_dim not in MMA_STAGES
        or (is_quantized and block_size % 16)
    ):
        return plain_prefill_kernel(element, head_dim, stored=stored, is_capped=is_capped)
    row_bytes = head_dim + 4 if is_quantized else 2 * head_dim
    is_large = head_dim == LARGE_HEAD
    row_tiles = 2 if is_wide and head_dim in WIDE_HEADS and not is_quantized else 1
    rows, keys = 16 * WARPS * row_tiles, 32 if is_large else TILE_TOKENS
    # Where the results take the registers, the queries are in shared memory.
    query_bytes = 2 * rows * head_dim if is_large or row_tiles == 2 else 0
    tile_bytes = 2 * 2 * keys * row_bytes  # two tiles of keys and values
    return PrefillKernel(
        name="paged_prefill_mma",
        parameters=_parameters(element, stored, is_capped, head_dim, row_tiles),
        rows=rows,
        shared_bytes=tile_bytes + query_bytes + KEPT_BYTES + 4 * rows,
        blocks_per_multiprocessor=3 if head_dim <= 80 and row_tiles == 1 else 2,
    )


@dataclass(frozen=True, kw_only=True)
class PrefillSplits:
    """How the blocks of a prefill share the keys of a tile of rows."""

    count: int = 1
    tokens: int = TILE_TOKENS
    """Tokens of a split, whole tiles. A sequence that needs fewer has fewer splits."""


def prefill_splits(num_tokens: int | None, num_blocks: int, resident_blocks: int) -> PrefillSplits:
    """Return the splits for queries that see ``num_tokens``, or any number of tokens.

    A launch of ``num_blocks`` becomes one that fills the ``resident_blocks`` of the chip, so there
    are at most as many partial results. To merge a part takes about as long as a tile of keys. So a
    split has at least twice as many tiles as there are splits, and at least as many as there may be
    splits if the number of tokens is open.
    """
    count = min(resident_blocks // num_blocks, MAX_SPLITS)
    if num_tokens is None and count > 1:  # longer contexts get longer splits, on the device
        return PrefillSplits(count=count, tokens=count * TILE_TOKENS)
    num_tiles = ceil_div(num_tokens or 0, TILE_TOKENS)
    count = min(count, math.isqrt(num_tiles // 2))
    if count <= 1:
        return PrefillSplits()
    tiles = ceil_div(num_tiles, count)
    return PrefillSplits(count=ceil_div(num_tiles, tiles), tokens=tiles * TILE_TOKENS)


def plain_prefill_kernel(
    element: str, head_dim: int, *, stored: str, is_capped: bool = False
) -> PrefillKernel:
    """Return the prefill kernel that supports every shape."""
    # Numbers in shared memory are widened if the cache is quantised.
    itemsize = 2 if element == stored != "float" else 4
    query_bytes = 4 * (16 * head_dim + WARPS * 32)  # 16 rows, and 32 weights for each warp
    key_bytes = 2 * 32 * (head_dim * itemsize + 4)  # keys and values, each row padded by one bank
    return PrefillKernel(
        name="paged_prefill",
        parameters=_parameters(element, stored, is_capped, head_dim),
        rows=16,
        shared_bytes=query_bytes + key_bytes,
    )


def _suits_cores(element: str, stored: str) -> bool:
    """Whether tensor cores multiply queries and a cache of these types."""
    return element in ("f16", "bf16") and stored in (element, *QUANTIZED)


def _parameters(element: str, stored: str, is_capped: bool, *sizes: int) -> str:
    """Return the template parameters, without those at the end that are the default."""
    others = [stored, "true"] if is_capped else [] if stored == element else [stored]
    return f"<{', '.join([element, *map(str, sizes), *others])}>"
