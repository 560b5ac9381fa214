"""Plan a step's prefills once for all layers, as the work of each thread.

The queries of a sequence are cut into **chunks** that stay within a tile. So only a chunk's last
tile has keys that some of its queries do not see. Short sequences that begin at the same position
are batched. With few calls each, the threads would mostly wait for the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mie.ops.arrays import Floats, Ints
from mie.ops_cpu.attention.plan import (
    GATHERED,
    PREFILL_ROWS,
    Geometry,
    Stretch,
    Tiles,
    groups_of,
)

SCORES = 1 << 19
"""Scores that a thread computes at once for a single sequence.

This exceeds the CPU cache, but with shorter calls the threads wait for each other's GIL hand-overs.
"""
CHUNKS = 2
"""Minimum number of chunks of a tile's queries. More chunks waste fewer products on hidden keys."""
WORTH_SHARING = 120_000
"""Scores of a layer below which a second thread loses more time than it saves."""


@dataclass(frozen=True, kw_only=True)
class Products:
    """The form of a prefill's products."""

    rows: int
    per_query: int
    """Rows of a product for each query."""
    transposes: bool
    """Whether keys are transposed first, which makes the products faster."""
    shortens: bool
    """Whether only a tile's first keys are multiplied where no query sees the others."""

    @classmethod
    def like_decode(cls, geometry: Geometry, *, packs: bool, shortens: bool) -> Products:
        """Return products that equal those of a decode bit for bit.

        If it ``packs``, other queries fill the rows that are padding in a decode.
        """
        per_query = geometry.group if packs else geometry.num_rows
        return cls(rows=geometry.num_rows, per_query=per_query, transposes=False, shortens=shortens)

    @classmethod
    def fast(cls, geometry: Geometry) -> Products:
        """Return the fastest products for many queries."""
        return cls(rows=PREFILL_ROWS, per_query=geometry.group, transposes=True, shortens=True)


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """The tiles first … stop - 1 of each of some sequences, one group at most."""

    first: int
    stop: int
    stretches: list[Stretch]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Sequences with several queries that begin at one position and end in the same tile."""

    rows: Ints
    """The first query of each sequence, as an index into T."""
    counts: Ints
    """Number of queries of each sequence. The first has the most."""
    position: int
    """Position of each sequence's first query."""
    groups: list[Group]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """The tiles start … stop - 1 of a group, which a chunk's queries see."""

    group: Group
    start: int
    stop: int
    width: int
    """Number of positions read of each tile, less than a tile only if the span is one tile."""
    hidden: list[tuple[int, Floats]]
    """Pairs of (tile of the span, mask [queries, 1, width]), where hidden keys are -inf."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """The same queries of each of some prompts.

    A prompt with fewer queries repeats its first one as padding.
    """

    rows: Ints
    """The queries as indices into T [prompts, queries]."""
    own: tuple[Ints, ...] | None
    """The real queries as (prompt, query), or None if all are real.

    None also requires that the prompts are adjacent in T and have equally many queries.
    """
    spans: list[Span]

    def of(self, q: Floats) -> Floats:
        """Return the chunk's rows of q [T, ...] as [prompts, queries, ...]."""
        return q[self.rows] if self.own is not None else self._view(q)

    def put(self, x: Floats, heads: slice, out: Floats) -> None:
        """Write x [prompts, queries, heads, ...] to its place in ``out`` [T, Hkv, ...]."""
        if self.own is not None:
            out[self.rows[self.own], heads] = x[self.own]
        else:
            self._view(out)[:, :, heads] = x

    def _view(self, x: Floats) -> Floats:
        num_prompts, num_queries = self.rows.shape
        first = int(self.rows[0, 0])
        count = int(self.rows[1, 0]) - first if num_prompts > 1 else num_queries
        begin = min(first, len(x) - num_prompts * count)
        by_prompt = x[begin : begin + num_prompts * count].reshape(num_prompts, count, *x.shape[1:])
        return by_prompt[:, first - begin : first - begin + num_queries]


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A chunk for some KV heads."""

    chunk: Chunk
    heads: slice
    cost: int
    """The approximate number of its scores."""


def plan_prefills(
    starts: Sequence[int],
    chosen: Sequence[int],
    tiles: Tiles,
    geometry: Geometry,
    window: int | None,
    products: Products,
    num_threads: int,
) -> list[list[PrefillJob]]:
    """Plan the prefills of the ``chosen`` sequences, whose queries begin at ``starts``.

    Return the jobs of each thread. Threads get similar costs, and jobs that read the same keys are
    adjacent.
    """
    planner = _Planner(starts, tiles, geometry, window, products)
    jobs = [job for own in planner.prompts(chosen, num_threads) for job in planner.jobs(own)]
    is_shared = sum(job.cost for job in jobs) >= WORTH_SHARING
    shares: list[list[int]] = [[] for _ in range(num_threads)]
    costs = [0] * (num_threads if is_shared else 1)
    for i in sorted(range(len(jobs)), key=lambda i: jobs[i].cost, reverse=True):
        thread = costs.index(min(costs))
        shares[thread].append(i)
        costs[thread] += jobs[i].cost
    return [[jobs[i] for i in sorted(share)] for share in shares]


class _Planner:
    """Holds what all prefills of a step have in common."""

    def __init__(
        self,
        starts: Sequence[int],
        tiles: Tiles,
        geometry: Geometry,
        window: int | None,
        products: Products,
    ) -> None:
        self._starts, self._tiles, self._window = starts, tiles, window
        self._geometry, self._products = geometry, products

    def prompts(self, chosen: Sequence[int], num_threads: int) -> Iterator[Prompts]:
        """Batch similar sequences as far as the CPU cache allows, with parts for all threads."""
        kinds: dict[tuple[int, int], list[int]] = {}
        for s in chosen:
            last_tile = (self._tiles.lengths[s] - 1) // self._geometry.tile
            kinds.setdefault((self._position(s), last_tile), []).append(s)
        for (position, _), kind in kinds.items():
            others = sorted(kind, key=self._count, reverse=True)
            while others:
                alike = [s for s in others if 2 * self._count(s) > self._count(others[0])]
                others = others[len(alike) :]
                num_parts = -(-len(alike) // self._at_once(alike[0]))
                num_parts = -(-num_parts // num_threads) * num_threads
                size = -(-len(alike) // num_parts)
                for i in range(0, len(alike), size):
                    yield self._prompts(alike[i : i + size], position)

    def _count(self, s: int) -> int:
        return self._starts[s + 1] - self._starts[s]

    def _position(self, s: int) -> int:
        return self._tiles.lengths[s] - self._count(s)

    def _at_once(self, s: int) -> int:
        """Return how many sequences like this one fit the CPU cache.

        The queries, the scores and the keys must each fit.
        """
        g, length = self._geometry, self._tiles.lengths[s]
        num_rows = self._count(s) * self._products.per_query
        largest = max(num_rows * max(length, g.head_dim), length * g.head_dim)
        return max(1, GATHERED // (g.num_kv_heads * largest))

    def _prompts(self, chosen: Sequence[int], position: int) -> Prompts:
        g, longest = self._geometry, self._tiles.lengths[chosen[0]]
        begin = self._first_seen(position)
        groups = []
        for first, stop in groups_of(begin, longest, g):
            starts, num_tiles = [(s, first) for s in chosen], stop - first
            width = self._width(longest - first * g.tile)
            most = len(chosen) * num_tiles
            groups.append(Group(first, stop, self._tiles.stretches(starts, num_tiles, most, width)))
        return Prompts(
            rows=np.array([self._starts[s] for s in chosen]),
            counts=np.array([self._count(s) for s in chosen]),
            position=position,
            groups=groups,
        )

    def _first_seen(self, position: int) -> int:
        """Return the first position that the query at ``position`` sees."""
        return 0 if self._window is None else max(0, position + 1 - self._window)

    def _width(self, needed: int) -> int:
        """Return how many of a tile's positions are read if ``needed`` (or more) are needed."""
        step = self._geometry.width_step if self._products.shortens else self._geometry.tile
        return min(self._geometry.tile, -(-needed // step) * step)

    def jobs(self, prompts: Prompts) -> Iterator[PrefillJob]:
        """Yield the jobs of all prompts. A job takes all heads if their keys fit the CPU cache."""
        g, per_query = self._geometry, self._products.per_query
        num_heads, size = g.num_kv_heads, -(-g.tile // CHUNKS)
        if len(prompts.rows) == 1:
            positions = max(group.stop - group.first for group in prompts.groups) * g.tile
            if num_heads * positions * g.head_dim > GATHERED:
                num_heads = 1
            while size > 1 and num_heads * positions * size * per_query > SCORES:
                size = -(-size // 2)
        chunks = [self._chunk(prompts, *ends) for ends in pairwise(self._bounds(prompts, size))]
        for head in range(0, g.num_kv_heads, num_heads):
            for chunk in chunks:
                positions = sum((span.stop - span.start) * span.width for span in chunk.spans)
                # Each query also has a fixed cost.
                cost = num_heads * chunk.rows.size * per_query * (positions + g.head_dim)
                yield PrefillJob(chunk, slice(head, head + num_heads), cost)

    def _bounds(self, prompts: Prompts, size: int) -> Iterator[int]:
        """Yield the bounds of chunks of ``size``, counted from a tile's beginning."""
        at, stop = prompts.position, prompts.position + int(prompts.counts[0])
        while at < stop:
            yield at
            tile, offset = divmod(at, self._geometry.tile)
            at = tile * self._geometry.tile + min(self._geometry.tile, (offset // size + 1) * size)
        yield stop

    def _chunk(self, prompts: Prompts, first: int, stop: int) -> Chunk:
        """Return the chunk of the queries at positions first … stop - 1."""
        g, count = self._geometry, prompts.counts[0]
        queries = np.arange(first, stop) - prompts.position
        is_own = queries < prompts.counts[:, None]
        is_run = (np.diff(prompts.rows) == count).all() and (prompts.counts == count).all()
        spans = []
        for group in prompts.groups:
            start = max(group.first, self._first_seen(first) // g.tile)
            end = min(group.stop, -(-stop // g.tile))
            if start < end:
                width = self._width(stop - start * g.tile)
                hidden = list(self._hidden(first, stop, start, end, width))
                spans.append(Span(group=group, start=start, stop=end, width=width, hidden=hidden))
        return Chunk(
            rows=prompts.rows[:, None] + np.where(is_own, queries, 0),
            own=None if is_run else np.nonzero(is_own),
            spans=spans,
        )

    def _hidden(
        self, first: int, stop: int, start: int, end: int, width: int
    ) -> Iterator[tuple[int, Floats]]:
        """Return `Span.hidden` of the tiles start … end - 1 for the queries at first … stop - 1."""
        g, own = self._geometry, np.arange(first, stop)[:, None, None]
        left_behind = -(-self._first_seen(stop - 1) // g.tile)  # the last query sees all from here
        for tile in range(start, end):
            if left_behind <= tile < end - 1:
                continue
            keys = np.arange(tile * g.tile, tile * g.tile + width)
            hidden = keys > own
            if self._window is not None:
                hidden |= keys <= own - self._window
            if hidden.any():
                # Adding is five times as fast as copying where the mask is set.
                yield tile - start, np.where(hidden, -np.inf, 0).astype(np.float32)
