"""Compute the items of a plan.

A query's products have one form in any item, and tiles and splits are summed in order. So its bits
do not depend on the item. A tile that it does not see adds exact zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats, Ints
from mie.ops_cpu.allocator import Scratch
from mie.ops_cpu.attention.geometry import Geometry
from mie.ops_cpu.attention.plan import Item, Span
from mie.ops_cpu.attention.reader import KEYS, VALUES, SegmentReader

Readers = list[SegmentReader]
"""The readers of a split."""


class Operands(NamedTuple):
    """The operands of a segment's products. P is the number of products for each tile."""

    reader: SegmentReader
    keys: Floats  # [L or 1, Hkv, tiles, 1, Dh, width]
    values: Floats  # [L or 1, Hkv, tiles, 1, width, Dh]
    queries: Floats  # [Hkv, tiles or 1, P, rows, Dh]
    scores: Floats  # [Hkv, tiles, P, rows, width]
    weighted: Floats  # [Hkv, tiles, P, rows, Dh]

    def filled(self) -> Operands:
        """Return the operands of the second product, up to the last slot with a token.

        The weight of another slot is 0, but 0 * NaN is NaN.
        """
        filled = self.reader.filled
        if filled is None:
            return self
        values = self.values[..., :filled, :]
        return self._replace(scores=self.scores[..., :filled], values=values)


class BoundSpan:
    """A span with scratch memory: all views that its computation needs."""

    def __init__(
        self, span: Span, readers: Readers, queries: Floats, scratch: Scratch, *results: Floats
    ) -> None:
        """Prepare for queries [Hkv, tiles or 1, P, rows of a product, Dh].

        The results are the largest scores and the sums of weights [Hkv, sequences, rows], and the
        weighted sums of values [Hkv, sequences, rows, Dh].
        """
        self._span, self._readers, self._scratch = span, readers, scratch
        self._queries = queries
        self._largest, self._total, self._attended = results
        self._held = [reader for reader in readers if reader.is_held]
        self._widths: list[int] = []
        self.lengthen()

    def lengthen(self) -> None:
        """Follow the span, whose last tile is filled further."""
        widths = [reader.width for reader in self._readers]
        if widths != self._widths:
            self._bind()
            self._widths = widths
        self._filled = [each.filled() for each in self._operands]
        num_seen = self._span.num_seen
        self._hidden = None if num_seen is None else self._scores[:, -1, ..., num_seen:]

    def _bind(self) -> None:
        """Make the views of the positions that are read."""
        span, scratch, queries = self._span, self._scratch, self._queries
        num_heads, num_sequences, num_rows, head_dim = self._attended.shape
        num_tiles, first = span.stop - span.start, span.start * num_sequences
        by_row = num_heads, num_tiles, num_sequences, num_rows
        self._scores = scores = scratch.take("scores", *by_row, span.width)
        if num_tiles > 1:
            lanes = scratch.take("lanes", num_heads, num_sequences, num_rows, span.width)
            weighted = scratch.take("weighted", *by_row, head_dim)
        else:
            lanes, weighted = scores[:, 0], self._attended[:, None]
        self._lanes, self._weighted, self._is_one_tile = lanes, weighted, num_tiles == 1
        # NumPy prepares a call faster for views with fewer axes.
        self._flat_lanes, self._flat_largest = lanes.reshape(-1), self._largest.reshape(-1)
        self._rows, self._flat_total = lanes.reshape(-1, span.width), self._total.reshape(-1)
        self._lane_starts = np.arange(0, lanes.size, span.width)
        self._lowest = None if span.is_seen else np.array(np.finfo(scores.dtype).min / 2)
        self._largest_by_tile = self._largest[:, None, ..., None]
        self._largest_by_row = self._flat_largest[:, None]
        self._caps = [
            (scores[:, tile].reshape(num_heads, -1), limits.reshape(-1))
            if len(limits) == num_sequences
            else (scores[:, tile], limits)
            for tile, limits in span.caps
        ]
        by_product = num_heads, num_tiles * num_sequences, *queries.shape[2:4]
        products = scores.reshape(*by_product, span.width)
        sums = weighted.reshape(*by_product, head_dim)
        self._operands: list[Operands] = []
        for segment in self._readers:
            at, width = segment.at, min(segment.width, span.width)
            seen = [i for i, tile in enumerate(at) if 0 <= tile - first < sums.shape[1]]
            if not seen:
                continue
            tiles = slice(seen[0], seen[-1] + 1)
            here = slice(at[seen[0]] - first, at[seen[-1]] - first + 1, at.step)
            self._operands.append(
                Operands(
                    reader=segment,
                    queries=queries[:, here] if num_sequences > 1 else queries,
                    keys=segment.keys[:, :, tiles, ..., :width],
                    scores=products[:, here, ..., :width],
                    values=segment.values[:, :, tiles, :, :width],
                    weighted=sums[:, here],
                )
            )

    def attend(self, layer: int) -> None:
        """Compute the results of the layer."""
        scores, lanes, largest = self._scores, self._lanes, self._flat_largest
        is_one_tile = self._is_one_tile
        if self._scratch.held is not self._readers:
            self._scratch.held = self._readers
            for reader in self._held:
                reader.hold(layer)
        for each in self._operands:
            np.matmul(each.queries, each.keys[each.reader.read(layer, KEYS)], out=each.scores)
        if self._hidden is not None:
            self._hidden.fill(-np.inf)
        for some, limits in self._caps:
            np.fmin(some, limits, out=some)  # Also replaces NaN.
        if not is_one_tile:
            np.maximum.reduce(scores, axis=1, out=lanes)
        # This is twice as fast as `np.maximum.reduce` over short rows.
        np.maximum.reduceat(self._flat_lanes, self._lane_starts, out=largest)
        # A query that sees no key here gets weights of 0, so it adds 0 to the sums of other splits.
        if self._lowest is not None:
            np.maximum(largest, self._lowest, out=largest)
        if is_one_tile:
            np.subtract(self._rows, self._largest_by_row, out=self._rows)
            np.exp(self._rows, out=self._rows)
        else:
            np.subtract(scores, self._largest_by_tile, out=scores)
            np.exp(scores, out=scores)
            np.add.reduce(scores, axis=1, out=lanes)
        np.add.reduce(self._rows, axis=1, out=self._flat_total)
        for each in self._filled:
            values = each.values[each.reader.read(layer, VALUES)]
            np.matmul(each.scores, values, out=each.weighted)
        if not is_one_tile:
            np.add.reduce(self._weighted, axis=1, out=self._attended)


