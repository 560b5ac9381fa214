"""Compute the items of a plan.

The products of a query have one form in any item, and tiles and splits are summed in order. So its
result is the same bit for bit however it is computed. A tile that it does not see adds exact zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_cpu.attention.geometry import Geometry
from mie.ops_cpu.attention.plan import Item, Span
from mie.ops_cpu.attention.reader import Scratch, SegmentReader, SplitReader


class Operands(NamedTuple):
    """The operands of a segment's products. P is the number of products for each tile."""

    reader: SegmentReader
    tiles: slice
    """The tiles of the segment that the item's queries see."""
    width: int
    queries: Floats
    """[Hkv, tiles or 1, P, rows, Dh]"""
    scores: Floats
    """[Hkv, tiles, P, rows, width]"""
    weighted: Floats
    """[Hkv, tiles, P, rows, Dh]"""


class BoundSpan(NamedTuple):
    """A span with scratch memory."""

    reader: SplitReader
    operands: list[Operands]
    caps: list[tuple[Floats, Floats]]
    """Pairs of a tile's scores and their upper limits."""
    scores: Floats
    """[Hkv, tiles, sequences, rows, width]"""
    weighted: Floats
    """The weighted sum of each tile's values, [Hkv, tiles, sequences, rows, Dh]."""
    attended: Floats
    """The weighted sum of all values, [Hkv, sequences, rows, Dh]."""


class BoundItem:
    """An item with the scratch memory of one thread, prepared once for all layers.

    With short contexts, creating the views takes as long as computing with them.
    """

    def __init__(
        self, item: Item, readers: Sequence[SplitReader], geometry: Geometry, scratch: Scratch
    ) -> None:
        """Prepare an item. There is a reader for each of its spans."""
        self._item, self._geometry, self._scratch = item, geometry, scratch
        num_sequences, num_queries = item.rows.shape
        form, head_dim, num_heads = item.form, geometry.head_dim, item.heads.stop - item.heads.start
        num_products = ceil_div(num_queries * form.rows_per_query, form.num_rows)
        # The queries of several sequences are copied once for each of their tiles.
        most_tiles = max(span.stop - span.start for span in item.spans)
        copies = most_tiles if num_sequences > 1 else 1
        by_row = num_sequences, num_products * form.num_rows, head_dim
        by_product = num_sequences, num_products, form.num_rows, head_dim
        queries = scratch.take("queries", num_heads, copies, *by_row)
        queries.fill(0)  # a row that is no query must hold numbers
        self._places = self._by_query(queries)
        attended = scratch.take("attended", len(item.spans), num_heads, *by_row)
        queries = queries.reshape(num_heads, copies * num_sequences, *by_product[1:])
        self._spans = [
            self._bind(*each, queries)
            for each in zip(item.spans, readers, attended, strict=True)
        ]

    def _bind(self, span: Span, reader: SplitReader, attended: Floats, queries: Floats) -> BoundSpan:
        num_heads, num_sequences, num_rows, head_dim = attended.shape
        num_tiles, products = span.stop - span.start, queries.shape[2:4]
        by_row = num_heads, num_tiles, num_sequences, num_rows
        by_product = num_heads, num_tiles * num_sequences, *products
        scores = self._scratch.take("scores", *by_row, span.width)
        if num_tiles > 1:
            weighted = self._scratch.take("weighted", *by_row, head_dim)
        else:
            weighted = attended[:, None]
        first, stop = span.start * num_sequences, span.stop * num_sequences
        operands = []
        for segment in reader.segments:
            at = segment.at
            tiles = [i for i, tile in enumerate(at) if first <= tile < stop]
            if tiles:
                width = min(segment.width, span.width)
                seen = at[tiles[0] : tiles[-1] + 1]
                here = slice(seen[0] - first, seen[-1] - first + 1, at.step)
                operands.append(Operands(
                    segment,
                    slice(tiles[0], tiles[-1] + 1),
                    width,
                    queries[:, here] if num_sequences > 1 else queries,
                    scores.reshape(*by_product, span.width)[:, here, ..., :width],
                    weighted.reshape(*by_product, head_dim)[:, here],
                ))
        caps = [(scores[:, tile], limits) for tile, limits in span.caps]
        return BoundSpan(reader, operands, caps, scores, weighted, attended)

    def run(
        self, q: Floats, layer: int, out: Floats, held: SplitReader | None
    ) -> SplitReader | None:
        """Put the layer's results in ``out``, and return what the thread holds afterwards.

        q and out [T, Hkv, G, Dh]. ``held`` is what the thread has loaded of this layer.
        """
        item = self._item
        own = _view(q, item) if item.stride is not None else q.take(item.rows, 0)
        own = own[:, :, item.heads].transpose(2, 0, 1, 3, 4)
        np.multiply(own[:, None], self._geometry.head_dim**-0.5, out=self._places)
        parts = []
        for span in self._spans:
            if span.reader is not held:
                span.reader.load(layer)
                held = span.reader
            parts.append(self._attend(span, layer))
        largest, total, attended = parts[0] if len(parts) == 1 else combine(parts)
        attended = self._by_query(attended).transpose(1, 2, 0, 3, 4)
        total = self._by_query(total[..., None]).transpose(1, 2, 0, 3, 4)
        if item.stride is not None:
            np.divide(attended, total, out=_view(out, item)[:, :, item.heads])
        elif item.real is None:
            out[item.rows, item.heads] = attended / total
        else:
            out[item.rows[item.real], item.heads] = (attended / total)[item.real]
        return held

    def _attend(self, span: BoundSpan, layer: int) -> tuple[Floats, Floats, Floats]:
        """Return the largest scores, the sums of weights and the weighted sums of values."""
        for each in span.operands:
            keys = each.reader.keys(layer)[:, each.tiles, ..., : each.width]
            np.matmul(each.queries, keys, out=each.scores)
        for scores, caps in span.caps:
            np.fmin(scores, caps, out=scores)  # ignores NaN, in either
        largest, total = softmax_weights(span.scores, self._scratch)
        for each in span.operands:
            values = each.reader.values(layer)[:, each.tiles, :, : each.width]
            np.matmul(each.scores, values, out=each.weighted)
        if span.weighted.shape[1] > 1:
            np.add.reduce(span.weighted, axis=1, out=span.attended)
        return largest, total, span.attended

    def _by_query(self, x: Floats) -> Floats:
        """Return [..., rows, E] as [..., queries, G, E], without padding."""
        num_queries, form = self._item.rows.shape[1], self._item.form
        own = x[..., : num_queries * form.rows_per_query, :]
        by_query = own.reshape(*x.shape[:-2], num_queries, form.rows_per_query, x.shape[-1])
        return by_query[..., : self._geometry.heads_per_kv, :]


