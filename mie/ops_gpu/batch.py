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


class Bucket(NamedTuple):
    """The size that a step of decodes is padded to. The launches of a step depend on this alone."""

    num_seqs: int
    max_len: int
    """Maximum length of a sequence."""


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
    max_prefill_queries: int  # most queries of any prefill
    max_prefill_len: int  # the longest prefill
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


def host_batch(batch: StepBatch, max_len: int | None = None) -> HostBatch:
    """Return the batch's arrays and the numbers that the launches need.

    Launches allow for sequences of ``max_len`` tokens, by default the longest of the batch.
    """
    arrays = {
        field.name: to_host(getattr(batch, field.name))
        for field in fields(StepBatch)
        if getattr(batch, field.name) is not None and field.name not in LATER
    }
    arrays["drawn_rows"] = (
        np.zeros_like(arrays["token_ids"]) if batch.drawn_rows is None else batch.drawn_rows
    )
    counts = np.diff(arrays["cu_seqlens_q"])
    is_decode = counts == 1
    if batch.num_decodes is not None:
        is_decode[batch.num_decodes :] = False
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
    return HostBatch(arrays, queries, lengths, max_len, batch.num_groups)


def to_device(xp: Any, batch: StepBatch) -> DeviceBatch:
    """Return the batch in its own buffer, or the batch itself if it is on the device already."""
    if isinstance(batch, DeviceBatch):
        return batch
    host = host_batch(batch)
    return host.on_device(xp.asarray(np.concatenate(host.parts).astype(np.int32)))


def bucket_of(batch: StepBatch, *, follows_lengths: bool = True) -> Bucket | None:
    """Return the size to pad a step to that only decodes, with one row of logits a sequence.

    Without ``follows_lengths`` steps of all lengths share one.
    """
    num_seqs = len(batch.seq_lens)
    if batch.num_decodes not in (None, num_seqs):
        return None
    if not len(batch.token_ids) == num_seqs == len(batch.logits_rows):
        return None
    if not np.array_equal(batch.logits_rows, np.arange(num_seqs)):
        return None
    max_len = padded_length(int(batch.seq_lens.max())) if follows_lengths else ANY_LENGTH
    return Bucket(padded_seqs(num_seqs), max_len)


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
    """Append sequences of length 0 to the batch. They write to slot -1, that is, nowhere."""
    num_seqs, table_width = len(batch.seq_lens), batch.block_tables.shape[1]
    num_groups, num_more = batch.num_groups, bucket.num_seqs - num_seqs
    tables = np.zeros((num_groups, bucket.num_seqs, table_width), np.int64)
    tables[:, :num_seqs] = batch.block_tables.reshape(num_groups, num_seqs, table_width)
    slots = np.full((num_groups, bucket.num_seqs), -1)
    slots[:, :num_seqs] = batch.slot_mapping.reshape(num_groups, num_seqs)

    def more(array: Ints, value: int) -> Ints:
        return np.concatenate([array, np.full(num_more, value)])

    each = np.arange(bucket.num_seqs + 1)
    return replace(
        batch,
        token_ids=more(batch.token_ids, 0),
        positions=more(batch.positions, 0),
        slot_mapping=slots.ravel(),
        cu_seqlens_q=each,
        seq_lens=more(batch.seq_lens, 0),
        block_tables=tables.reshape(-1, table_width),
        logits_rows=each[:-1],
        drawn_rows=None if batch.drawn_rows is None else more(batch.drawn_rows, 0),
        num_decodes=None,
        slots=None if batch.slots is None else more(batch.slots, -1),
        adapters=None if batch.adapters is None else more(batch.adapters, 0),
        fresh=None if batch.fresh is None else np.append(batch.fresh, np.zeros(num_more, bool)),
    )


def without_states(batch: StepBatch) -> StepBatch:
    """Return the batch with sequences that neither read nor write recurrent states."""
    nowhere = np.full(len(batch.seq_lens), -1)
    return replace(batch, slots=nowhere, fresh=np.zeros(len(nowhere), bool))