def wholes_of(items: Sequence[Item]) -> list[Item]:
    """Return the items that some of these are parts of."""
    return [item.whole for item in items if item.whole is not None and item.first_span == 0]


class Result:
    """The sums over the spans of an item, and the way from there to the output."""

    def __init__(self, item: Item, geometry: Geometry, scratch: Scratch) -> None:
        """Take the memory for the sums from ``scratch``."""
        self._item, form, head_dim = item, item.form, geometry.head_dim
        self.heads_per_kv = geometry.heads_per_kv
        by_row = self._shape(item)
        self.num_products = by_row[-1] // form.num_rows
        self.largest, self.total = (scratch.take(name, *by_row) for name in ("largest", "total"))
        self.attended = scratch.take("attended", *by_row, head_dim)
        self._attended, self._total = (
            by_query(each, item, self.heads_per_kv)
            for each in (self.attended[0], self.total[0, ..., None])
        )

    @staticmethod
    def _shape(item: Item) -> tuple[int, ...]:
        """Return the spans, heads, sequences and rows of an item."""
        num_sequences, num_queries = item.rows.shape
        num_products = ceil_div(num_queries * item.form.rows_per_query, item.form.num_rows)
        num_heads = item.heads.stop - item.heads.start
        return len(item.spans), num_heads, num_sequences, num_products * item.form.num_rows

    @classmethod
    def size(cls, item: Item, head_dim: int) -> int:
        """Return how many numbers the result of an item takes."""
        return math.prod(cls._shape(item)) * (head_dim + 2)

    def write(self, out: Floats) -> None:
        """Combine the spans and put the queries' results in ``out`` [T, Hkv, G, Dh]."""
        item = self._item
        if len(self.largest) > 1:
            combine(self.largest, self.total, self.attended)
        if item.run is not None:
            np.divide(self._attended, self._total, out=view_of(out, item))
        else:
            real = () if item.real is None else item.real
            out[rows_of(item)[real], item.heads] = (self._attended / self._total)[real]


