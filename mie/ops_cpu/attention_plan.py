"""What a step's attention consists of, worked out once for all layers.

Keys are taken in **tiles** of a fixed number of positions, counted from position 0, and tiles in
**groups** of a fixed number of tiles, so that sums are formed in the same order whoever computes
with whom, in whatever chunks, wherever the blocks lie. A tile whose blocks are adjacent in the pool
is read in place; any other is gathered, and so is the last one of a sequence while it fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np

from mie.ops.arrays import Ints
from mie.ops.backend import StepBatch

SCORES = 1 << 17
"""Scores that a thread forms at once: as float32 half of a 1 MiB L2 cache."""
GATHERED = 1 << 18
"""Elements of keys, or of values, that a decode gathers at once: they stay in the cache too."""
SMALL_SCORES = 1200
"""Rows times keys up to which OpenBLAS multiplies by transposed keys without packing them (`M * N`
in kernel/x86_64/sgemm_small_kernel_permit_skylakex.c); above, it takes up to 3 times as long."""
PREFILL_ROWS = 64
"""Rows of a prefill's products where rows need not equal those of a decode bit for bit."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that all products of a model's attention share."""

    num_kv_heads: int
    group: int
    """Query heads of a KV head."""
    head_dim: int
    block_size: int

    @cached_property
    def num_rows(self) -> int:
        """Rows of a product: the query heads of a KV head, rounded up, for kernels take four or
        eight rows at a time (3 rows take as long as 4, and 7 longer than 8)."""
        multiple = 4 if self.group <= 4 else 8
        return -(-self.group // multiple) * multiple

    @cached_property
    def tile(self) -> int:
        """Positions of a tile, whole blocks."""
        wanted = 128 if self.num_rows * 128 <= SMALL_SCORES else 64
        return self.block_size * max(1, wanted // self.block_size)

    @cached_property
    def blocks_per_tile(self) -> int:
        return self.tile // self.block_size

    @cached_property
    def tiles_per_group(self) -> int:
        return max(1, SCORES // (self.num_kv_heads * self.num_rows * self.tile))

    @cached_property
    def tiles_gathered(self) -> int:
        """At once, of all KV heads."""
        return max(1, GATHERED // (self.num_kv_heads * self.tile * self.head_dim))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tiles that are read together: in place, at equal distances in the pool, or gathered."""

    at: slice
    """Which tiles of the job or group."""
    block_ids: Sequence[int]
    """Of all tiles; in place the first one's first."""
    step: int | None
    """In place: blocks from one tile to the next."""
    width: int
    """Positions of each tile that are read: all, or those that any of them has filled."""
    ends: list[tuple[int, int]]
    """(tile of the stretch, its positions that hold tokens) of tiles that are not filled so far."""


