"""Launch paged attention over one cache, with decodes and prompts apart."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Array, KVCacheShape
from mie.ops_gpu.arena import Counters, Empty, fresh
from mie.ops_gpu.arrays import kernel_type, next_power_of_two
from mie.ops_gpu.batch import ANY_LENGTH, DeviceBatch, padded_length, padded_seqs
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.dispatch import (
    MAX_SPLITS,
    SPLIT_TOKENS,
    TILE_TOKENS,
    WARPS,
    DecodeKernel,
    PrefillKernel,
    PrefillSplits,
    decode_kernel,
    prefill_kernel,
    prefill_splits,
)
from mie.ops_gpu.launcher import Launcher

STREAM_BLOCKS_PER_MULTIPROCESSOR = 3
"""Maximum number of blocks on a multiprocessor, given the kernel's registers."""


class AttentionCall:
    """One layer's attention: its arrays, and the sizes that follow from them.

    q, out [T, Hq, Dh]; kv and scales: a layer of `kv_cache.KVCache`; sinks [Hq].
    """

    def __init__(
        self,
        *,
        q: Array,
        kv: Array,
        scales: Array | None,
        out: Array,
        batch: DeviceBatch,
        window: int | None,
        soft_cap: float | None,
        sinks: Array | None,
    ) -> None:
        """Drop a window that every sequence of the step fits."""
        self.q, self.kv, self.scales, self.out, self.batch = q, kv, scales, out, batch
        self.sinks = sinks
        self.window = None if window is not None and window >= batch.max_len else window
        self.num_heads, self.head_dim = int(q.shape[1]), int(q.shape[2])
        self.num_kv_heads, self.block_size = int(kv.shape[2]), int(kv.shape[3])
        self.group = self.num_heads // self.num_kv_heads
        self.table_width = int(batch.block_tables.shape[1])
        # Scores are in base 2, because exp(x) is exp2(x * log2(e)).
        self.is_capped = soft_cap is not None
        self.cap = np.float32((soft_cap or 0) * math.log2(math.e))
        factor = 1 / soft_cap if soft_cap else math.log2(math.e)
        self.scale = np.float32(factor / math.sqrt(self.head_dim))

    @property
    def max_splits(self) -> int:
        """The maximum number of splits of a sequence of the step."""
        max_len = self.batch.max_len
        return max_splits(min(max_len, (self.window or max_len) + 15))

    @property
    def max_pieces(self) -> int:
        """The maximum number of pieces of a streamed sequence, which begin with whole tiles.

        A sequence with fewer pieces has the least, whatever the maximum, so its pieces do not
        depend on its batch.
        """
        max_len = self.batch.max_len
        return max_splits(min(max_len, (self.window or max_len) + TILE_TOKENS - 1))

    def arguments(
        self, sequences: Array, others: Sequence[Array | None], sizes: Sequence[int]
    ) -> tuple[Any, ...]:
        """Return a kernel's arguments: the arrays of all kernels, others, and its numbers."""
        batch = self.batch
        tables = batch.block_tables, batch.seq_lens, batch.cu_seqlens_q, sequences, self.sinks
        numbers = *map(np.int32, sizes), self.scale, self.cap
        return (self.q, self.kv, self.scales, *tables, *others, *numbers)


def max_splits(num_tokens: int) -> int:
    """Return the number of splits of a sequence with this many tokens to see."""
    return min(MAX_SPLITS, ceil_div(num_tokens, SPLIT_TOKENS))


