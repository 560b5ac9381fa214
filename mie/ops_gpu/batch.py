"""Pad a step's integers to a size that steps share, and lay them out on the device."""

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.arrays import Ints
from mie.ops.backend import Array, StepBatch
from mie.ops_gpu.arrays import next_power_of_two, to_host
from mie.ops_gpu.dispatch import MAX_SPLITS, SPLIT_TOKENS, TILE_TOKENS

ANY_LENGTH = (1 << 31) - 1
"""A maximum length that holds for all sequences, because lengths have 32 bits."""


LATER = ("drawn", "drawn_rows", "num_decodes", "num_groups", "group")
"""Fields of a `StepBatch` that are not copied as they are."""


MAX_CHUNKS, MAX_CHUNK_TOKENS = 32, 2048
"""Maximum number of prompts of a captured step, and of their tokens.

Longer steps keep a GPU busy while the host launches their kernels.
"""

STEP_TOKENS = (8, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Numbers of tokens that a step with chunks is padded to.

Up to 16 tokens, products take the kernels of few rows. Up to about 128 tokens, or 256 on a server's
GPU, a step waits for its weights, and padding takes no time. From there on it is at most half.
"""

NUM_CHUNKS = (1, 4, MAX_CHUNKS)
"""Numbers of chunks that a step is padded to."""


class Bucket(NamedTuple):
    """The size that a step is padded to. The launches of a step depend on this alone."""

    num_seqs: int
    """Number of decodes."""
    max_len: int
    """Maximum length of a sequence."""
    num_chunks: int = 0
    """Number of prompts, or chunks of prompts."""
    num_chunk_tokens: int = 0
    """Number of tokens of all chunks. Any chunk may have as many."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the step."""
        return self.num_seqs + self.num_chunk_tokens

    @property
    def num_logits(self) -> int:
        """Number of rows of logits."""
        return self.num_seqs + self.num_chunks


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceBatch(StepBatch):
    """A `StepBatch` with int32 arrays on the device, all in one buffer.

    Two lists divide its sequences by how attention is launched. The numbers that determine grids
    stay on the host, so no launch waits for the device.
    """

    integers: Array  # all of the arrays, concatenated
    decodes: Array  # sequences with one query
    prefills: Array  # the others
    decode_tiles: Array  # prefix sums of the decodes' key tiles: 0, ..., total
    max_prefill_queries: int  # no prefill has more queries
    max_prefill_len: int  # no prefill is longer
    max_len: int  # no sequence is longer in this step, nor in a captured one that is replayed
    window_tiles: dict[int, Array] = field(default_factory=dict, init=False)
    """`decode_tiles` from the beginning of each window. The first layer with it computes them."""

    def destinations(self, table_width: int) -> list[Array]:
        """Return the parts of the buffer that a step with tables of this width is copied to.

        Rows of the buffer's tables may be longer. Only their first entries are copied.
        """
        num_rows, max_width = self.block_tables.shape
        if table_width == max_width:
            return [self.integers]
        start = self.integers.size - num_rows * max_width
        return [self.integers[:start], self.block_tables[:, :table_width]]


class HostBatch(NamedTuple):
    """The arrays of a `DeviceBatch`, still on the host, with ``block_tables`` at the end."""

    arrays: dict[str, Ints]
    max_prefill_queries: int
    max_prefill_len: int
    max_len: int
    num_groups: int = 1

    @property
    def parts(self) -> list[NDArray[Any]]:
        """The arrays in the order of their buffer."""
        return [array.ravel() for array in self.arrays.values()]

    @property
    def table_width(self) -> int:
        """Number of blocks in a table row."""
        return int(self.arrays["block_tables"].shape[1])

    def size(self, table_width: int) -> int:
        """Return the number of integers in a buffer with tables of this width."""
        *others, tables = self.arrays.values()
        return sum(array.size for array in others) + len(tables) * table_width

    def on_device(self, integers: Array) -> DeviceBatch:
        """Return views of the buffer that holds, or will hold, the concatenated arrays.

        The tables' rows have the width that fills the buffer.
        """
        views, start = {}, 0
        *others, tables = self.arrays.items()
        for name, array in others:
            views[name] = integers[start : start + array.size].reshape(array.shape)
            start += array.size
        name, array = tables
        views[name] = integers[start:].reshape(len(array), -1)
        return DeviceBatch(
            integers=integers,
            max_prefill_queries=self.max_prefill_queries,
            max_prefill_len=self.max_prefill_len,
            max_len=self.max_len,
            num_groups=self.num_groups,
            **views,
        )


def decodes_of(batch: StepBatch) -> NDArray[np.bool_]:
    """Return whether each sequence decodes [S]. An empty one with a query is padding, and does."""
    counts, lengths = np.diff(to_host(batch.cu_seqlens_q)), to_host(batch.seq_lens)
    is_decode: NDArray[np.bool_] = counts == 1
    if batch.num_decodes is not None:
        is_decode[batch.num_decodes :] &= lengths[batch.num_decodes :] == 0
    return is_decode


def host_batch(
    batch: StepBatch, max_len: int | None = None, max_queries: int | None = None
) -> HostBatch:
    """Return the batch's arrays and the numbers that the launches need.

    Launches allow for sequences of ``max_len`` tokens, by default the longest of the batch. They
    allow for prompts of any length with up to ``max_queries``, by default those of the batch.
    """
    arrays = {
        field.name: to_host(getattr(batch, field.name))
        for field in fields(StepBatch)
        if getattr(batch, field.name) is not None and field.name not in LATER
    }
    arrays["drawn_rows"] = (
        np.zeros_like(arrays["token_ids"]) if batch.drawn_rows is None else batch.drawn_rows
    )
    counts, is_decode = np.diff(arrays["cu_seqlens_q"]), decodes_of(batch)
    arrays["decodes"] = np.flatnonzero(is_decode)
    arrays["prefills"] = np.flatnonzero(~is_decode)
    tiles = -(-arrays["seq_lens"][is_decode] // TILE_TOKENS)
    arrays["decode_tiles"] = np.concatenate([[0], np.cumsum(tiles)])
    arrays["block_tables"] = arrays.pop("block_tables")  # the last, because its size varies
    if max_len is None:
        max_len = int(arrays["seq_lens"].max())
    queries, lengths = (
        int(each[~is_decode].max(initial=0)) for each in (counts, arrays["seq_lens"])
    )
    if max_queries is not None:
        queries, lengths = max_queries, ANY_LENGTH
    return HostBatch(arrays, queries, lengths, max_len, batch.num_groups)


def to_device(xp: Any, batch: StepBatch) -> DeviceBatch:
    """Return the batch in its own buffer, or the batch itself if it is on the device already."""
    if isinstance(batch, DeviceBatch):
        return batch
    host = host_batch(batch)
    return host.on_device(xp.asarray(np.concatenate(host.parts).astype(np.int32)))


def bucket_of(
    batch: StepBatch, *, follows_lengths: bool = True, most_tokens: int | None = None
) -> Bucket | None:
    """Return the size to pad a step to, or None for a step that is not captured.

    Without ``follows_lengths`` steps of all lengths share one. A padded step has at most
    ``most_tokens``, if they are given. A step with many rows of logits, for log-probabilities of
    prompts, is not captured, and neither is one with more chunks or tokens than the limits.
    """
    num_decodes = int(decodes_of(batch).sum())
    num_chunks = len(batch.seq_lens) - num_decodes
    max_len = padded_length(int(batch.seq_lens.max())) if follows_lengths else ANY_LENGTH
    if not num_chunks:
        bucket = Bucket(padded_seqs(num_decodes), max_len)
        return bucket if len(batch.logits_rows) <= bucket.num_logits else None
    num_seqs, num_tokens = padded_decodes(num_decodes), len(batch.token_ids) - num_decodes
    if num_chunks > MAX_CHUNKS or num_tokens > MAX_CHUNK_TOKENS:
        return None
    most = most_tokens or num_seqs + MAX_CHUNK_TOKENS
    num_all = next((n for n in STEP_TOKENS if num_seqs + num_tokens <= n <= most), most)
    bucket = Bucket(num_seqs, max_len, padded_chunks(num_chunks), num_all - num_seqs)
    is_large = bucket.num_chunk_tokens < num_tokens or len(batch.logits_rows) > bucket.num_logits
    return None if is_large else bucket


def padded_chunks(num_chunks: int) -> int:
    """Round a number of chunks up to the next size, or down to the largest."""
    return next((n for n in NUM_CHUNKS if num_chunks <= n), MAX_CHUNKS)


def padded_decodes(num_decodes: int) -> int:
    """Round the decodes beside chunks up to the next size: 0, 4, 16, 64, 128, 256, and so on."""
    few = next((n for n in (0, 4, 16, 64) if num_decodes <= n), None)
    return next_power_of_two(num_decodes) if few is None else few


def padded_length(length: int) -> int:
    """Round up to a length that divides into 1, 2, 4, … `MAX_SPLITS` splits, or to any length."""
    max_len = max(SPLIT_TOKENS, next_power_of_two(length))
    return max_len if max_len < MAX_SPLITS * SPLIT_TOKENS else ANY_LENGTH


def padded_seqs(num_seqs: int) -> int:
    """Round up to the next size: 1, 2, 4, 8, 16, 24, 32, 48, 64, … 256, 320, and so on.

    From 8 on at most a quarter is added.
    """
    if num_seqs <= 4:
        return next_power_of_two(num_seqs)
    step = 8 if num_seqs <= 32 else 16 if num_seqs <= 256 else 64
    return ceil_div(num_seqs, step) * step


def padded(batch: StepBatch, bucket: Bucket) -> StepBatch:
    """Append decodes of length 0, chunks without tokens, and tokens that no sequence has.

    They write to slot -1, that is, nowhere.
    """
    num_seqs, num_tokens = len(batch.seq_lens), len(batch.token_ids)
    num_groups, table_width = batch.num_groups, batch.block_tables.shape[1]
    num_decodes = int(decodes_of(batch).sum())
    more_decodes = bucket.num_seqs - num_decodes
    more_chunks = bucket.num_chunks - (num_seqs - num_decodes)
    more_seqs, all_seqs = more_decodes + more_chunks, bucket.num_seqs + bucket.num_chunks
    tables = np.zeros((num_groups, all_seqs, table_width), np.int64)
    tables[:, :num_seqs] = batch.block_tables.reshape(num_groups, num_seqs, table_width)
    slots = np.full((num_groups, bucket.num_tokens), -1)
    slots[:, :num_tokens] = batch.slot_mapping.reshape(num_groups, num_tokens)
    queries = np.repeat([1, 0], [more_decodes, more_chunks])
    logits = np.minimum(np.arange(bucket.num_logits), bucket.num_tokens - 1)
    logits[: len(batch.logits_rows)] = batch.logits_rows

    def more(array: Ints, value: int, count: int) -> Ints:
        return np.concatenate([array, np.full(count, value)])

    def more_rows(array: Ints) -> Ints:
        return more(array, 0, bucket.num_tokens - num_tokens)

    return replace(
        batch,
        token_ids=more_rows(batch.token_ids),
        positions=more_rows(batch.positions),
        slot_mapping=slots.ravel(),
        cu_seqlens_q=np.concatenate([batch.cu_seqlens_q, num_tokens + np.cumsum(queries)]),
        seq_lens=more(batch.seq_lens, 0, more_seqs),
        block_tables=tables.reshape(-1, table_width),
        logits_rows=logits,
        drawn_rows=None if batch.drawn_rows is None else more_rows(batch.drawn_rows),
        slots=None if batch.slots is None else more(batch.slots, -1, more_seqs),
        fresh=None if batch.fresh is None else np.append(batch.fresh, np.zeros(more_seqs, bool)),
        adapters=None if batch.adapters is None else more_rows(batch.adapters),
    )


def without_states(batch: StepBatch) -> StepBatch:
    """Return the batch with sequences that neither read nor write recurrent states."""
    nowhere = np.full(len(batch.seq_lens), -1)
    return replace(batch, slots=nowhere, fresh=np.zeros(len(nowhere), bool))
