"""What a step's attention consists of, worked out once for all layers.

Keys are taken in **tiles** of a fixed number of positions, counted from position 0, and tiles in
**groups** of a fixed number of tiles, so that sums are formed in the same order whoever computes
with whom, in whatever chunks, wherever the blocks lie. A tile whose blocks are adjacent in the pool
is read in place; any other is gathered, and so is the last one of a sequence while it fills.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mie.ops.arrays import Ints
from mie.ops.backend import StepBatch

SCORES = 1 << 17
"""Scores that a thread forms at once: as float32 half of a 1 MiB L2 cache."""
GATHERED = 1 << 18
"""Elements of keys, or of values, that a decode gathers at once: they stay in the cache too."""
GATHERED_SHORT = 1 << 19
"""The same for short contexts: the cache holds fewer, but where little is to be done the threads'
waiting for each other's hand-overs of the GIL, once in a few calls, takes longer."""
SMALL_SCORES = 1200
"""Rows times keys up to which OpenBLAS multiplies by transposed keys without packing them (`M * N`
in kernel/x86_64/sgemm_small_kernel_permit_skylakex.c); above, it takes up to 3 times as long."""
PREFILL_ROWS = 64
"""Rows of a prefill's products where rows need not equal those of a decode bit for bit."""
PARTIAL_SUMS = 8
"""NumPy adds up a row in so many: zeros at its end change no bit if their number is a multiple."""


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
    def width_step(self) -> int:
        """What the positions that a last tile is shortened to are a multiple of."""
        return math.lcm(self.block_size, PARTIAL_SUMS)

    @cached_property
    def blocks_per_tile(self) -> int:
        return self.tile // self.block_size

    @cached_property
    def tiles_per_group(self) -> int:
        return max(1, SCORES // (self.num_kv_heads * self.num_rows * self.tile))

    def tiles_gathered(self, *, are_short: bool) -> int:
        """At once, of all KV heads."""
        elements = GATHERED_SHORT if are_short else GATHERED
        return max(1, elements // (self.num_kv_heads * self.tile * self.head_dim))


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
        num_tiles = -(-max(self.lengths) // geometry.tile)
        num_blocks = num_tiles * geometry.blocks_per_tile
        given = batch.block_tables[:, :num_blocks]
        blocks = np.zeros((len(given), num_blocks), np.int64)
        blocks[:, : given.shape[1]] = given
        # What lies beyond a length may name no block.
        positions = np.arange(num_blocks) * geometry.block_size
        blocks *= positions < batch.seq_lens[:, None]
        blocks = blocks.reshape(len(given), num_tiles, -1)
        self._blocks: list[list[list[int]]] = blocks.tolist()
        self._is_run: list[list[bool]] | None = None  # with short sequences no tile is full
        if max(self.lengths) >= geometry.tile:
            is_full = np.arange(1, num_tiles + 1) * geometry.tile <= batch.seq_lens[:, None]
            self._is_run = (is_full & (np.diff(blocks) == 1).all(-1)).tolist()

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
            end, width = (last, tile) if index < last else (len(gathered), last_width or tile)
            end = min(end, index + most_gathered * tile // width)
            while stop < end and gathered[stop]:
                stop += 1
            if stop > index:
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
        if self._is_run is None:
            return
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
    rows: slice | Ints
    """The queries, as indices into T."""
    num_units: int
    num_tiles: int
    """Of each unit."""
    width: int
    """Positions of each tile that scores are formed of."""
    stretches: list[Stretch]
    hidden: list[tuple[slice, NDArray[np.bool_]]]
    """Tiles, and which of their positions [tiles, width] the queries do not see."""
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
    """Tiles first … stop - 1 of sequence s, which its query sees from position ``begin`` on; the
    last has ``filled`` positions that hold tokens and is read as far as ``width``."""

    __slots__ = ("begin", "filled", "first", "s", "stop", "width")

    def __init__(self, s: int, first: int, stop: int, begin: int, filled: int, width: int) -> None:
        self.s, self.first, self.stop, self.begin = s, first, stop, begin
        self.filled, self.width = filled, width


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
    tile, step = geometry.tile, geometry.width_step
    for s in chosen:
        length = tiles.lengths[s]
        begin = 0 if window is None else max(0, length - window)
        groups = list(groups_of(begin, length, geometry))
        kind = alone if len(groups) == 1 else parted
        for first, stop in groups:
            filled = min(tile, length - (stop - 1) * tile)
            width = min(tile, -(-filled // step) * step) if shortens else tile
            unit = _Unit(s, first, stop, begin, filled, width)
            kind.setdefault(stop - first, []).append(unit)
    jobs: list[DecodeJob] = []
    parts: dict[int, list[tuple[int, int]]] = {}
    num_parts = 0
    for units in _bunches(parted, geometry, num_threads):
        place = slice(num_parts, num_parts + len(units))
        for i, unit in enumerate(units, start=num_parts):
            parts.setdefault(starts[unit.s], []).append((unit.first, i))
        num_parts = place.stop
        jobs.append(_job(units, starts, tiles, geometry, place))
    for units in _bunches(alone, geometry, num_threads):
        jobs.append(_job(units, starts, tiles, geometry, None))
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
    """Units of equal size, as many together as a thread takes at once: the largest first, and
    side by side those that are filled alike, for all are read as far as the fullest."""
    for size in sorted(units, reverse=True):
        equal = sorted(units[size], key=lambda unit: unit.width, reverse=True)
        costs = [unit.width if size == 1 else size * geometry.tile for unit in equal]
        at_once = geometry.tiles_per_group * geometry.tile
        count = max(num_threads, -(-sum(costs) // at_once))
        most = sum(costs) // count
        while len(starts := _cut(costs, most)) > count:
            most += most // 16 + 1
        for start, stop in pairwise([*starts, len(equal)]):
            yield equal[start:stop]


def _cut(costs: Sequence[int], most: int) -> list[int]:
    """Where bunches start that cost no more than ``most``, each of its units as much as the first,
    which is the dearest."""
    starts, at = [], 0
    while at < len(costs):
        starts.append(at)
        at += max(1, most // costs[at])
    return starts


def _job(
    units: Sequence[_Unit],
    starts: Sequence[int],
    tiles: Tiles,
    geometry: Geometry,
    parts: slice | None,
) -> DecodeJob:
    num_units, num_tiles = len(units), units[0].stop - units[0].first
    last_width = max(unit.width for unit in units)
    width = last_width if num_tiles == 1 else geometry.tile
    hidden = []
    positions = np.arange(width)
    fronts = [unit.begin - unit.first * geometry.tile for unit in units]
    if max(fronts) > 0:
        hidden.append((slice(0, num_units), positions < np.array(fronts)[:, None]))
    ends = [unit.filled for unit in units]
    if min(ends) < width:
        last = slice(num_units * (num_tiles - 1), num_units * num_tiles)
        hidden.append((last, positions >= np.array(ends)[:, None]))
    rows = [starts[unit.s] for unit in units]
    is_run = rows == list(range(rows[0], rows[0] + num_units))
    return DecodeJob(
        heads=slice(0, geometry.num_kv_heads),
        rows=slice(rows[0], rows[0] + num_units) if is_run else np.array(rows),
        num_units=num_units,
        num_tiles=num_tiles,
        width=width,
        stretches=tiles.stretches(
            [(unit.s, unit.first) for unit in units],
            num_tiles,
            geometry.tiles_gathered(are_short=num_tiles == 1),
            last_width,
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
