"""Compute attention of sequences that have several queries."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.attention.kernels import Reader, Scratch, combine, softmax_weights
from mie.ops_cpu.attention.plan import Geometry
from mie.ops_cpu.attention.prefill_plan import Group, PrefillJob, Products


class Prefills:
    """One thread's jobs with their scratch memory, created once for all layers.

    With short prompts, creating the views takes as long as computing with them.
    """

    def __init__(
        self,
        jobs: Sequence[PrefillJob],
        memory: Floats,
        geometry: Geometry,
        products: Products,
        scratch: Scratch,
    ) -> None:
        """Prepare the jobs. memory [L, 2, Hkv, N, B, Dh] holds the keys and the values."""
        keys: dict[tuple[Group, int], Keys] = {}
        prefills: dict[int, Prefill] = {}
        # The largest job comes first, so that the others reuse its scratch.
        for i in sorted(range(len(jobs)), key=lambda i: jobs[i].cost, reverse=True):
            heads = jobs[i].heads
            for span in jobs[i].chunk.spans:
                if (span.group, heads.start) not in keys:
                    own = Keys(span.group, memory[:, :, heads], geometry, products, scratch)
                    keys[span.group, heads.start] = own
            needed = [keys[span.group, heads.start] for span in jobs[i].chunk.spans]
            prefills[i] = Prefill(jobs[i], needed, geometry, products, scratch)
        self._prefills = [prefills[i] for i in range(len(jobs))]

    def run(self, q: Floats, layer: int, out: Floats) -> None:
        """Put the layer's results in ``out``.

        q and out [T, Hkv, G, Dh].
        """
        held: Keys | None = None
        for prefill in self._prefills:
            held = prefill.run(q, layer, out, held)


class Keys:
    """The keys and values of a group for some heads, which several chunks can share.

    A thread holds one of these at a time.
    """

    def __init__(
        self,
        group: Group,
        memory: Floats,
        geometry: Geometry,
        products: Products,
        scratch: Scratch,
    ) -> None:
        """Prepare to read from memory [L, 2, Hkv, N, B, Dh]."""
        self.first = group.first
        per_tile = memory.shape[2] * geometry.tile * geometry.head_dim
        places = [range(each.at.start, each.at.stop, each.at.step or 1) for each in group.stretches]
        size = sum(map(len, places)) * per_tile
        rooms = [scratch.take(name, size) for name in ("keys", "values")]
        self._turned = scratch.take("turned", size) if products.transposes else None
        self._readers: list[tuple[range, int, Reader, Reader]] = []
        begin = 0
        for at, each in zip(places, group.stretches, strict=True):
            keys, values = (Reader(memory, each, geometry, room[begin:]) for room in rooms)
            self._readers.append((at, begin, keys, values))
            begin += len(at) * per_tile
        self._pieces: list[tuple[range, Floats, Floats]] = []

    def read(self, layer: int) -> None:
        """Read the keys and values of the layer."""
        self._pieces = []
        for at, begin, key_reader, value_reader in self._readers:
            keys, values = key_reader.read(layer, 0).swapaxes(-1, -2), value_reader.read(layer, 1)
            if self._turned is not None:
                turned = self._turned[begin : begin + keys.size].reshape(keys.shape)
                turned[...] = keys
                keys = turned
            self._pieces.append((at, keys[:, :, None], values[:, :, None]))

    def between(self, first: int, stop: int) -> Iterator[tuple[slice, Floats, Floats]]:
        """Yield the tiles first … stop - 1, counted as in the stretches, piece by piece.

        A piece is its index, the keys [Hkv, tiles, 1, Dh, width] and the values [Hkv, tiles, 1,
        width, Dh].
        """
        for at, keys, values in self._pieces:
            begin, end = bisect_left(at, first), bisect_left(at, stop)
            if begin < end:
                here = slice(at[begin] - first, at[end - 1] - first + 1, at.step)
                yield here, keys[:, begin:end], values[:, begin:end]


class Prefill:
    """One job of a thread."""

    def __init__(
        self,
        job: PrefillJob,
        keys: Sequence[Keys],
        geometry: Geometry,
        products: Products,
        scratch: Scratch,
    ) -> None:
        """Prepare a job with the ``keys`` of each of the chunk's spans."""
        self._chunk, self._heads, self._keys, self._scratch = job.chunk, job.heads, keys, scratch
        self._geometry, self._per_query = geometry, products.per_query
        head_dim, group, spans = geometry.head_dim, geometry.group, job.chunk.spans
        num_heads, num_rows = job.heads.stop - job.heads.start, products.rows
        num_prompts, num_queries = job.chunk.rows.shape
        num_products = -(-num_queries * products.per_query // num_rows)

        # With several prompts the queries are copied once for each of their tiles.
        copies = max(span.stop - span.start for span in spans) if num_prompts > 1 else 1
        shape = num_heads, copies, num_prompts, num_products * num_rows, head_dim
        queries = scratch.take("queries", *shape)
        by_query = self._by_query(queries)
        self._places = by_query[..., :group, :]
        self._no_places = (
            by_query[..., group:, :],
            queries[..., num_queries * products.per_query :, :],
        )
        self._queries = queries.reshape(
            num_heads, copies * num_prompts, num_products, num_rows, head_dim
        )

        by_row = len(spans), num_heads, num_prompts, num_products * num_rows
        self._largest, self._total = (scratch.take(name, *by_row) for name in ("largest", "total"))
        self._attended = scratch.take("attended", *by_row, head_dim)
        by_tile = [(num_heads, span.stop - span.start, *by_row[2:]) for span in spans]
        self._scores = [
            scratch.take("scores", *shape, span.width)
            for shape, span in zip(by_tile, spans, strict=True)
        ]
        self._weighted = [
            # A result that needs no addition is written to its final place at once.
            scratch.take("weighted", *shape, head_dim) if shape[1] > 1 else attended[:, None]
            for shape, attended in zip(by_tile, self._attended, strict=True)
        ]

    def run(self, q: Floats, layer: int, out: Floats, held: Keys | None) -> Keys | None:
        """Put the layer's results in ``out``.

        ``held`` are the keys that the thread holds. Return the keys that it holds afterwards.

        q and out [T, Hkv, G, Dh].
        """
        own = self._chunk.of(q)[:, :, self._heads].transpose(2, 0, 1, 3, 4)
        np.multiply(own[:, None], self._geometry.head_dim**-0.5, out=self._places)
        for places in self._no_places:
            places.fill(0)
        for i, keys in enumerate(self._keys):
            if keys is not held:
                keys.read(layer)
                held = keys
            self._attend(i, keys)
        result = combine(self._largest, self._total, self._attended)
        by_query = self._by_query(result)[..., : self._geometry.group, :]
        self._chunk.put(by_query.transpose(1, 2, 0, 3, 4), self._heads, out)
        return held

    def _attend(self, i: int, keys: Keys) -> None:
        """Attend to the tiles of the i-th span."""
        span, scores, weighted = self._chunk.spans[i], self._scores[i], self._weighted[i]
        num_heads, num_tiles, num_prompts = scores.shape[:3]
        by_product = num_heads, num_tiles * num_prompts, *self._queries.shape[2:4]
        products, sums = (x.reshape(*by_product, x.shape[-1]) for x in (scores, weighted))
        first, stop = ((tile - keys.first) * num_prompts for tile in (span.start, span.stop))
        pieces = list(keys.between(first, stop))
        for here, turned, _ in pieces:
            queries = self._queries[:, here] if num_prompts > 1 else self._queries
            np.matmul(queries, turned[..., : span.width], out=products[:, here])
        for tile, hidden in span.hidden:
            by_query = self._by_query(scores[:, tile])
            by_query += hidden
        self._largest[i], self._total[i] = softmax_weights(scores, self._scratch)
        for here, _, values in pieces:
            np.matmul(products[:, here], values[..., : span.width, :], out=sums[:, here])
        if num_tiles > 1:
            np.add.reduce(weighted, axis=1, out=self._attended[i])

    def _by_query(self, x: Floats) -> Floats:
        """Return [..., rows, E] as [..., queries, rows of a query, E]."""
        num_queries = self._chunk.rows.shape[1]
        own = x[..., : num_queries * self._per_query, :]
        return own.reshape(*x.shape[:-2], num_queries, self._per_query, x.shape[-1])
