"""Plan a step's attention once for all layers, as items of work for the threads.

Sequences of the same shape form a **batch** and are computed together, in few calls. Their queries
are cut into **query tiles** that stay within a tile of keys. A decode is a query tile of one query.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops.backend import StepBatch
from mie.ops_cpu.attention.geometry import FAST_ROWS, SPLIT_SCORES, Form, Geometry
from mie.ops_cpu.attention.tiles import Segment, Tiles
from mie.ops_cpu.threads.shares import batches_of, shares

CACHED = 1 << 18
"""Elements of keys, values, queries or scores that stay in a core's L2 (1 MiB as float32)."""
GATHERED_SHORT = 1 << 19
"""Elements of keys that are gathered at once where each sequence has one tile."""
ITEM_SCORES = 1 << 19
"""Scores of a split that a query tile of one sequence computes at most."""
QUERY_TILES = 2
"""Minimum number of query tiles of a tile. More of them waste fewer products on hidden keys."""
PRODUCTS_PER_KEY = 1 << 10
"""Products that take as long as reading a key and a value of a KV head from memory."""
WORTH_SHARING = 1 << 22
"""Products of a layer (0.1 ms) from which two threads pay. For n it takes (n / 2)² as many."""
MAX_IMBALANCE = 1.25
"""The busiest thread's products, relative to the mean, from which items are cut."""


@dataclass(frozen=True, eq=False, slots=True)
class Split:
    """As many tiles of each sequence of a batch, at most a split."""

    sequences: Sequence[int]
    first_tiles: Ints
    """The number of each sequence's first tile."""
    num_tiles: int
    segments: list[Segment]
    is_held: bool
    """Whether a thread keeps the keys and values for several query tiles."""