class Tiles:
    """The tiles of the sequences of a step, and where they lie."""

    def __init__(self, batch: StepBatch, geometry: Geometry) -> None:
        self._geometry = geometry
        self.lengths: list[int] = batch.seq_lens.tolist()
        per_tile = geometry.blocks_per_tile
        num_tiles = -(-batch.block_tables.shape[1] // per_tile)
        tables = np.zeros((len(self.lengths), num_tiles * per_tile), np.int64)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        # What lies beyond a length may name no block.
        num_blocks = -(-batch.seq_lens // geometry.block_size)
        tables[np.arange(tables.shape[1]) >= num_blocks[:, None]] = 0
        blocks = tables.reshape(len(tables), num_tiles, per_tile)
        is_full = np.arange(1, num_tiles + 1) * geometry.tile <= batch.seq_lens[:, None]
        is_run = is_full & (np.diff(blocks) == 1).all(-1)
        self._is_run: list[list[bool]] = is_run.tolist()
        self._blocks: list[list[list[int]]] = blocks.tolist()

    def stretches(
        self,
        starts: Sequence[tuple[int, int]],
        num_tiles: int,
        most_gathered: int,
        last_width: int | None = None,
    ) -> list[Stretch]:
        """The stretches of some units: the next ``num_tiles`` tiles from each of ``starts``, which
        are (sequence, its tile). They are counted tile by tile: the first of every unit, then the
        second, …, so that the last ones, which are rarely full, are gathered at once, as far as
        ``last_width``."""
        num_units, tile = len(starts), self._geometry.tile
        last = num_units * (num_tiles - 1)
        stretches: list[Stretch] = []
        gathered = [True] * (num_units * num_tiles)
        for at, first, step in self._in_place(starts, num_tiles):
            stretches.append(Stretch(at, [first], step, tile, []))
            gathered[at] = [False] * len(range(at.start, at.stop, at.step))
        index = 0
        while index < len(gathered):
            stop = index
            end = last if index < last else len(gathered)
            while stop < min(end, index + most_gathered) and gathered[stop]:
                stop += 1
            if stop > index:
                width = (last_width or tile) if index >= last else tile
                stretches.append(self._gathered(starts, slice(index, stop), width))
            index = max(stop, index + 1)
        return stretches

    def _in_place(
        self, starts: Sequence[tuple[int, int]], num_tiles: int
    ) -> Iterator[tuple[slice, int, int]]:
        """Where two or more tiles lie at equal distances: (which, the first block, the distance).
        Those of one unit, if it has many, or else the same one of several units. A tile alone is
        gathered as fast as it is read by calls of its own."""
        num_units = len(starts)
        if num_tiles > num_units:
            for unit, (s, first) in enumerate(starts):
                tiles = [(s, first + i) for i in range(num_tiles)]
                for begin, end, block, step in self._progressions(tiles):
                    at = slice(unit + begin * num_units, end * num_units, num_units)
                    yield at, block, step
        else:
            for i in range(num_tiles):
                tiles = [(s, first + i) for s, first in starts]
                for begin, end, block, step in self._progressions(tiles):
                    yield slice(i * num_units + begin, i * num_units + end, 1), block, step

    def _progressions(
        self, tiles: Sequence[tuple[int, int]]
    ) -> Iterator[tuple[int, int, int, int]]:
        """(begin, end, first block, distance) of tiles, each a run, at equal distances forward."""
        firsts = [self._blocks[s][t][0] if self._is_run[s][t] else -1 for s, t in tiles]
        begin = 0
        while begin + 1 < len(firsts):
            end, step = begin + 1, firsts[begin + 1] - firsts[begin]
            if firsts[begin] >= 0 and step > 0:
                while end < len(firsts) and firsts[end] - firsts[end - 1] == step:
                    end += 1
            if end > begin + 1:
                yield begin, end, firsts[begin], step
            begin = end

    def _gathered(self, starts: Sequence[tuple[int, int]], at: slice, width: int) -> Stretch:
        num_blocks = width // self._geometry.block_size
        block_ids: list[int] = []
        ends = []
        for i in range(at.start, at.stop):
            number, unit = divmod(i, len(starts))
            s, first = starts[unit]
            block_ids += self._blocks[s][first + number][:num_blocks]
            filled = self.lengths[s] - (first + number) * self._geometry.tile
            if filled < width:
                ends.append((i - at.start, filled))
        return Stretch(at, block_ids, None, width, ends)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeJob:
    """Some units, the tiles of one group of a sequence that has one query, all of equal size; the
    work of one thread."""

    heads: slice
    """Of the KV heads."""
    rows: Ints
    """The queries, as indices into T."""
    num_tiles: int
    """Of each unit."""
    stretches: list[Stretch]
    hidden: list[tuple[int, slice]]
    """(tile, positions of it) that the query does not see."""
    parts: slice | None
    """Where the results go that are to be combined with those of other units."""


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """The decodes of a step."""

    jobs: list[DecodeJob]
    """The largest first."""
    combinations: list[tuple[int, list[int]]]
    """The queries with several units, as indices into T, and their parts in order."""
    num_parts: int


class _Unit:
    """Tiles first … stop - 1 of sequence s, which its query sees from position ``begin`` on."""

    __slots__ = ("begin", "first", "s", "stop")

    def __init__(self, s: int, first: int, stop: int, begin: int) -> None:
        self.s, self.first, self.stop, self.begin = s, first, stop, begin


def plan_decodes(
    batch: StepBatch,
    chosen: Sequence[int],
    tiles: Tiles,
    geometry: Geometry,
    window: int | None,
    num_threads: int,
    *,
    shortens: bool,
) -> DecodePlan:
    """The jobs for the ``chosen`` sequences of the batch; ``shortens``: of last tiles only what is
    filled is multiplied."""
    starts = batch.cu_seqlens_q.tolist()
    alone: dict[int, list[_Unit]] = {}  # by the number of tiles
    parted: dict[int, list[_Unit]] = {}
    for s in chosen:
        begin = 0 if window is None else max(0, tiles.lengths[s] - window)
        groups = list(groups_of(begin, tiles.lengths[s], geometry))
        for first, stop in groups:
            kind = alone if len(groups) == 1 else parted
            kind.setdefault(stop - first, []).append(_Unit(s, first, stop, begin))
    jobs: list[DecodeJob] = []
    parts: dict[int, list[tuple[int, int]]] = {}
    num_parts = 0
    for units in _bunches(parted, geometry, num_threads):
        place = slice(num_parts, num_parts + len(units))
        for i, unit in enumerate(units, start=num_parts):
            parts.setdefault(starts[unit.s], []).append((unit.first, i))
        num_parts = place.stop
        jobs.append(_job(units, starts, tiles, geometry, place, shortens))
    for units in _bunches(alone, geometry, num_threads):
        jobs.append(_job(units, starts, tiles, geometry, None, shortens))
    if len(jobs) < num_threads:
        jobs = [part for job in jobs for part in _by_heads(job, geometry, num_threads)]
    combinations = [(row, [i for _, i in sorted(own)]) for row, own in parts.items()]
    return DecodePlan(jobs=jobs, combinations=combinations, num_parts=num_parts)


def groups_of(begin: int, end: int, geometry: Geometry) -> Iterator[tuple[int, int]]:
    """The tiles (first, stop) of positions begin … end - 1, group by group."""
    first, last = begin // geometry.tile, -(-end // geometry.tile)
    while first < last:
        stop = (first // geometry.tiles_per_group + 1) * geometry.tiles_per_group
        yield first, min(stop, last)
        first = stop


def _bunches(
    units: dict[int, list[_Unit]], geometry: Geometry, num_threads: int
) -> Iterator[list[_Unit]]:
    """Units of equal size, as many together as a thread takes at once: the largest first."""
    for size in sorted(units, reverse=True):
        equal = units[size]
        count = min(max(1, geometry.tiles_per_group // size), -(-len(equal) // num_threads))
        for at in range(0, len(equal), count):
            yield equal[at : at + count]


def _job(
    units: Sequence[_Unit],
    starts: Sequence[int],
    tiles: Tiles,
    geometry: Geometry,
    parts: slice | None,
    shortens: bool,
) -> DecodeJob:
    num_units, num_tiles = len(units), units[0].stop - units[0].first
    hidden = []
    most_filled = 0
    for i, unit in enumerate(units):
        front = unit.begin - unit.first * geometry.tile
        if front > 0:
            hidden.append((i, slice(0, front)))
        filled = tiles.lengths[unit.s] - (unit.stop - 1) * geometry.tile
        if filled < geometry.tile:
            hidden.append(((num_tiles - 1) * num_units + i, slice(filled, None)))
        most_filled = max(most_filled, min(filled, geometry.tile))
    width = -(-most_filled // geometry.block_size) * geometry.block_size
    return DecodeJob(
        heads=slice(0, geometry.num_kv_heads),
        rows=np.array([starts[unit.s] for unit in units]),
        num_tiles=num_tiles,
        stretches=tiles.stretches(
            [(unit.s, unit.first) for unit in units],
            num_tiles,
            geometry.tiles_gathered,
            width if shortens else None,
        ),
        hidden=hidden,
        parts=parts,
    )


def _by_heads(job: DecodeJob, geometry: Geometry, num_threads: int) -> Iterator[DecodeJob]:
    """The job cut by KV heads, for want of jobs."""
    num_shares = min(num_threads, geometry.num_kv_heads)
    bounds = [geometry.num_kv_heads * i // num_shares for i in range(num_shares + 1)]
    for first, stop in pairwise(bounds):
        yield replace(job, heads=slice(first, stop))
