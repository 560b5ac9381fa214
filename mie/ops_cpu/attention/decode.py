"""Compute attention of sequences that have one query each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Floats
from mie.ops_cpu.attention.kernels import Reader, Scratch, combine, over_tiles, softmax_weights
from mie.ops_cpu.attention.plan import DecodeJob, Geometry


class Parts:
    """The results of units that still have to be combined."""

    def __init__(self, geometry: Geometry, num_parts: int, dtype: np.dtype[np.floating]) -> None:
        shape = (num_parts, geometry.num_kv_heads, geometry.num_rows)
        self.largest: Floats = np.empty(shape, dtype)
        self.total: Floats = np.empty(shape, dtype)
        self.attended: Floats = np.empty((*shape, geometry.head_dim), dtype)

    def combined(self, parts: Sequence[int], group: int) -> Floats:
        """Return the attention [Hq, Dh] of the query whose units these are."""
        own = list(parts)
        result = combine(self.largest[own], self.total[own], self.attended[own])
        return result[:, :group].reshape(-1, result.shape[-1])


class Decode:
    """A job with the memory it reads and its thread's scratch, created once for all layers.

    With short contexts, creating the views takes as long as computing with them.
    """

    def __init__(
        self, job: DecodeJob, memory: Floats, geometry: Geometry, scratch: Scratch
    ) -> None:
        """Prepare a job. memory [L, 2, Hkv, N, B, Dh] holds the keys and the values."""
        g = geometry
        self._job, self._geometry, self._scratch = job, geometry, scratch
        memory = memory[:, :, job.heads]
        num_heads, num_units, num_tiles = memory.shape[2], job.num_units, job.num_tiles
        by_tile = (num_heads, num_units * num_tiles, g.num_rows)
        by_unit = (num_heads, num_tiles, num_units, g.num_rows)
        most_gathered = g.tiles_gathered(are_short=job.num_tiles == 1)
        room = scratch.take("room", num_heads * most_gathered * g.tile * g.head_dim)
        # This scratch has its own name. Rows that are no query stay 0, because all jobs have them
        # at the same places.
        queries = scratch.take("decoded", *by_tile, g.head_dim)
        scores = scratch.take("scores", *by_tile, job.width)
        weighted = scratch.take("weighted", *by_tile, g.head_dim)
        by_query = queries.reshape(*by_unit, g.head_dim)
        by_query[..., g.group :, :] = 0
        self._queries = by_query[..., : g.group, :]
        self._scores = scores.reshape(*by_unit, job.width)
        self._weighted = weighted.reshape(*by_unit, g.head_dim)
        self._scale = np.array(g.head_dim**-0.5, memory.dtype)
        self._products = [
            (
                Reader(memory, each, g, room),
                queries[:, each.at],
                scores[:, each.at, :, : each.width],
                weighted[:, each.at],
            )
            for each in job.stretches
        ]
        self._caps = [
            (scores[:, at], _caps(hidden, g.num_rows, scores.dtype)) for at, hidden in job.hidden
        ]

    def run(self, q: Floats, layer: int, out: Floats, parts: Parts | None) -> None:
        """Put the layer's results in ``out``, or in ``parts``.

        q and out [T, Hkv, G, Dh].
        """
        job, g = self._job, self._geometry
        own = q[job.rows] if isinstance(job.rows, slice) else q.take(job.rows, 0)
        chosen = own[:, job.heads].swapaxes(0, 1)
        np.multiply(chosen[:, None], self._scale, out=self._queries)
        for reader, queries, scores, _ in self._products:
            keys = reader.read(layer, 0, cleans=False)  # the caps hide slots without a token
            np.matmul(queries, keys.swapaxes(-1, -2), out=scores)
        for scores, caps in self._caps:
            np.fmin(scores, caps, out=scores)
        largest, total = softmax_weights(self._scores, self._scratch)
        for reader, _, weights, weighted in self._products:
            np.matmul(weights, reader.read(layer, 1), out=weighted)
        attended = over_tiles(np.add, self._weighted, "attended", self._scratch)

        if parts is not None and job.parts is not None:
            parts.largest[job.parts, job.heads] = largest.swapaxes(0, 1)
            parts.total[job.parts, job.heads] = total.swapaxes(0, 1)
            parts.attended[job.parts, job.heads] = attended.swapaxes(0, 1)
            return
        attended = attended[:, :, : g.group].swapaxes(0, 1)
        total = total[:, :, : g.group, None].swapaxes(0, 1)
        if isinstance(job.rows, slice):
            np.divide(attended, total, out=out[job.rows, job.heads])
        else:
            out[job.rows, job.heads] = attended / total


def _caps(hidden: NDArray[np.bool_], num_rows: int, dtype: np.dtype[Any]) -> Floats:
    """Return upper limits for scores [Hkv, tiles, R, width], -inf where they are ``hidden``.

    ``hidden`` is [tiles, width]. Elsewhere the limit is NaN, which `np.fmin` ignores, as it ignores
    NaN scores. The limits are contiguous over the scores in memory, because one long loop takes a
    fraction of the time of many short ones.
    """
    caps: Floats = np.where(hidden, -np.inf, np.nan).astype(dtype)
    return caps[:, None].repeat(num_rows, 1)
