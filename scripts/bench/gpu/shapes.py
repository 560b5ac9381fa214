"""Define the measured shapes of attention, with their batches and floors."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import StepBatch
from mie.ops.kv_cache import QUANTIZED as KV_DTYPES
from mie.ops.kv_cache import head_bytes
from mie.ops_gpu.arrays import DTYPES

BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """Attention of a decode step over ``num_seqs`` sequences of ``context`` tokens on average."""

    head_dim: int
    num_kv_heads: int
    num_seqs: int
    context: int
    dtype: str = "float16"
    kv_cache_dtype: str = "auto"
    is_ragged: bool = False
    num_heads: int = 32

    @property
    def useful_bytes(self) -> int:
        """The bytes of keys and values once, queries, and outputs."""
        stored = KV_DTYPES.get(self.kv_cache_dtype, DTYPES[self.dtype])
        vector = head_bytes(stored, self.head_dim)
        num_vectors = 2 * self.num_seqs * self.context * self.num_kv_heads
        return num_vectors * vector + 2 * self.num_seqs * self.num_heads * self.head_dim * 2

    def lengths(self) -> list[int]:
        """The length of each sequence. Ragged ones are lognormal and have the same sum."""
        if not self.is_ragged:
            return [self.context] * self.num_seqs
        return ragged_lengths(self.num_seqs, self.context)

    def __str__(self) -> str:
        kind = "ragged" if self.is_ragged else "uniform"
        cache = "" if self.kv_cache_dtype == "auto" else f", {self.kv_cache_dtype} cache"
        return (
            f"Dh {self.head_dim}, {self.num_heads}/{self.num_kv_heads} heads, S {self.num_seqs}, "
            f"ctx {self.context}, {self.dtype}{cache}, {kind}"
        )


@dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """Attention of ``num_queries`` new tokens in each of ``num_seqs`` sequences.

    ``prefix`` tokens of each are in the cache already.
    """

    head_dim: int
    num_kv_heads: int
    num_seqs: int
    num_queries: int
    prefix: int = 0
    dtype: str = "float16"
    num_heads: int = 32

    @property
    def context(self) -> int:
        """The tokens of a sequence after the step."""
        return self.prefix + self.num_queries

    @property
    def flops(self) -> float:
        """The operations on the pairs that the causal mask leaves: scores and weighted values."""
        pairs = self.num_queries * self.prefix + self.num_queries * (self.num_queries + 1) / 2
        return 4.0 * self.num_seqs * pairs * self.num_heads * self.head_dim

    def __str__(self) -> str:
        prefix = f" after {self.prefix}" if self.prefix else ""
        return (
            f"Dh {self.head_dim}, {self.num_heads}/{self.num_kv_heads} heads, "
            f"{self.num_seqs} × {self.num_queries} tokens{prefix}, {self.dtype}"
        )


_SIZES = (
    (128, 8, 64, 4096),
    (128, 4, 64, 4096),
    (64, 8, 64, 4096),
    (64, 4, 64, 4096),
    (128, 8, 32, 4096),
    (128, 8, 256, 1024),
    (128, 8, 8, 4096),
    (64, 4, 64, 512),
    (128, 8, 1, 4096),
)
UNIFORM = [
    DecodeShape(head_dim=head_dim, num_kv_heads=heads, num_seqs=num_seqs, context=context)
    for head_dim, heads, num_seqs, context in _SIZES
]
RAGGED = [replace(shape, is_ragged=True) for shape in UNIFORM if shape.num_seqs > 1]
QUANTISED = [
    replace(shape, kv_cache_dtype=stored) for stored in ("int8", "int4") for shape in UNIFORM[:4]
]
MORE = [*RAGGED, *(replace(shape, dtype="bfloat16") for shape in [*UNIFORM, *RAGGED])]
"""Shapes that are measured if there is time."""

PREFILL = [
    PrefillShape(
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        num_seqs=num_seqs,
        num_queries=num_queries,
        prefix=prefix,
    )
    for head_dim, num_kv_heads in ((128, 8), (64, 4))
    for num_seqs, num_queries, prefix in (
        *((1, 4096, 0), (8, 512, 0)),
        *((1, 512, 3584), (1, 64, 32_768)),
    )
]

TINY = DecodeShape(head_dim=64, num_kv_heads=1, num_seqs=3, context=40, num_heads=2)
TINY_DECODES = [TINY, replace(TINY, is_ragged=True)]
TINY_DECODES += [replace(TINY, kv_cache_dtype=stored) for stored in ("int8", "int4")]
TINY_PREFILL = PrefillShape(
    head_dim=64, num_kv_heads=1, num_seqs=2, num_queries=9, prefix=8, num_heads=2
)


def ragged_lengths(num_seqs: int, context: int) -> list[int]:
    """Return lognormal lengths with the sum num_seqs * context.

    They lie in context / 32 … 8192 (at least).
    """
    low, high = max(1, context // 32), max(8192, context)
    total = num_seqs * context
    lengths = np.random.default_rng(0).lognormal(0.0, 1.0, num_seqs)
    for _ in range(20):
        lengths = np.clip(lengths * total / lengths.sum(), low, high)
    whole = lengths.astype(int)
    for row in itertools.cycle(range(num_seqs)):
        missing = total - int(whole.sum())
        if not missing:
            return [int(length) for length in whole]
        step = 1 if missing > 0 else -1
        if low <= whole[row] + step <= high:
            whole[row] += step
    raise AssertionError("a cycle has no end")


def batch_of(lengths: Sequence[int], num_queries: int = 1) -> tuple[StepBatch, int]:
    """Return the batch of the last tokens of each sequence, and its number of blocks.

    Each sequence has ``num_queries`` queries. The tables name blocks in a random order, with -1
    after the last.
    """
    needed = [ceil_div(length, BLOCK_SIZE) for length in lengths]
    free = iter(np.random.default_rng(0).permutation(sum(needed)).tolist())
    tables = np.full((len(lengths), max(needed) + 1), -1)
    for row, count in enumerate(needed):
        tables[row, :count] = list(itertools.islice(free, count))
    none = np.zeros(0, np.int64)
    batch = StepBatch(
        token_ids=none,
        positions=none,
        slot_mapping=none,
        cu_seqlens_q=num_queries * np.arange(len(lengths) + 1),
        seq_lens=np.array(lengths),
        block_tables=tables,
        logits_rows=none,
    )
    return batch, sum(needed)
