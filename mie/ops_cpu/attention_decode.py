"""Attention of sequences that have one query each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.attention_kernels import (
    Scratch,
    combine,
    load_tiles,
    over_tiles,
    softmax_weights,
)
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


def decode(
    job: DecodeJob,
    q: Floats,
    planes: Floats,
    geometry: Geometry,
    scratch: Scratch,
    out: Floats,
    parts: Parts,
) -> None:
    """Put the job's results where they belong: in ``out`` [T, Hq, Dh], or in ``parts``.

    q [T, Hq, Dh]; planes [2, Hkv, N, B, Dh] hold the keys and the values.
    """
    g, keys_plane, values_plane = geometry, planes[0, job.heads], planes[1, job.heads]
    num_heads, num_units, num_tiles = len(keys_plane), len(job.rows), job.num_tiles
    by_tile = (num_heads, num_units * num_tiles, g.num_rows)
    by_unit = (num_heads, num_tiles, num_units, g.num_rows)
    room = scratch.take("room", num_heads * g.tiles_gathered * g.tile * g.head_dim)

    queries = scratch.take("queries", *by_tile, g.head_dim)
    _fill(queries.reshape(*by_unit, g.head_dim), q, job, g)
    scores = scratch.take("scores", *by_tile, g.tile)
    for each in job.stretches:
        keys = load_tiles(keys_plane, each, g, room)
        here = scores[:, each.at]
        np.matmul(queries[:, each.at], keys.swapaxes(-1, -2), out=here[..., : each.width])
        here[..., each.width :] = -np.inf
    for tile, positions in job.hidden:
        scores[:, tile, :, positions] = -np.inf
    largest, total = softmax_weights(scores.reshape(*by_unit, g.tile), scratch)
    weighted = scratch.take("weighted", *by_tile, g.head_dim)
    for each in job.stretches:
        values = load_tiles(values_plane, each, g, room)
        np.matmul(scores[:, each.at, :, : each.width], values, out=weighted[:, each.at])
    attended = over_tiles(np.add, weighted.reshape(*by_unit, g.head_dim), "attended", scratch)

    if job.parts is not None:
        parts.largest[job.parts, job.heads] = largest.swapaxes(0, 1)
        parts.total[job.parts, job.heads] = total.swapaxes(0, 1)
        parts.attended[job.parts, job.heads] = attended.swapaxes(0, 1)
        return
    attended = attended[:, :, : g.group] / total[:, :, : g.group, None]
    by_head = out.reshape(len(out), g.num_kv_heads, g.group, g.head_dim)
    by_head[job.rows, job.heads] = attended.swapaxes(0, 1)


def _fill(queries: Floats, q: Floats, job: DecodeJob, geometry: Geometry) -> None:
    """queries [Hkv, tiles, units, R, Dh]: each unit's query for each of its tiles, scaled."""
    group = geometry.group
    by_head = q.reshape(len(q), geometry.num_kv_heads, group, geometry.head_dim)
    chosen = by_head[job.rows, job.heads].swapaxes(0, 1)[:, None]
    np.multiply(chosen, geometry.head_dim**-0.5, out=queries[..., :group, :])
    queries[..., group:, :] = 0