@dataclass(kw_only=True, eq=False, slots=True)
class Span:
    """The tiles start … stop - 1 of a split, which an item's queries see."""

    split: Split
    start: int
    stop: int
    width: int
    """Number of positions scored of each tile, less than a tile only if the span is one tile."""
    is_seen: bool
    """Whether every query certainly sees a key of it."""
    caps: list[tuple[int, Floats]]
    """Tiles with hidden keys: (tile of the span, upper limits [sequences or 1, rows, width]).

    The last tile of decodes always has them, so that these may decode further into their blocks.
    """
    num_seen: int | None
    """The number of positions of the last tile that a single decode sees. It has no caps then."""

    def lengthen(self, lengths: Sequence[int], tile: int) -> None:
        """Read as far as these lengths, if each sequence decodes in its block without a window."""
        for segment in self.split.segments:
            segment.fill(lengths)
        if self.num_seen is not None:
            last = self.split.first_tiles.item(0) + self.stop - 1
            self.num_seen = lengths[self.split.sequences[0]] - last * tile
            if self.split.num_tiles == 1:
                self.width = self.split.segments[0].width
            return
        own = np.array([lengths[s] for s in self.split.sequences])
        for index, limits in self.caps:
            firsts = (self.split.first_tiles + self.start + index) * tile
            is_hidden = np.arange(self.width) >= (own - firsts)[:, None]
            limits[...] = np.where(is_hidden, -np.inf, np.nan)[:, None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A query tile of each sequence of a batch, for some KV heads. One thread computes it."""

    rows: Ints
    """The queries as indices into T [sequences, queries].

    A sequence with fewer queries repeats its first one as padding.
    """
    real: tuple[Ints, ...] | None
    """The queries that are no padding as (sequence, query), or None if all are real."""
    run: slice | None
    """The rows as a slice of T, or None if they are not adjacent in this order."""
    heads: slice
    form: Form
    spans: list[Span]
    num_products: int
    """The approximate number of products, or of products that take as long."""
    whole: Item | None = None
    """The item whose spans this one shares with others, which are combined afterwards."""
    first_span: int = 0
    """The index of the first span among those of the whole."""

    def cut(self, number: int) -> Iterator[Item]:
        """Cut into ``number`` items or fewer: by KV heads, and if these are few, by splits."""
        num_heads = self.heads.stop - self.heads.start
        by_splits = min(ceil_div(number, num_heads), len(self.spans))
        for heads in shares(self.heads.start, self.heads.stop, number):
            size = self.num_products * (heads.stop - heads.start) // num_heads
            part = replace(self, heads=heads, num_products=size)
            if by_splits == 1:
                yield part
                continue
            for own in shares(0, len(self.spans), by_splits):
                sizes = {"spans": self.spans[own], "num_products": size // by_splits}
                yield replace(part, whole=part, first_span=own.start, **sizes)


def estimate(counts: Sequence[int], lengths: Sequence[int], geometry: Geometry) -> int:
    """Return about how many products a layer takes, or products that take as long.

    Each sequence has a number of queries and a length.
    """
    by_query = geometry.num_rows * geometry.head_dim
    each = zip(counts, lengths, strict=True)
    return geometry.num_kv_heads * sum(n * max(PRODUCTS_PER_KEY, c * by_query) for c, n in each)


class Planner:
    """Plans the items of a step in all layers with the same window."""

    def __init__(
        self, batch: StepBatch, geometry: Geometry, window: int | None, *, is_batch_invariant: bool
    ) -> None:
        """Choose the form of prefills: a decode's if they have few rows or must give its bits."""
        g = self._geometry = geometry
        self._window = window
        self._tiles = Tiles(batch, g)
        self._starts: list[int] = batch.cu_seqlens_q.tolist()
        self._counts: list[int] = [stop - start for start, stop in pairwise(self._starts)]
        self._positions = [n - c for n, c in zip(self._tiles.lengths, self._counts, strict=True)]
        """The positions of the first queries."""
        self._splits = [list(self._splits_of(s)) for s in range(len(self._counts))]
        is_fast = not is_batch_invariant and max(self._counts) * g.heads_per_kv >= FAST_ROWS
        fast_form = Form(FAST_ROWS, g.heads_per_kv, transposes=True)
        self._prefill_form = fast_form if is_fast else g.prefill_form
        # Only a tile's first positions are multiplied where no query sees the others.
        shortens = not is_batch_invariant or g.short_tiles_are_exact
        self._width_step = g.width_step if shortens else g.tile
        self._reads_last_in_place = g.short_sums_are_exact

    def items(self, num_threads: int) -> list[Item]:
        """Return the items, largest first. Items that read the same keys are adjacent."""
        batches = [self._items_of(own) for own in self._batches(num_threads)]
        batches.sort(key=lambda items: max(item.num_products for item in items), reverse=True)
        return _cut_large([item for own in batches for item in own], num_threads)

    def _batches(self, num_threads: int) -> Iterator[list[int]]:
        """Batch sequences of the same shape, largest first, with equal work for all threads."""
        shapes: dict[tuple[int, ...], list[int]] = {}
        for s, count in enumerate(self._counts):
            if count:
                shapes.setdefault(self._shape_of(s), []).append(s)
        for alike in shapes.values():
            alike.sort(key=self._size, reverse=True)
            sizes = [self._size(s) for s in alike]
            most = SPLIT_SCORES if self._counts[alike[0]] == 1 else CACHED
            number = ceil_div(sum(sizes), most * num_threads) * num_threads
            for start, stop in pairwise([*batches_of(sizes, number), len(alike)]):
                yield alike[start:stop]

    def _shape_of(self, s: int) -> tuple[int, ...]:
        """Return what sequences that are computed together have in common."""
        count, position = self._counts[s], self._positions[s]
        if count == 1:
            return 1, *(stop - first for first, stop in self._splits[s])
        return count.bit_length(), position, (position + count - 1) // self._geometry.tile

    def _size(self, s: int) -> int:
        """Return the elements of a sequence's largest operand. A decode's are its scores."""
        g, count, length = self._geometry, self._counts[s], self._tiles.lengths[s]
        if count > 1:
            num_rows = count * self._prefill_form.rows_per_query
            return g.num_kv_heads * max(num_rows * max(length, g.head_dim), length * g.head_dim)
        first, stop = self._splits[s][0][0], self._splits[s][-1][1]
        positions = (stop - first) * g.tile
        if stop - first == 1:
            positions = self._width(length - first * g.tile)
        return g.num_kv_heads * g.num_rows * positions

    def _splits_of(self, s: int) -> Iterator[tuple[int, int]]:
        """Yield the tiles (first, stop) of each split of the positions that any query sees."""
        g, window = self._geometry, self._window
        begin = 0 if window is None else max(0, self._positions[s] + 1 - window)
        first, last = begin // g.tile, ceil_div(self._tiles.lengths[s], g.tile)
        while first < last:
            stop = min(last, (first // g.tiles_per_split + 1) * g.tiles_per_split)
            yield first, stop
            first = stop

    def _width(self, needed: int) -> int:
        """Return how many of a tile's positions are read if ``needed`` are needed."""
        return min(self._geometry.tile, ceil_div(needed, self._width_step) * self._width_step)

    def _items_of(self, chosen: Sequence[int]) -> list[Item]:
        """Return the items of a batch, largest first for each of its KV heads."""
        g, count = self._geometry, self._counts[chosen[0]]
        form = g.decode_form if count == 1 else self._prefill_form
        num_heads, size = g.num_kv_heads, ceil_div(g.tile, QUERY_TILES)
        if len(chosen) == 1 and count > 1:
            positions = max(stop - first for first, stop in self._splits[chosen[0]]) * g.tile
            if num_heads * positions * g.head_dim > CACHED:
                num_heads = 1
            while size > 1 and num_heads * positions * size * form.rows_per_query > ITEM_SCORES:
                size = ceil_div(size, 2)
        first = self._positions[chosen[0]]
        # Query tiles are counted from position 0, so that they stay within a tile of keys.
        bounds = [first, *range((first // size + 1) * size, first + count, size), first + count]
        splits = self._make_splits(chosen, is_held=len(bounds) > 2 or form.transposes)
        ends = reversed(list(pairwise(bounds)))
        items = [self._item(chosen, first, stop, form, splits) for first, stop in ends]
        if num_heads < g.num_kv_heads:
            parts = (part for item in items for part in item.cut(g.num_kv_heads))
            items = sorted(parts, key=lambda part: part.heads.start)
        return items

    def _make_splits(self, chosen: Sequence[int], *, is_held: bool) -> list[Split]:
        g, lengths = self._geometry, [self._tiles.lengths[s] for s in chosen]
        in_place = len(chosen) == self._counts[chosen[0]] == 1 and self._reads_last_in_place
        splits = []
        for ends in zip(*(self._splits[s] for s in chosen), strict=True):
            firsts, stops = zip(*ends, strict=True)
            num_tiles = stops[0] - firsts[0]
            filled = max(n - (stop - 1) * g.tile for n, stop in zip(lengths, stops, strict=True))
            most = GATHERED_SHORT if num_tiles == 1 else CACHED
            most //= g.num_kv_heads * g.head_dim
            if is_held:
                most = len(chosen) * num_tiles * g.tile
            starts = list(zip(chosen, firsts, strict=True))
            segments = self._tiles.segments(
                starts,
                num_tiles,
                self._width(filled),
                most,
                reads_last_in_place=in_place,
                width_of=self._width if self._width_step == g.block_size else None,
            )
            splits.append(Split(chosen, np.array(firsts), num_tiles, segments, is_held))
        return splits

    def _item(
        self, chosen: Sequence[int], first: int, stop: int, form: Form, splits: Sequence[Split]
    ) -> Item:
        """Return an item of the queries at positions first … stop - 1 of the first sequence."""
        g, longest = self._geometry, self._counts[chosen[0]]
        indices = np.arange(first, stop) - self._positions[chosen[0]]
        rows = np.array([self._starts[s] for s in chosen])[:, None] + indices
        real = None
        if any(self._counts[s] < longest for s in chosen):
            is_real = indices < np.array([self._counts[s] for s in chosen])[:, None]
            rows -= np.where(is_real, 0, indices)
            real = np.nonzero(is_real)
        # All prefills of a batch begin at one position.
        places = [self._positions[s] for s in (chosen if longest == 1 else chosen[:1])]
        positions = np.array(places)[:, None] + indices
        spans = [span for split in splits for span in self._spans(split, positions, form)]
        num_keys = sum((span.stop - span.start) * span.width for span in spans)
        by_key = max(PRODUCTS_PER_KEY, len(indices) * form.rows_per_query * g.head_dim)
        is_run = real is None and (len(rows) == 1 or bool((np.diff(rows.ravel()) == 1).all()))
        return Item(
            rows=rows,
            real=real,
            run=slice(rows.item(0), rows.item(-1) + 1) if is_run else None,
            heads=slice(0, g.num_kv_heads),
            form=form,
            spans=spans,
            num_products=g.num_kv_heads * len(chosen) * num_keys * by_key,
        )

    def _spans(self, split: Split, positions: Ints, form: Form) -> Iterator[Span]:
        """Yield what the queries at ``positions`` [sequences or 1, queries] see of the split."""
        g, window = self._geometry, self._window
        seen = positions - split.first_tiles[: len(positions), None] * g.tile
        lowest, highest = int(seen.min()), int(seen.max())
        start = 0 if window is None else max(0, lowest + 1 - window) // g.tile
        stop = min(split.num_tiles, highest // g.tile + 1)
        if start >= stop:
            return
        width = self._width(highest + 1 - start * g.tile) if stop - start == 1 else g.tile
        num_rows = ceil_div(seen.shape[1] * form.rows_per_query, form.num_rows) * form.num_rows
        query = np.minimum(np.arange(num_rows) // form.rows_per_query, seen.shape[1] - 1)
        caps, num_seen = [], None
        if seen.size == 1 and window is None:
            num_seen = highest + 1 - (stop - 1) * g.tile
        for tile in range(start, stop if num_seen is None else start):
            first = tile * g.tile
            is_behind = window is not None and first <= highest - window
            if first + width - 1 < lowest and not is_behind:
                continue
            key = np.arange(first, first + width)
            is_hidden = key > seen[..., None]
            if window is not None:
                is_hidden |= key <= seen[..., None] - window
            limits = np.where(is_hidden, -np.inf, np.nan).astype(g.dtype)
            caps.append((tile - start, limits.take(query, 1)))
        is_seen = window is None and lowest >= 0
        yield Span(
            split=split,
            start=start,
            stop=stop,
            width=width,
            is_seen=is_seen,
            caps=caps,
            num_seen=num_seen,
        )


def _cut_large(items: list[Item], num_threads: int) -> list[Item]:
    """Cut the items that exceed half of a thread's share, if the threads would get unequal work."""
    total, loads = sum(item.num_products for item in items), [0] * num_threads
    for size in sorted((item.num_products for item in items), reverse=True):
        loads[loads.index(min(loads))] += size
    if max(loads) * num_threads <= MAX_IMBALANCE * total:
        return items
    numbers = (min(num_threads, ceil_div(2 * n.num_products * num_threads, total)) for n in items)
    return [part for item, number in zip(items, numbers, strict=True) for part in item.cut(number)]
