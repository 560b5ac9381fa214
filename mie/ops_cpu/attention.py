"""Compute `mie.ops.attention` over the paged KV cache, for many sequences in few NumPy calls.

A step's attention is planned once for all layers, as items that the threads share:

* `Tiles` scores queries against tiles of 64 positions, and combines each query's tiles. Every
  product has the same shape, so a query's bits depend on its own keys only. Decodes are computed
  like this, and with ``is_batch_invariant`` so are prompts.
* `Rows` scores many queries of a prompt in one product with all keys that they see, as fast as BLAS
  can. The last bits then depend on how the prompt is cut into chunks.

Blocks that are adjacent in memory are read in place. Others are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mie.base.arithmetic import ceil_div
from mie.ops.activation import soft_cap as capped
from mie.ops.arrays import Bools, Floats, Ints
from mie.ops.attention import causal_mask, sink_weights
from mie.ops.backend import StepBatch
from mie.ops_cpu.kv_cache import head_major
from mie.ops_cpu.workers import Workers

TILE = 64
"""Positions of a tile, rounded to whole blocks."""
CACHED = 1 << 18
"""Elements of keys that are read at a time. As float32, they and their values fill a 2 MiB L2."""
SCORES = 1 << 19
"""Maximum scores of a product of prompts."""
WORTH_SHARING = 1 << 22
"""Multiplications of a layer's scores from which another thread saves more than it costs."""
KEYS, VALUES = 0, 1
"""Indices into the second axis of the cache."""


class Item(Protocol):
    """A part of a step's attention, for some KV heads. One thread computes it."""

    work: int
    """The approximate number of multiplications of its scores."""

    def run(
        self,
        q: Floats,
        keys: Floats,
        values: Floats,
        out: Floats,
        soft_cap: float | None,
        sinks: Floats | None,
    ) -> None:
        """Attend in one layer: q, out [T, Hkv, G, Dh]; keys, values [Hkv, N, B, Dh]."""