class BoundItem:
    """An item with the scratch memory of one thread, prepared once for all layers."""

    def __init__(
        self, item: Item, result: Result, readers: Sequence[Readers], scratch: Scratch
    ) -> None:
        """Prepare an item. The result is its own or its whole's, and each span has readers."""
        self._item, self._result = item, result
        own = slice(item.first_span, item.first_span + len(item.spans))
        parts = result.largest[own], result.total[own], result.attended[own]
        num_heads, num_sequences, num_rows, head_dim = parts[2].shape[1:]
        self._scale = np.array(head_dim**-0.5, parts[2].dtype)
        # The queries of several sequences are copied once for each of their tiles.
        most_tiles = max(span.stop - span.start for span in item.spans)
        copies = most_tiles if num_sequences > 1 else 1
        queries = scratch.take("queries", num_heads, copies, num_sequences, num_rows, head_dim)
        queries.fill(0)  # a row that is no query must hold numbers
        places = by_query(queries, item, result.heads_per_kv)
        self._places = places if copies > 1 else places[0]
        rows = item.form.num_rows
        by_product = num_heads, copies * num_sequences, result.num_products, rows, head_dim
        queries = queries.reshape(by_product)
        self._spans = [
            BoundSpan(span, own_readers, queries, scratch, *results)
            for span, own_readers, *results in zip(item.spans, readers, *parts, strict=True)
        ]

    def lengthen(self) -> None:
        """Follow the item's spans, which have been lengthened."""
        for span in self._spans:
            span.lengthen()

    def run(self, q: Floats, layer: int, out: Floats) -> None:
        """Compute the layer, and put the result in ``out`` unless it is part of a whole's."""
        item = self._item
        is_run = item.run is not None
        own = view_of(q, item) if is_run else q.take(rows_of(item), 0)[..., item.heads, :, :]
        np.multiply(own, self._scale, out=self._places)
        for span in self._spans:
            span.attend(layer)
        if item.whole is None:
            self._result.write(out)


def by_query(x: Floats, item: Item, heads_per_kv: int) -> Floats:
    """Return [Hkv, ..., rows, E] as [..., Hkv, G, E], without the rows that are no query.

    The axes before the heads end with the queries' as in `rows_of`.
    """
    num_queries, rows_per_query = item.rows.shape[1], item.form.rows_per_query
    own = x[..., : num_queries * rows_per_query, :]
    split = own.reshape(*x.shape[:-2], num_queries, rows_per_query, x.shape[-1])
    by_head: Floats = np.moveaxis(split[..., :heads_per_kv, :], 0, -3)
    return by_head[..., 0, :, :, :] if num_queries == 1 else by_head


def rows_of(item: Item) -> Ints:
    """Return the item's queries as indices into T [sequences, queries].

    If each sequence has one query, they are [sequences].
    """
    return item.rows[:, 0] if item.rows.shape[1] == 1 else item.rows


def view_of(x: Floats, item: Item) -> Floats:
    """Return the item's own x [T, Hkv, G, Dh] as [..., heads, G, Dh] of a run, as in `rows_of`."""
    own: Floats = x[item.run, item.heads]
    return own if item.rows.shape[1] == 1 else own.reshape(*item.rows.shape, *own.shape[1:])


def combine(largest: Floats, total: Floats, attended: Floats) -> None:
    """Combine the splits [splits, ...] of some queries in place, into the first one.

    The first split's largest scores are left as they are.
    """
    weights = np.exp(largest - largest.max(axis=0))
    total[0] = np.add.reduce(total * weights, axis=0)
    attended[0] = np.add.reduce(attended * weights[..., None], axis=0)