class PagedAttention:
    """Launches the attention kernels.

    With ``is_deterministic`` a sequence's result does not depend on its batch. A decode then has
    pieces that depend on the sequence alone. Without it, decodes are shared out evenly over the
    chip where a kernel for that exists, and several blocks share the keys of a few queries.
    """

    def __init__(
        self, launcher: Launcher, chip: Chip, is_deterministic: bool, empty: Empty | None = None
    ) -> None:
        """Allocate results and partial results with ``empty``, or as new arrays by default."""
        self._launcher = launcher
        self._chip = chip
        self._is_deterministic = is_deterministic
        self._empty = empty or fresh(launcher.xp)
        self._counters = Counters(launcher.xp)
        self.follows_lengths = True
        """Whether launches of decodes depend on the maximum length.

        Streamed decodes launch the same blocks for all lengths. The first call tells which they
        are.
        """

    def __call__(
        self,
        q: Array,
        kv: Array,
        batch: DeviceBatch,
        window: int | None,
        scales: Array | None = None,
        soft_cap: float | None = None,
        sinks: Array | None = None,
    ) -> Array:
        """Compute `ops.attention.paged_attention` over one layer.

        ``scales`` are the scales of a quantised cache.
        """
        assert kv.size // kv.shape[-1] < 1 << 32, "the kernels count rows in 32 bits"
        out = self._empty("attention", q.shape, q.dtype)
        arrays = {"q": q, "kv": kv, "scales": scales, "sinks": sinks, "out": out}
        call = AttentionCall(**arrays, batch=batch, window=window, soft_cap=soft_cap)
        kernel = decode_kernel(
            kernel_type(call.q),
            call.head_dim,
            call.group,
            call.block_size,
            stored=kernel_type(call.kv),
            shared_bytes=self._chip.shared_bytes,
            is_capped=call.is_capped,
        )
        self.follows_lengths = kernel.kind != "stream"
        if batch.decodes.size:
            decode = self._decode_stream if kernel.kind == "stream" else self._decode_splits
            decode(call, kernel)
        if batch.prefills.size:
            self._prefill(call)
        return out

    def partial_bytes(
        self,
        num_seqs: int,
        max_len: int,
        num_heads: int,
        shape: KVCacheShape,
        *,
        element: str,
        stored: str,
    ) -> int:
        """Return the bytes of the partial results of the largest padded step, in an arena."""
        kernel = self.decode_kernel(num_heads, shape, element, stored)
        if kernel.kind == "stream" and self._is_deterministic:
            heads, splits, rows = num_heads, MAX_SPLITS, padded_seqs(num_seqs)
        elif kernel.kind == "stream":
            heads, splits, rows = 8 * kernel.head_tiles, 1, 2 * self._stream_blocks(kernel)
        else:
            heads, splits = num_heads, max_splits(padded_length(max_len))
            rows = padded_seqs(num_seqs) if splits > 1 else 0
        prefill = prefill_kernel(element, shape.head_dim, shape.block_size, stored=stored)
        may_split = prefill_splits(None, 1, self._prefill_blocks(prefill)).count > 1
        prefill_rows = prefill.rows * self._prefill_blocks(prefill) if may_split else 0
        sums = max(rows * heads * splits, prefill_rows)  # both kinds use the same buffers
        sizes = (next_power_of_two(size) for size in (sums * shape.head_dim, sums) if size)
        return 4 * sum(sizes)

    def decode_kernel(
        self, num_heads: int, shape: KVCacheShape, element: str, stored: str
    ) -> DecodeKernel:
        """Return the kernel of decodes with a cache of this shape."""
        return decode_kernel(
            element,
            shape.head_dim,
            num_heads // shape.num_kv_heads,
            shape.block_size,
            stored=stored,
            shared_bytes=self._chip.shared_bytes,
        )

    def _stream_blocks(self, kernel: DecodeKernel) -> int:
        """Return the number of blocks that the chip holds at once."""
        return self._chip.resident_blocks(kernel.shared_bytes, STREAM_BLOCKS_PER_MULTIPROCESSOR)

    def _prefill_blocks(self, kernel: PrefillKernel) -> int:
        """Return the number of blocks up to which a launch may be split."""
        if self._is_deterministic or not kernel.blocks_per_multiprocessor:
            return 1
        return self._chip.resident_blocks(kernel.shared_bytes, kernel.blocks_per_multiprocessor)

    def _decode_splits(self, call: AttentionCall, kernel: DecodeKernel) -> None:
        decodes, num_splits = call.batch.decodes, call.max_splits
        partials: list[Array | None] = [None, None, None]
        if num_splits > 1:  # without splits the kernel writes the output itself
            partials = [*self._partials(decodes.size, call.num_heads, num_splits, call)]
            partials.append(self._counters.zeros(decodes.size * call.num_kv_heads))
        splitting = [SPLIT_TOKENS, MAX_SPLITS, call.window or 0]
        sizes = [call.table_width, call.block_size, *splitting]
        attend = self._launcher.kernel("paged_decode.cu", "paged_decode" + kernel.parameters)
        attend(
            (call.num_kv_heads, decodes.size, num_splits),
            (32 * WARPS,),
            call.arguments(decodes, [call.out, *partials], sizes),
            shared_bytes=kernel.shared_bytes,
        )

    def _decode_stream(self, call: AttentionCall, kernel: DecodeKernel) -> None:
        decodes, num_blocks = call.batch.decodes, self._stream_blocks(kernel)
        max_pieces = call.max_pieces if self._is_deterministic else 0
        if max_pieces:
            partials = self._partials(decodes.size, call.num_heads, max_pieces, call)
        else:
            partials = self._partials(2 * num_blocks, 8 * kernel.head_tiles, 1, call)
        tiles = self._tiles(call.batch, call.window)
        arrived = self._counters.zeros(decodes.size * call.num_kv_heads)
        name = "paged_decode_stream"
        sizes = [decodes.size, call.num_kv_heads, call.group, call.table_width, call.block_size]
        sizes += [call.window or 0, max_pieces]
        attend = self._launcher.kernel(f"{name}.cu", name + kernel.parameters)
        attend(
            (num_blocks,),
            (32 * WARPS,),
            call.arguments(decodes, [tiles, call.out, *partials, arrived], sizes),
            shared_bytes=kernel.shared_bytes,
        )

    def _tiles(self, batch: DeviceBatch, window: int | None) -> Array:
        """Return the prefix sums of the decodes' key tiles from the beginning of the window.

        Layers with the same window share them.
        """
        if window is None:
            return batch.decode_tiles
        if window not in batch.window_tiles:
            num_decodes = batch.decodes.size
            tiles = self._empty(f"tiles {window}", (num_decodes + 1,), np.dtype(np.int32))
            count = self._launcher.kernel("paged_decode_stream.cu", "count_tiles")
            sizes = map(np.int32, [num_decodes, TILE_TOKENS, window])
            count((1,), (32,), (batch.seq_lens, batch.decodes, tiles, *sizes))
            batch.window_tiles[window] = tiles
        return batch.window_tiles[window]

    def _partials(self, rows: int, heads: int, splits: int, call: AttentionCall) -> list[Array]:
        """Allocate partial results [rows, heads, splits, Dh] and their log-sum-exps.

        Both are flat in the arena, so that their sizes are rounded up to powers of two. A captured
        step may keep an old buffer. A buffer that replaces it is so at least twice as large, and
        all of them together are smaller than twice the last.
        """
        shapes = ((rows, heads, splits, call.head_dim), (rows, heads, splits))
        names = ("partial", "partial_lse")
        return [
            self._empty(name, (math.prod(shape),), np.dtype(np.float32)).reshape(shape)
            for name, shape in zip(names, shapes, strict=True)
        ]

    def _prefill(self, call: AttentionCall) -> None:
        batch, kernel = call.batch, self._prefill_kernel(call)
        num_tiles = ceil_div(batch.max_prefill_queries * call.group, kernel.rows)
        grid = (num_tiles, batch.prefills.size, call.num_kv_heads)
        numbers = [call.group, call.table_width, call.block_size, call.window or 0]
        partials: list[Array | None] = []
        if kernel.blocks_per_multiprocessor:
            splits = self._splits_of_prefill(call, kernel, math.prod(grid))
            partials = self._parts_of_prefill(call, kernel, math.prod(grid), splits.count)
            grid = (splits.count * num_tiles, *grid[1:])
            numbers += [splits.tokens, splits.count]
        attend = self._launcher.kernel(f"{kernel.name}.cu", kernel.name + kernel.parameters)
        attend(
            grid,
            (32 * WARPS,),
            call.arguments(batch.prefills, [call.out, *partials], numbers),
            shared_bytes=kernel.shared_bytes,
        )

    def _prefill_kernel(self, call: AttentionCall) -> PrefillKernel:
        """Return the wide kernel for launches that keep the chip busy with it, else the other.

        They take more than half of the blocks that the chip holds, so they have no splits. And a
        multiprocessor holds two such blocks, because one warp a scheduler waits too often.
        """
        wide, narrow = (
            prefill_kernel(
                kernel_type(call.q),
                call.head_dim,
                call.block_size,
                stored=kernel_type(call.kv),
                is_capped=call.is_capped,
                is_wide=is_wide,
            )
            for is_wide in (True, False)
        )
        # A captured step allows for any chunk to have all tokens, of which there are no more.
        num_tokens = call.q.shape[0] - call.batch.decodes.size
        num_blocks = ceil_div(num_tokens * call.group, wide.rows) * call.num_kv_heads
        resident = self._chip.resident_blocks(wide.shared_bytes, 2)
        fits = resident == 2 * self._chip.num_multiprocessors
        return wide if fits and 2 * num_blocks > resident else narrow

    def _splits_of_prefill(
        self, call: AttentionCall, kernel: PrefillKernel, num_blocks: int
    ) -> PrefillSplits:
        """Return the splits of a launch that has ``num_blocks`` without them."""
        seen = call.batch.max_prefill_len
        if call.window is not None:  # of a block's rows, from the tile in which the window begins
            seen = min(seen, call.window + kernel.rows // call.group + TILE_TOKENS)
        known = None if seen == ANY_LENGTH else seen
        return prefill_splits(known, num_blocks, self._prefill_blocks(kernel))

    def _parts_of_prefill(
        self, call: AttentionCall, kernel: PrefillKernel, num_tiles: int, num_splits: int
    ) -> list[Array | None]:
        """Return partial results of that many tiles of rows, and the counters of the tiles.

        All launches with splits get as much as the largest, so that none allocates later.
        """
        if num_splits == 1:
            return [None, None, None]
        most = max(num_tiles * num_splits, self._prefill_blocks(kernel))
        partials = self._partials(most, kernel.rows, 1, call)
        return [*partials, self._counters.zeros(most)]