class Attention:
    """Computes attention with the threads of ``workers``. It plans a step at its first layer."""

    def __init__(self, workers: Workers, *, is_batch_invariant: bool) -> None:
        self._workers = workers
        self._is_batch_invariant = is_batch_invariant
        self._batches: dict[int, StepBatch] = {}  # by group of layers
        self._plans: dict[tuple[int, int, int | None], list[Item]] = {}

    def __call__(
        self,
        q: Floats,
        cache: Floats,
        layer: int,
        batch: StepBatch,
        window: int | None,
        soft_cap: float | None = None,
        sinks: Floats | None = None,
    ) -> Floats:
        """Compute `ops.attention.paged_attention` over a cache of `kv_cache.new_cache`.

        The scale is 1/sqrt(Dh). Return a new array [T, Hq, Dh].
        """
        if self._batches.get(batch.group) is not batch:
            self._batches[batch.group] = batch
            self._plans = {key: plan for key, plan in self._plans.items() if key[0] != batch.group}
        key = batch.group, q.shape[1], window
        if key not in self._plans:
            self._plans[key] = self._plan(q, cache, batch, window)
        items = self._plans[key]
        keys, values = head_major(cache)[layer]
        out = np.empty(q.shape, q.dtype)
        by_head = len(q), len(keys), -1, q.shape[2]
        q, grouped = (q * q.dtype.type(q.shape[2] ** -0.5)).reshape(by_head), out.reshape(by_head)

        def work(item: Item) -> None:
            item.run(q, keys, values, grouped, soft_cap, sinks)

        num_threads = max(1, sum(item.work for item in items) // WORTH_SHARING)
        self._workers.share(work, items, num_threads)
        return out

    def forget(self) -> None:
        """Free the plan of the last step."""
        self._batches, self._plans = {}, {}

    def _plan(self, q: Floats, cache: Floats, batch: StepBatch, window: int | None) -> list[Item]:
        """Return the items of all layers with this window, the largest first."""
        planner = _Planner(q, cache, batch, window, self._workers.num_threads)
        counts = np.diff(batch.cu_seqlens_q)
        decodes, chunks = np.flatnonzero(counts == 1), np.flatnonzero(counts > 1).tolist()
        items: list[Item] = list(planner.decodes(decodes, may_narrow=not self._is_batch_invariant))
        for s in chunks:
            items += planner.tiles(s) if self._is_batch_invariant else planner.rows(s)
        return sorted(items, key=lambda item: item.work, reverse=True)


class _Planner:
    """Cuts a step's attention into items."""

    def __init__(
        self, q: Floats, cache: Floats, batch: StepBatch, window: int | None, num_threads: int
    ) -> None:
        self._num_blocks, self._block_size, self._num_heads, self._head_dim = cache.shape[2:]
        self._group = q.shape[1] // self._num_heads
        self._num_threads = num_threads
        self._tile = self._block_size * max(1, TILE // self._block_size)
        self._window = window
        self._starts: list[int] = batch.cu_seqlens_q.tolist()
        self._lengths = batch.seq_lens
        self._tables = batch.block_tables

    def decodes(self, chosen: Ints, *, may_narrow: bool) -> Iterator[Tiles]:
        """Yield items for sequences with one query, the shortest first.

        With ``may_narrow``, sequences of less than a tile read no more positions than the longest
        of them needs.
        """
        chosen = chosen[np.argsort(self._lengths[chosen], kind="stable")]
        positions = self._lengths[chosen] - 1
        firsts, lasts = self._tiles_of(positions)
        per_tile = self._num_heads * self._tile * self._head_dim
        total = int((lasts - firsts).sum()) * per_tile
        most = min(CACHED, ceil_div(total, self._num_threads))  # every thread gets some of them
        for own in _runs(((lasts - firsts) * per_tile).tolist(), most):
            width, longest = self._tile, int(positions[own.stop - 1]) + 1
            if may_narrow and longest <= width:
                width = ceil_div(longest, self._block_size) * self._block_size
            counts = lasts[own] - firsts[own]
            query_of = np.repeat(np.arange(len(counts)), counts)
            starts = np.cumsum(counts) - counts
            tiles = np.arange(len(query_of)) - (starts - firsts[own])[query_of]
            rows = np.array([self._starts[s] for s in chosen[own].tolist()])
            hidden = empty = self._hidden(positions[own][query_of], tiles, width)
            blocks = self._blocks(chosen[own][query_of], tiles, width)
            for heads in self._heads(len(query_of) * width * self._head_dim, most):
                work = (heads.stop - heads.start) * hidden.size * self._group * self._head_dim
                yield Tiles(rows, query_of, starts, blocks, hidden, empty, heads, work)

    def tiles(self, s: int) -> Iterator[Tiles]:
        """Yield items for the queries of a sequence that see the same tiles."""
        begin, end = self._starts[s : s + 2]
        positions = np.arange(self._lengths[s] - (end - begin), self._lengths[s])
        firsts, lasts = self._tiles_of(positions)
        changes = np.flatnonzero(np.diff(firsts) + np.diff(lasts)) + 1
        for own in np.split(np.arange(len(positions)), changes):
            tiles = np.arange(firsts[own[0]], lasts[own[0]])
            hidden = self._hidden(np.repeat(positions[own], len(tiles)), np.tile(tiles, len(own)))
            of_queries = hidden.reshape(len(own), len(tiles), -1)
            empty: Bools = np.logical_and.reduce(of_queries, axis=0)
            starts = np.arange(len(own)) * len(tiles)
            blocks = self._blocks(np.full(len(tiles), s), tiles)
            for head in range(self._num_heads):
                work = hidden.size * self._group * self._head_dim
                heads = slice(head, head + 1)
                yield Tiles(begin + own, None, starts, blocks, hidden, empty, heads, work)

    def rows(self, s: int) -> Iterator[Rows]:
        """Yield items for the queries of a sequence, each with as many as `SCORES` allows."""
        begin, end = self._starts[s : s + 2]
        length = int(self._lengths[s])
        first = length - (end - begin)
        num_heads = min(self._num_heads, max(1, SCORES // (TILE * self._group * length)))
        size = max(1, SCORES // (num_heads * self._group * length))
        size = ceil_div(end - begin, ceil_div(end - begin, size))
        for at in range(first, length, size):
            stop = min(at + size, length)
            start = 0 if self._window is None else max(0, at - self._window + 1)
            mask = causal_mask(at - start, stop - at, self._window)
            first_block, last_block = start // self._block_size, ceil_div(stop, self._block_size)
            read = _Blocks(self._tables[s, first_block:last_block])
            positions = slice(
                start - first_block * self._block_size, stop - first_block * self._block_size
            )
            for head in range(0, self._num_heads, num_heads):
                heads = slice(head, min(head + num_heads, self._num_heads))
                work = (heads.stop - head) * self._group * mask.size * self._head_dim
                rows = slice(begin + at - first, begin + stop - first)
                yield Rows(rows, read, positions, ~mask, heads, work)

    def _tiles_of(self, positions: Ints) -> tuple[Ints, Ints]:
        """Return the first tile and the end of the tiles that a query at each position sees."""
        start = np.zeros_like(positions)
        if self._window is not None:
            start = np.maximum(0, positions - self._window + 1)
        return start // self._tile, positions // self._tile + 1

    def _hidden(self, positions: Ints, tiles: Ints, width: int | None = None) -> Bools:
        """Return which positions of some tiles are hidden from a query, as [queries, width].

        Each query has a position and a tile.
        """
        keys = (tiles * self._tile)[:, None] + np.arange(width or self._tile)
        hidden: Bools = keys > positions[:, None]
        if self._window is not None:
            hidden |= keys <= (positions - self._window)[:, None]
        return hidden

    def _blocks(self, sequences: Ints, tiles: Ints, width: int | None = None) -> _Blocks:
        """Return the blocks of some sequences' tiles."""
        per_tile = self._tile // self._block_size
        index = (tiles * per_tile)[:, None] + np.arange((width or self._tile) // self._block_size)
        last = ((self._lengths[sequences] - 1) // self._block_size)[:, None]
        ids = self._tables[sequences[:, None], np.minimum(index, last)]
        # Past a sequence's end any block will do. Those after its last one may be read in place.
        ids = np.minimum(ids + np.maximum(0, index - last), self._num_blocks - 1)
        return _Blocks(ids.ravel())

    def _heads(self, size: int, most: int) -> Iterator[slice]:
        """Yield slices of the KV heads, of which each has ``size`` elements of keys."""
        number = max(1, min(self._num_heads, most // size))
        for head in range(0, self._num_heads, number):
            yield slice(head, min(head + number, self._num_heads))


def _runs(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Cut into runs whose sizes sum to at most ``most``, or of one that is larger."""
    begin, total = 0, 0
    for at, size in enumerate(sizes):
        if at > begin and total + size > most:
            yield slice(begin, at)
            begin, total = at, 0
        total += size
    if sizes:
        yield slice(begin, len(sizes))


class _Blocks:
    """Some blocks of the cache, which are read in place if they are adjacent."""

    def __init__(self, ids: Ints) -> None:
        is_run = bool((np.diff(ids) == 1).all())
        self._run = slice(int(ids[0]), int(ids[-1]) + 1) if is_run else None
        self._ids = ids

    def read(self, plane: NDArray[Any], heads: slice, dtype: np.dtype[Any]) -> Floats:
        """Return the vectors of a plane [Hkv, N, B, Dh] in ``dtype``, as [heads, positions, Dh]."""
        own = plane[heads]
        blocks = own.take(self._ids, 1) if self._run is None else own[:, self._run]
        return blocks.reshape(len(blocks), -1, plane.shape[-1]).astype(dtype, copy=False)


class Tiles:
    """Queries that are scored tile by tile.

    A query and one of its tiles are a pair. The pairs of a query are adjacent.
    """

    def __init__(
        self,
        rows: Ints,
        query_of: Ints | None,
        starts: Ints,
        blocks: _Blocks,
        hidden: Bools,
        empty: Bools,
        heads: slice,
        work: int,
    ) -> None:
        """Describe the queries ``rows`` of T [queries].

        ``query_of`` [pairs] is the query of each pair, where each has tiles of its own, or None
        where all queries see the same tiles. ``starts`` [queries] is each query's first pair.
        ``hidden`` [pairs, positions] are not seen, and ``empty`` [tiles, positions] are seen by no
        query.
        """
        self._rows, self._query_of, self._starts = rows, query_of, starts
        self._blocks, self._heads = blocks, heads
        self._hidden = hidden[:, None] if hidden.any() else None
        self._empty, self._num_pairs = empty, len(hidden)
        self._pair_query = np.repeat(np.arange(len(rows)), np.diff([*starts, len(hidden)]))
        self.work = work

    def run(
        self,
        q: Floats,
        keys: Floats,
        values: Floats,
        out: Floats,
        soft_cap: float | None,
        sinks: Floats | None,
    ) -> None:
        """Attend in one layer."""
        dtype, head_dim, width = q.dtype, q.shape[-1], self._empty.shape[1]
        own = q[self._rows, self._heads].swapaxes(0, 1)  # [heads, queries, G, Dh]
        num_heads, num_queries = own.shape[:2]
        tiles: tuple[int, ...] = (num_heads, -1, width, head_dim)
        if self._query_of is None:
            own, tiles = own[:, :, None], (num_heads, 1, -1, width, head_dim)
        else:
            own = own.take(self._query_of, 1)
        k = self._blocks.read(keys, self._heads, dtype).reshape(tiles)
        weights = np.matmul(own, k.swapaxes(-1, -2))
        if soft_cap is not None:
            weights = capped(weights, soft_cap)
        scores = weights.reshape(num_heads, self._num_pairs, -1, width)  # in the same memory
        if self._hidden is not None:
            np.copyto(scores, -np.inf, where=self._hidden)
        largest = scores.max(-1)
        scores -= largest[..., None]
        np.exp(scores, out=scores)
        total = scores.sum(-1)
        v = self._blocks.read(values, self._heads, dtype).reshape(tiles)
        attended = np.matmul(weights, v)
        if not np.isfinite(attended).all():
            # The weight of an unseen slot is 0, but it may hold NaN, and 0 * NaN is NaN.
            attended = np.matmul(weights, np.where(self._empty[..., None], dtype.type(0), v))
        attended = attended.reshape(*total.shape, head_dim)
        over_all = largest
        if self._num_pairs > num_queries:
            over_all = np.maximum.reduceat(largest, self._starts, 1)
            scale = np.exp(largest - over_all.take(self._pair_query, 1))
            total = np.add.reduceat(total * scale, self._starts, 1)
            attended = np.add.reduceat(attended * scale[..., None], self._starts, 1)
        if sinks is not None:
            own_sinks = sinks.reshape(len(keys), 1, -1)[self._heads]
            total = total + sink_weights(own_sinks, over_all)
        attended /= total[..., None]
        out[self._rows, self._heads] = attended.swapaxes(0, 1)


class Rows:
    """Adjacent queries of a prompt, scored in one product for each KV head."""

    def __init__(
        self, rows: slice, blocks: _Blocks, positions: slice, hidden: Bools, heads: slice, work: int
    ) -> None:
        """Describe the queries ``rows`` of T, which see ``positions`` of the blocks.

        ``hidden`` [queries, positions] says which of them a query does not see.
        """
        self._rows, self._heads = rows, heads
        self._blocks, self._positions = blocks, positions
        self._hidden = hidden[:, None]
        self.work = work

    def run(
        self,
        q: Floats,
        keys: Floats,
        values: Floats,
        out: Floats,
        soft_cap: float | None,
        sinks: Floats | None,
    ) -> None:
        """Attend in one layer."""
        own = q[self._rows, self._heads].swapaxes(0, 1)
        num_heads, num_queries, group, head_dim = own.shape
        k = self._blocks.read(keys, self._heads, q.dtype)[:, self._positions]
        scores = own.reshape(num_heads, -1, head_dim) @ k.swapaxes(1, 2)
        if soft_cap is not None:
            scores = capped(scores, soft_cap)
        by_query = scores.reshape(num_heads, num_queries, group, -1)
        np.copyto(by_query, -np.inf, where=self._hidden)
        largest = scores.max(-1, keepdims=True)
        scores -= largest
        np.exp(scores, out=scores)
        total = scores.sum(-1, keepdims=True)
        if sinks is not None:
            own_sinks = np.tile(sinks.reshape(len(keys), -1)[self._heads], (1, num_queries))
            total += sink_weights(own_sinks[..., None], largest)
        attended = scores @ self._blocks.read(values, self._heads, q.dtype)[:, self._positions]
        attended /= total
        out[self._rows, self._heads] = attended.reshape(own.shape).swapaxes(0, 1)
