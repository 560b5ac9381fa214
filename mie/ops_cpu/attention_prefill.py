"""Attention of sequences that have several queries: in tiles of queries, the keys after the last of
them skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.attention_kernels import Reader, Scratch, combine, softmax_weights
from mie.ops_cpu.attention_plan import (
    GATHERED,
    PREFILL_ROWS,
    Geometry,
    Stretch,
    Tiles,
    groups_of,
)

SCORES = 1 << 19
"""Scores that a thread forms at once: the cache holds fewer, but with shorter calls the threads
wait for each other's hand-overs of the GIL."""


@dataclass(frozen=True, slots=True)
class Group:
    """Tiles first … stop - 1 of a sequence, one group at most."""

    first: int
    stop: int
    stretches: list[Stretch]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """A sequence with several queries."""

    row: int
    """Of its first query, in T."""
    num_queries: int
    position: int
    """Of its first query."""
    groups: list[Group]

    @property
    def num_tiles(self) -> int:
        """Of its largest group."""
        return max(group.stop - group.first for group in self.groups)


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Queries first … stop - 1 of a prompt, for some KV heads."""

    prompt: Prompt
    heads: slice
    first: int
    stop: int

    @property
    def cost(self) -> int:
        """Scores of a query head, about."""
        num_heads: int = self.heads.stop - self.heads.start
        return num_heads * (self.stop - self.first) * (self.prompt.position + self.stop)


@dataclass(frozen=True, kw_only=True)
class Products:
    """What the products of a prefill are like."""

    rows: int
    per_query: int
    """Rows that a query takes."""
    transposes: bool
    """Whether keys are transposed first, for which the products are faster."""

    @classmethod
    def like_decode(cls, geometry: Geometry, *, packs: bool) -> Products:
        """Equal to those of a decode bit for bit; if it ``packs``, with other rows in places that
        are empty there."""
        per_query = geometry.group if packs else geometry.num_rows
        return cls(rows=geometry.num_rows, per_query=per_query, transposes=False)

    @classmethod
    def fast(cls, geometry: Geometry) -> Products:
        """For many queries."""
        return cls(rows=PREFILL_ROWS, per_query=geometry.group, transposes=True)


def plan_prompts(
    starts: Sequence[int],
    chosen: Sequence[int],
    tiles: Tiles,
    geometry: Geometry,
    window: int | None,
) -> list[Prompt]:
    """The ``chosen`` sequences, whose queries begin at ``starts``."""
    prompts = []
    for s in chosen:
        num_queries = starts[s + 1] - starts[s]
        position = tiles.lengths[s] - num_queries
        begin = 0 if window is None else max(0, position + 1 - window)
        groups = [
            Group(first, stop, tiles.stretches([(s, first)], stop - first, stop - first))
            for first, stop in groups_of(begin, tiles.lengths[s], geometry)
        ]
        prompts.append(
            Prompt(row=starts[s], num_queries=num_queries, position=position, groups=groups)
        )
    return prompts


def share_out(
    prompts: Sequence[Prompt], geometry: Geometry, products: Products, num_threads: int
) -> list[list[PrefillJob]]:
    """The work of each thread: alike in cost, and of one prompt and the same heads as far as can
    be."""
    per_tile = geometry.tile * products.per_query
    scores = sum(p.num_queries * p.num_tiles for p in prompts) * per_tile * geometry.num_kv_heads
    most = min(SCORES, scores // num_threads)
    jobs = [job for prompt in prompts for job in _jobs(prompt, geometry, products, most)]
    total = sum(job.cost for job in jobs)
    shares: list[list[PrefillJob]] = [[] for _ in range(num_threads)]
    done = 0
    for job in jobs:
        shares[min(num_threads - 1, (done + job.cost // 2) * num_threads // max(1, total))].append(
            job
        )
        done += job.cost
    return shares


def _jobs(
    prompt: Prompt, geometry: Geometry, products: Products, scores: int
) -> Iterator[PrefillJob]:
    """Jobs of ``scores`` at most: of all heads if their keys stay in the cache. A job's queries
    compute every tile that any of them sees, hence no more than a tile of them."""
    num_heads, positions = geometry.num_kv_heads, prompt.num_tiles * geometry.tile
    at_once = num_heads if num_heads * positions * geometry.head_dim <= GATHERED else 1
    size = min(geometry.tile, max(1, scores // (at_once * positions * products.per_query)))
    for head in range(0, num_heads, at_once):
        heads = slice(head, head + at_once)
        for first in range(0, prompt.num_queries, size):
            yield PrefillJob(prompt, heads, first, min(first + size, prompt.num_queries))


class Prefill:
    """Does one thread's jobs in a layer, keeping the keys and values of a prompt's heads for all
    its query tiles."""

    def __init__(
        self,
        q: Floats,
        memory: Floats,
        layer: int,
        geometry: Geometry,
        products: Products,
        scratch: Scratch,
    ) -> None:
        """q [T, Hkv, G, Dh]; memory [L, 2, Hkv, N, B, Dh] holds the keys and the values."""
        self._q, self._memory, self._layer, self._scratch = q, memory, layer, scratch
        self._geometry, self._products = geometry, products
        self._loaded: tuple[Group, slice] | None = None
        self._pieces: list[tuple[slice, Floats, Floats]] = []

    def run(self, job: PrefillJob, window: int | None, out: Floats) -> None:
        """Put the job's results where they belong in ``out`` [T, Hkv, G, Dh]."""
        g, prompt = self._geometry, job.prompt
        queries = self._queries(job)
        first, last = prompt.position + job.first, prompt.position + job.stop - 1
        begin = 0 if window is None else max(0, first + 1 - window)
        num_heads, _, num_products, num_rows, _ = queries.shape
        by_row = len(prompt.groups), num_heads, num_products * num_rows
        largest, total = (self._scratch.take(name, *by_row) for name in ("largest", "total"))
        attended = self._scratch.take("attended", *by_row, g.head_dim)
        seen = 0
        for group in prompt.groups:
            start, stop = max(group.first, begin // g.tile), min(group.stop, last // g.tile + 1)
            if start < stop:
                self._load(group, job.heads)
                largest[seen], total[seen] = self._attend(
                    queries, job, group, start, stop, window, attended[seen]
                )
                seen += 1
        result = combine(largest[:seen], total[:seen], attended[:seen])
        rows = slice(prompt.row + job.first, prompt.row + job.stop)
        by_query = self._by_query(result, job)[:, :, : g.group]
        out[rows, job.heads] = by_query.swapaxes(0, 1)

    def _by_query(self, x: Floats, job: PrefillJob) -> Floats:
        """[..., rows of all products, E] as [..., queries, rows of a query, E]."""
        per_query, num_queries = self._products.per_query, job.stop - job.first
        own = x[..., : num_queries * per_query, :]
        return own.reshape(*x.shape[:-2], num_queries, per_query, x.shape[-1])

    def _queries(self, job: PrefillJob) -> Floats:
        """[Hkv, 1, products, rows, Dh], scaled, with zeros where there is no query or head."""
        g, p = self._geometry, self._products
        own = self._q[job.prompt.row + job.first : job.prompt.row + job.stop, job.heads]
        num_products = -(-len(own) * p.per_query // p.rows)
        shape = own.shape[1], 1, num_products, p.rows, g.head_dim
        queries = self._scratch.take("queries", *shape)
        by_row = queries.reshape(len(queries), -1, g.head_dim)
        by_query = self._by_query(by_row, job)
        np.multiply(own.swapaxes(0, 1), g.head_dim**-0.5, out=by_query[:, :, : g.group])
        by_query[:, :, g.group :] = 0
        by_row[:, len(own) * p.per_query :] = 0
        return queries

    def _load(self, group: Group, heads: slice) -> None:
        """The keys, transposed, and the values of a group for some heads, in pieces."""
        if self._loaded is not None and self._loaded[0] is group and self._loaded[1] == heads:
            return
        g, scratch = self._geometry, self._scratch
        memory = self._memory[:, :, heads]
        per_tile = memory.shape[2] * g.tile * g.head_dim
        rooms = [
            scratch.take(name, (group.stop - group.first) * per_tile)
            for name in ("keys", "values", "turned")
        ]
        self._pieces = []
        for each in group.stretches:
            begin = each.at.start * per_tile
            keys, values = (
                Reader(memory, each, g, room[begin:]).read(self._layer, which)
                for which, room in enumerate(rooms[:2])
            )
            keys = keys.swapaxes(-1, -2)
            if self._products.transposes:
                turned = rooms[2][begin : begin + keys.size].reshape(keys.shape)
                turned[...] = keys
                keys = turned
            self._pieces.append((each.at, keys[:, :, None], values[:, :, None]))
        self._loaded = group, heads

    def _attend(
        self,
        queries: Floats,
        job: PrefillJob,
        group: Group,
        start: int,
        stop: int,
        window: int | None,
        attended: Floats,
    ) -> tuple[Floats, Floats]:
        """Over the tiles start … stop - 1: the largest score and the sum of weights of each row,
        [Hkv, rows]; the sums of weighted values go to ``attended`` [Hkv, rows, Dh]."""
        g, scratch = self._geometry, self._scratch
        num_heads, _, num_products, num_rows, _ = queries.shape
        shape = num_heads, stop - start, num_products, num_rows
        scores = scratch.take("scores", *shape, g.tile)
        weighted = scratch.take("weighted", *shape, g.head_dim)
        pieces = []
        for at, keys, values in self._pieces:
            first, end = group.first + at.start, min(group.first + at.stop, stop)
            begin = max(first, start)
            if begin < end:
                own, here = slice(begin - first, end - first), slice(begin - start, end - start)
                np.matmul(queries, keys[:, own], out=scores[:, here])
                pieces.append((here, values[:, own]))
        by_row = scores.reshape(*shape[:2], -1, g.tile)
        self._hide(self._by_query(by_row, job), job, start, window)
        largest, total = softmax_weights(by_row, scratch)
        for here, values in pieces:
            np.matmul(scores[:, here], values, out=weighted[:, here])
        np.add.reduce(weighted.reshape(*shape[:2], -1, g.head_dim), axis=1, out=attended)
        return largest, total

    def _hide(self, scores: Floats, job: PrefillJob, start: int, window: int | None) -> None:
        """-inf for what a query may not see, in the tiles where that is not all or nothing.

        scores [Hkv, tiles, queries, rows of a query, tile]
        """
        g, position = self._geometry, job.prompt.position
        own = np.arange(position + job.first, position + job.stop)[:, None, None]
        after = max(0, (position + job.first + 1) // g.tile - start)  # the first with a later key
        before = 0
        if window is not None:
            before = max(0, -(-(position + job.stop - window) // g.tile) - start)
        for i in range(scores.shape[1]):
            if before <= i < after:
                continue
            keys = np.arange((start + i) * g.tile, (start + i + 1) * g.tile)
            hidden = keys > own
            if window is not None:
                hidden |= keys <= own - window
            # To add is five times as fast as to copy where it is hidden.
            scores[:, i] += np.where(hidden, -np.inf, 0).astype(scores.dtype)
