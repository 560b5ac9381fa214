"""Attention of sequences that have one query each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.attention_kernels import Reader, Scratch, combine, over_tiles, softmax_weights
from mie.ops_cpu.attention_plan import DecodeJob, Geometry


class Parts:
    """What units yield that are yet to be combined."""

    def __init__(self, geometry: Geometry, num_parts: int, dtype: np.dtype[np.floating]) -> None:
        shape = (num_parts, geometry.num_kv_heads, geometry.num_rows)
        self.largest: Floats = np.empty(shape, dtype)
        self.total: Floats = np.empty(shape, dtype)
        self.attended: Floats = np.empty((*shape, geometry.head_dim), dtype)

    def combined(self, parts: Sequence[int], group: int) -> Floats:
        """The attention [Hq, Dh] of the query whose units those are."""
        own = list(parts)
        result = combine(self.largest[own], self.total[own], self.attended[own])
        return result[:, :group].reshape(-1, result.shape[-1])


class Decode:
    """A job with the memory that it reads and that a thread works in: made once for all layers,
    for with short contexts making the views takes as long as what is done with them."""

    def __init__(
        self, job: DecodeJob, memory: Floats, geometry: Geometry, scratch: Scratch
    ) -> None:
        """memory [L, 2, Hkv, N, B, Dh] holds the keys and the values."""
        g = geometry
        self._job, self._geometry, self._scratch = job, geometry, scratch
        first, last = int(job.rows[0]), int(job.rows[-1])
        is_run = (np.diff(job.rows) == 1).all()
        self._rows = slice(first, last + 1) if is_run else job.rows
        memory = memory[:, :, job.heads]
        num_heads, num_units, num_tiles = memory.shape[2], len(job.rows), job.num_tiles
        by_tile = (num_heads, num_units * num_tiles, g.num_rows)
        by_unit = (num_heads, num_tiles, num_units, g.num_rows)
        room = scratch.take("room", num_heads * g.tiles_gathered * g.tile * g.head_dim)
        queries = scratch.take("queries", *by_tile, g.head_dim)
        scores = scratch.take("scores", *by_tile, g.tile)
        weighted = scratch.take("weighted", *by_tile, g.head_dim)
        by_query = queries.reshape(*by_unit, g.head_dim)
        self._queries, self._no_queries = by_query[..., : g.group, :], by_query[..., g.group :, :]
        self._scores = scores.reshape(*by_unit, g.tile)
        self._weighted = weighted.reshape(*by_unit, g.head_dim)
        self._products = [
            (
                Reader(memory, each, g, room),
                queries[:, each.at],
                scores[:, each.at, :, : each.width],
                weighted[:, each.at],
            )
            for each in job.stretches
        ]
        self._hidden = [scores[:, tile, :, positions] for tile, positions in job.hidden]

    def run(self, q: Floats, layer: int, out: Floats, parts: Parts | None) -> None:
        """Put the layer's results where they belong: in ``out``, or in ``parts``.

        q and out [T, Hkv, G, Dh].
        """
        job, g = self._job, self._geometry
        chosen = q[self._rows, job.heads].swapaxes(0, 1)
        np.multiply(chosen[:, None], g.head_dim**-0.5, out=self._queries)
        self._no_queries.fill(0)
        for reader, queries, scores, _ in self._products:
            np.matmul(queries, reader.read(layer, 0).swapaxes(-1, -2), out=scores)
        for hidden in self._hidden:
            hidden.fill(-np.inf)
        largest, total = softmax_weights(self._scores, self._scratch)
        for reader, _, weights, weighted in self._products:
            np.matmul(weights, reader.read(layer, 1), out=weighted)
        attended = over_tiles(np.add, self._weighted, "attended", self._scratch)

        if parts is not None and job.parts is not None:
            parts.largest[job.parts, job.heads] = largest.swapaxes(0, 1)
            parts.total[job.parts, job.heads] = total.swapaxes(0, 1)
            parts.attended[job.parts, job.heads] = attended.swapaxes(0, 1)
            return
        attended = attended[:, :, : g.group] / total[:, :, : g.group, None]
        out[self._rows, job.heads] = attended.swapaxes(0, 1)