def _view(x: Floats, item: Item) -> Floats:
    """Return the item's rows of x [T, ...] as a view [sequences, queries, ...]."""
    (num_sequences, num_queries), stride = item.rows.shape, item.stride
    first = int(item.rows[0, 0])
    begin = min(first, len(x) - num_sequences * stride)
    by_sequence = x[begin : begin + num_sequences * stride].reshape(num_sequences, stride, *x.shape[1:])
    return by_sequence[:, first - begin : first - begin + num_queries]


def softmax_weights(scores: Floats, scratch: Scratch) -> tuple[Floats, Floats]:
    """Turn scores [Hkv, tiles, ..., rows, width] into weights in place.

    A weight is exp(score - largest), which is 0 for a score of -inf. Return (largest score, sum of
    weights), both [Hkv, ..., rows].
    """
    lanes = _over_tiles(np.maximum, scores, scratch)
    # This is twice as fast as `np.maximum.reduce` over short rows.
    starts = np.arange(0, lanes.size, lanes.shape[-1])
    largest: Floats = np.maximum.reduceat(lanes.reshape(-1), starts).reshape(lanes.shape[:-1])
    # A query that sees no key here gets weights of 0, so it adds 0 to the sums of other splits.
    np.maximum(largest, np.finfo(scores.dtype).min / 2, out=largest)
    scores -= largest[:, None, ..., None]
    np.exp(scores, out=scores)
    total: Floats = np.add.reduce(_over_tiles(np.add, scores, scratch), axis=-1)
    return largest, total


def _over_tiles(operation: np.ufunc, x: Floats, scratch: Scratch) -> Floats:
    """Reduce x [Hkv, tiles, ...] over its tiles, in order."""
    if x.shape[1] == 1:
        return x[:, 0]
    out = scratch.take("lanes", len(x), *x.shape[2:])
    operation.reduce(x, axis=1, out=out)
    return out


def combine(parts: Sequence[tuple[Floats, Floats, Floats]]) -> tuple[Floats, Floats, Floats]:
    """Combine the splits of some queries.

    A part has the largest scores and the sums of weights [...], and the weighted sums of values
    [..., Dh]. So has the result.
    """
    largest, total, attended = (np.stack(each) for each in zip(*parts, strict=True))
    most = largest.max(axis=0)
    weights = np.exp(largest - most)
    total = np.add.reduce(total * weights, axis=0)
    return most, total, np.add.reduce(attended * weights[..., None], axis=0)
