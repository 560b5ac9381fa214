"""Attention of sequences that have several queries: in tiles of queries, the keys after the last of
them skipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mie.ops.arrays import Floats
from mie.ops_cpu.attention_kernels import (
    Scratch,
    combine,
    load_tiles,
    over_tiles,
    softmax_weights,
)
from mie.ops_cpu.attention_plan import SCORES, Geometry, Stretch, Tiles, groups_of


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


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """Queries first … stop - 1 of a prompt, for one KV head."""

    prompt: Prompt
    head: int
    first: int
    stop: int

    @property
    def cost(self) -> int:
        """Scores, about."""
        return (self.stop - self.first) * (self.prompt.position + self.stop)


@dataclass(frozen=True, kw_only=True)
class Products:
    """How queries become rows of products: ``queries`` in each, of ``rows`` rows."""

    queries: int
    rows: int

    @classmethod
    def of(cls, geometry: Geometry, most_rows: int) -> Products:
        """As many queries as ``most_rows`` hold; at least a decode's rows."""
        queries = max(1, most_rows // geometry.group)
        return cls(queries=queries, rows=max(geometry.num_rows, queries * geometry.group))


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
    """The work of each thread: alike in cost, and of one prompt and head as far as can be."""
    jobs = [job for prompt in prompts for job in _jobs(prompt, geometry, products)]
    total = sum(job.cost for job in jobs)
    shares: list[list[PrefillJob]] = [[] for _ in range(num_threads)]
    done = 0
    for job in jobs:
        shares[min(num_threads - 1, (done + job.cost // 2) * num_threads // max(1, total))].append(
            job
        )
        done += job.cost
    return shares


def _jobs(prompt: Prompt, geometry: Geometry, products: Products) -> Iterator[PrefillJob]:
    num_tiles = max(group.stop - group.first for group in prompt.groups)
    num_products = max(1, SCORES // (products.rows * num_tiles * geometry.tile))
    size = num_products * products.queries
    for head in range(geometry.num_kv_heads):
        for first in range(0, prompt.num_queries, size):
            yield PrefillJob(prompt, head, first, min(first + size, prompt.num_queries))


class Prefill:
    """Does one thread's jobs, keeping the gathered keys and values of a prompt's head for all its
    query tiles."""

    def __init__(
        self, q: Floats, planes: Floats, geometry: Geometry, products: Products, scratch: Scratch
    ) -> None:
        """q [T, Hq, Dh]; planes [2, Hkv, N, B, Dh] hold the keys and the values."""
        self._q, self._planes, self._scratch = q, planes, scratch
        self._geometry, self._products = geometry, products
        self._loaded: tuple[Group, int] | None = None
        self._pieces: list[tuple[slice, Floats, Floats]] = []

    def run(self, job: PrefillJob, window: int | None, out: Floats) -> None:
        """Put the job's results where they belong in ``out`` [T, Hq, Dh]."""
        g, prompt = self._geometry, job.prompt
        queries = self._queries(job)
        first, last = prompt.position + job.first, prompt.position + job.stop - 1
        begin = 0 if window is None else max(0, first + 1 - window)
        yielded = []
        for group in prompt.groups:
            start, stop = max(group.first, begin // g.tile), min(group.stop, last // g.tile + 1)
            if start < stop:
                self._load(group, job.head)
                yielded.append(self._attend(queries, job, group, start, stop, window))
        result = combine(*(np.stack(each) for each in zip(*yielded, strict=True)))
        by_query = result.reshape(-1, self._products.rows // self._products.queries, g.head_dim)
        rows = slice(prompt.row + job.first, prompt.row + job.stop)
        heads = slice(job.head * g.group, (job.head + 1) * g.group)
        out[rows, heads] = by_query[: job.stop - job.first, : g.group]

    def _queries(self, job: PrefillJob) -> Floats:
        """[products, 1, rows, Dh], scaled, with zeros where there is no query or head."""
        g, p = self._geometry, self._products
        num_queries = job.stop - job.first
        num_products = -(-num_queries // p.queries)
        queries = self._scratch.take("queries", num_products, 1, p.rows, g.head_dim)
        queries[...] = 0
        by_query = queries.reshape(num_products * p.queries, -1, g.head_dim)
        rows = slice(job.prompt.row + job.first, job.prompt.row + job.stop)
        own = self._q[rows, job.head * g.group : (job.head + 1) * g.group]
        np.multiply(own, g.head_dim**-0.5, out=by_query[:num_queries, : g.group])
        return queries

    def _load(self, group: Group, head: int) -> None:
        """The keys and values of a group for one head, in pieces."""
        if self._loaded is not None and self._loaded[0] is group and self._loaded[1] == head:
            return
        g = self._geometry
        size = (group.stop - group.first) * g.tile * g.head_dim
        rooms = self._scratch.take("keys", size), self._scratch.take("values", size)
        planes = self._planes[:, head : head + 1]
        self._pieces = []
        for each in group.stretches:
            begin = each.at.start * g.tile * g.head_dim
            keys, values = (
                load_tiles(plane, each, g, room[begin:])
                for plane, room in zip(planes, rooms, strict=True)
            )
            self._pieces.append((each.at, keys, values))
        self._loaded = group, head

    def _attend(
        self,
        queries: Floats,
        job: PrefillJob,
        group: Group,
        start: int,
        stop: int,
        window: int | None,
    ) -> tuple[Floats, Floats, Floats]:
        """Over the tiles start … stop - 1: (largest score, sum of weights, sum of weighted values)
        for each row of each product."""
        g, scratch = self._geometry, self._scratch
        shape = (len(queries), stop - start, self._products.rows)
        scores = scratch.take("scores", *shape, g.tile)
        pieces = []
        for at, keys, values in self._pieces:
            first, end = group.first + at.start, min(group.first + at.stop, stop)
            begin = max(first, start)
            if begin < end:
                own, here = slice(begin - first, end - first), slice(begin - start, end - start)
                pieces.append((here, keys[:, own], values[:, own]))
        for here, keys, _ in pieces:
            np.matmul(queries, keys.swapaxes(-1, -2), out=scores[:, here])
        self._hide(scores, job, start, window)
        largest, total = softmax_weights(scores, scratch)
        weighted = scratch.take("weighted", *shape, g.head_dim)
        for here, _, values in pieces:
            np.matmul(scores[:, here], values, out=weighted[:, here])
        attended = over_tiles(np.add, weighted, "attended", scratch)
        return largest, total, attended.copy()  # the next group takes the same memory

    def _hide(self, scores: Floats, job: PrefillJob, start: int, window: int | None) -> None:
        """-inf for what a query may not see, in the tiles where that is not all or nothing."""
        g, p = self._geometry, self._products
        num_products, num_tiles = scores.shape[:2]
        position = job.prompt.position
        own = position + np.minimum(
            np.arange(job.first, job.first + num_products * p.queries), job.stop - 1
        ).reshape(-1, 1, p.queries, 1, 1)
        by_query = scores.reshape(num_products, num_tiles, p.queries, -1, g.tile)
        keys = np.arange(start * g.tile, (start + num_tiles) * g.tile).reshape(-1, 1, 1, g.tile)
        after = max(0, (position + job.first + 1) // g.tile - start)  # the first with a later key
        np.copyto(by_query[:, after:], -np.inf, where=keys[after:] > own)
        if window is not None:
            before = max(0, -(-(position + job.stop - window) // g.tile) - start)
            hidden = keys[:before] <= own - window
            np.copyto(by_query[:, :before], -np.inf, where=hidden)
