"""Compute the items of a plan.

The products of a query have one form in any item, and tiles and splits are summed in order. So its
result is the same bit for bit however it is computed. A tile that it does not see adds exact zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_cpu.attention.geometry import Geometry
from mie.ops_cpu.attention.plan import Item, Span
from mie.ops_cpu.attention.reader import KEYS, VALUES, Scratch, SegmentReader

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


class BoundSpan:
    """A span with scratch memory: all views that its computation needs."""

    def __init__(
        self,
        span: Span,
        readers: Readers,
        queries: Floats,
        results: Sequence[Floats],
        scratch: Scratch,
    ) -> None:
        """Prepare a span for queries [Hkv, tiles or 1, sequences, P, rows of a product, Dh].

        The results are the largest scores and the sums of weights [Hkv, sequences, rows], and the
        weighted sums of values [Hkv, sequences, rows, Dh].
        """
        self.readers = readers
        self._largest, self._total, self._attended = results
        num_heads, num_sequences, num_rows, head_dim = self._attended.shape
        num_tiles, first = span.stop - span.start, span.start * num_sequences
        by_row = num_heads, num_tiles, num_sequences, num_rows
        self._scores = scores = scratch.take("scores", *by_row, span.width)
        if num_tiles > 1:
            lanes = scratch.take("lanes", num_heads, num_sequences, num_rows, span.width)
            weighted = scratch.take("weighted", *by_row, head_dim)
        else:
            lanes, weighted = scores[:, 0], self._attended[:, None]
        self._lanes, self._weighted = lanes, weighted
        self._flat_lanes, self._flat_largest = lanes.reshape(-1), self._largest.reshape(-1)
        self._lane_starts = np.arange(0, lanes.size, span.width)
        self._lowest = np.finfo(scores.dtype).min / 2
        self._caps = [(scores[:, tile], limits) for tile, limits in span.caps]
        by_product = num_heads, num_tiles * num_sequences, *queries.shape[2:4]
        products = scores.reshape(*by_product, span.width)
        sums = weighted.reshape(*by_product, head_dim)
        self._operands: list[Operands] = []
        for segment in readers:
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
        scores, lanes, largest = self._scores, self._lanes, self._largest
        is_one_tile = scores.shape[1] == 1
        for each in self._operands:
            np.matmul(each.queries, each.keys[each.reader.read(layer, KEYS)], out=each.scores)
        for some, limits in self._caps:
            np.fmin(some, limits, out=some)  # also replaces NaN
        if not is_one_tile:
            np.maximum.reduce(scores, axis=1, out=lanes)
        # This is twice as fast as `np.maximum.reduce` over short rows.
        np.maximum.reduceat(self._flat_lanes, self._lane_starts, out=self._flat_largest)
        # A query that sees no key here gets weights of 0, so it adds 0 to the sums of other splits.
        np.maximum(largest, self._lowest, out=largest)
        scores -= largest[:, None, ..., None]
        np.exp(scores, out=scores)
        if not is_one_tile:
            np.add.reduce(scores, axis=1, out=lanes)
        np.add.reduce(lanes, axis=-1, out=self._total)
        for each in self._operands:
            np.matmul(each.scores, each.values[each.reader.read(layer, VALUES)], out=each.weighted)
        if not is_one_tile:
            np.add.reduce(self._weighted, axis=1, out=self._attended)


class BoundItem:
    """An item with the scratch memory of one thread, prepared once for all layers.

    With short contexts, creating the views takes as long as computing with them.
    """

    def __init__(
        self, item: Item, readers: Sequence[Readers], geometry: Geometry, scratch: Scratch
    ) -> None:
        """Prepare an item. There is a reader for each of its spans."""
        self._item, self._geometry = item, geometry
        form, spans, head_dim = item.form, item.spans, geometry.head_dim
        num_heads, (num_sequences, num_queries) = (
            item.heads.stop - item.heads.start,
            item.rows.shape,
        )
        num_products = ceil_div(num_queries * form.rows_per_query, form.num_rows)
        num_rows = num_products * form.num_rows
        # The queries of several sequences are copied once for each of their tiles.
        most_tiles = max(span.stop - span.start for span in spans)
        copies = most_tiles if num_sequences > 1 else 1
        queries = scratch.take("queries", num_heads, copies, num_sequences, num_rows, head_dim)
        queries.fill(0)  # a row that is no query must hold numbers
        self._places, self._scale = self._by_query(queries), head_dim**-0.5
        by_product = num_heads, copies * num_sequences, num_products, form.num_rows, head_dim
        queries = queries.reshape(by_product)
        by_row = len(spans), num_heads, num_sequences, num_rows
        largest, total = (scratch.take(name, *by_row) for name in ("largest", "total"))
        attended = scratch.take("attended", *by_row, head_dim)
        self._parts = largest, total, attended
        self._spans = [
            BoundSpan(span, own, queries, results, scratch)
            for span, own, *results in zip(spans, readers, *self._parts, strict=True)
        ]
        # [sequences, queries, Hkv, G, Dh or 1], as in q and out
        self._attended = self._by_query(attended[0]).transpose(1, 2, 0, 3, 4)
        self._total = self._by_query(total[0, ..., None]).transpose(1, 2, 0, 3, 4)

    def run(self, q: Floats, layer: int, out: Floats, held: Readers | None) -> Readers | None:
        """Put the layer's results in ``out``, and return what the thread holds afterwards.

        q and out [T, Hkv, G, Dh]. ``held`` is what the thread has loaded of this layer.
        """
        item = self._item
        own = _view(q, item) if item.is_run else q.take(item.rows, 0)
        own = own[:, :, item.heads].transpose(2, 0, 1, 3, 4)
        np.multiply(own[:, None], self._scale, out=self._places)
        for span in self._spans:
            if span.readers is not held:
                held = span.readers
                for reader in held:
                    reader.hold(layer)
            span.attend(layer)
        if len(self._spans) > 1:
            combine(*self._parts)
        if item.is_run:
            np.divide(self._attended, self._total, out=_view(out, item)[:, :, item.heads])
        elif item.real is None:
            out[item.rows, item.heads] = self._attended / self._total
        else:
            out[item.rows[item.real], item.heads] = (self._attended / self._total)[item.real]
        return held

    def _by_query(self, x: Floats) -> Floats:
        """Return [..., rows, E] as [..., queries, G, E], without the rows that are no query."""
        num_queries, form = self._item.rows.shape[1], self._item.form
        own = x[..., : num_queries * form.rows_per_query, :]
        by_query = own.reshape(*x.shape[:-2], num_queries, form.rows_per_query, x.shape[-1])
        return by_query[..., : self._geometry.heads_per_kv, :]


def _view(x: Floats, item: Item) -> Floats:
    """Return the item's rows of x [T, ...] as [sequences, queries, ...], if they are a run."""
    first, rows = item.rows.item(0), item.rows
    view: Floats = x[first : first + rows.size].reshape(*rows.shape, *x.shape[1:])
    return view


def combine(largest: Floats, total: Floats, attended: Floats) -> None:
    """Combine the splits of some queries in place, into the first one.

    A split has its largest scores and sums of weights [splits, ...], and its weighted sums of
    values [splits, ..., Dh]. The first split's largest scores are left as they are.
    """
    weights = np.exp(largest - largest.max(axis=0))
    total[0] = np.add.reduce(total * weights, axis=0)
    attended[0] = np.add.reduce(attended * weights[..., None], axis=0)
