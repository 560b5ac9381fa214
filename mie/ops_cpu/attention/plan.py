"""Plan a step's attention once for all layers.

Keys are taken in **tiles** of a fixed number of positions, counted from position 0. Tiles are taken
in **groups** of a fixed number of tiles. So sums are formed in the same order for any batch, any
chunking and any block positions. A tile whose blocks are adjacent in the pool is read in place. Any
other is gathered, as is a sequence's last tile while it fills.
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
"""Scores that a thread computes at once. As float32 they take half of a 1 MiB L2 cache."""
GATHERED = 1 << 18
"""Elements of keys, or of values, that a decode gathers at once. They stay in the CPU cache too."""
GATHERED_SHORT = 1 << 19
"""Elements that a decode gathers at once for short contexts.

This exceeds the CPU cache, but with less work for each call the threads would wait longer for each
other's GIL hand-overs.
"""
SMALL_SCORES = 1200
"""Rows times keys up to which OpenBLAS multiplies by transposed keys without packing them.

The rule is `M * N` in kernel/x86_64/sgemm_small_kernel_permit_skylakex.c. Larger products take up
to 3 times as long.
"""
PREFILL_ROWS = 64
"""Rows of a prefill's products where they need not equal a decode's rows bit for bit."""
PARTIAL_SUMS = 8
"""NumPy sums a row in this many parts. Padding it with a multiple of this many zeros is exact."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The sizes that all products of a model's attention share."""

    num_kv_heads: int
    group: int
    """Number of query heads of a KV head."""
    head_dim: int
    block_size: int

    @cached_property
    def num_rows(self) -> int:
        """The rows of a product: the query heads of a KV head, rounded up to 4 or 8.

        Kernels take four or eight rows at a time. 3 rows take as long as 4, and 7 take longer than
        8.
        """
        multiple = 4 if self.group <= 4 else 8
        return -(-self.group // multiple) * multiple

    @cached_property
    def tile(self) -> int:
        """The number of positions of a tile, which is whole blocks."""
        wanted = 128 if self.num_rows * 128 <= SMALL_SCORES else 64
        return self.block_size * max(1, wanted // self.block_size)

    @cached_property
    def width_step(self) -> int:
        """The number of positions that a shortened last tile is a multiple of."""
        return math.lcm(self.block_size, PARTIAL_SUMS)

    @cached_property
    def blocks_per_tile(self) -> int:
        return self.tile // self.block_size

    @cached_property
    def tiles_per_group(self) -> int:
        return max(1, SCORES // (self.num_kv_heads * self.num_rows * self.tile))

    def tiles_gathered(self, *, are_short: bool) -> int:
        """Return how many tiles of all KV heads are gathered at once."""
        elements = GATHERED_SHORT if are_short else GATHERED
        return max(1, elements // (self.num_kv_heads * self.tile * self.head_dim))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tiles that are read together, either in place at equal distances in the pool, or gathered."""

    at: slice
    """Index of these tiles in the job or group."""
    block_ids: Sequence[int]
    """The blocks of all tiles. If read in place, the first tile's come first."""
    step: int | None
    """Blocks from one tile to the next if read in place, else None."""
    width: int
    """Number of positions that are read of each tile: all, or those that any tile has filled."""
    ends: list[tuple[int, int]]
    """Tiles that are not filled yet: (tile of the stretch, number of filled positions)."""


class Tiles:
    """The tiles of a step's sequences and their place in the pool."""

    def __init__(self, batch: StepBatch, geometry: Geometry) -> None:
        self._geometry = geometry
        self.lengths: list[int] = batch.seq_lens.tolist()
        num_tiles = -(-max(self.lengths) // geometry.tile)
        num_blocks = num_tiles * geometry.blocks_per_tile
        given = batch.block_tables[:, :num_blocks]
        blocks = np.zeros((len(given), num_blocks), np.int64)
        blocks[:, : given.shape[1]] = given
        # Table entries beyond a sequence's length may not be valid blocks.
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
        """Return the stretches of some units: the next ``num_tiles`` tiles from each of ``starts``.

        A start is (sequence, its tile). Tiles are ordered by position first: the first tile of
        every unit, then the second, and so on. So the last tiles, which are rarely full, are
        gathered together, up to ``last_width`` positions.
        """
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
        """Find runs of two or more tiles at equal distances: (which, first block, distance).

        The tiles belong to one unit if it has many, or else to several units at the same index. A
        single tile is gathered as fast as it would be read in place.
        """
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
        """Find ascending arithmetic progressions of tiles: (begin, end, first block, distance)."""
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
    """Some units of equal size, as the work of one thread.

    A unit is the tiles of one group of a sequence that has one query.
    """

    heads: slice
    """The KV heads of the job."""
    rows: slice | Ints
    """The queries, as indices into T."""
    num_units: int
    num_tiles: int
    """Number of tiles of each unit."""
    width: int
    """Number of positions of each tile that are scored."""
    stretches: list[Stretch]
    hidden: list[tuple[slice, NDArray[np.bool_]]]
    """Pairs of tiles and their hidden positions [tiles, width], which the queries do not see."""
    parts: slice | None
    """Index of the results that are to be combined with those of other units."""


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """The decodes of a step."""

    jobs: list[DecodeJob]
    """All jobs, largest first."""
    combinations: list[tuple[int, list[int]]]
    """The queries with several units, as indices into T, and their parts in order."""
    num_parts: int


class _Unit:
    """The tiles first … stop - 1 of sequence s, which its query sees from position ``begin`` on.

    The last tile has ``filled`` positions with tokens and is read up to ``width``.
    """

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
    """Plan the decodes of the ``chosen`` sequences of the batch.

    With ``shortens`` only the filled part of a last tile is multiplied.
    """
    starts = batch.cu_seqlens_q.tolist()
    alone: dict[int, list[_Unit]] = {}  # single units, by number of tiles
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
    """Yield the tiles (first, stop) of positions begin … end - 1, group by group."""
    first, last = begin // geometry.tile, -(-end // geometry.tile)
    while first < last:
        stop = (first // geometry.tiles_per_group + 1) * geometry.tiles_per_group
        yield first, min(stop, last)
        first = stop


def _bunches(
    units: dict[int, list[_Unit]], geometry: Geometry, num_threads: int
) -> Iterator[list[_Unit]]:
    """Bunch units of equal size, as many as a thread takes at once, largest first.

    Units with similar fill are put together, because all are read as far as the fullest.
    """
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
    """Return the starts of batches whose padded cost is at most ``most``.

    The padded cost is count × largest unit. The first unit of a batch is its largest.
    """
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
    """Split the job by KV heads, if there are fewer jobs than threads."""
    num_shares = min(num_threads, geometry.num_kv_heads)
    bounds = [geometry.num_kv_heads * i // num_shares for i in range(num_shares + 1)]
    for first, stop in pairwise(bounds):
        yield replace(job, heads=slice(first, stop))
