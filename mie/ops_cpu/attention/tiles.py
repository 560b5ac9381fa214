"""Find the tiles of a step's sequences in the block pool.

Full tiles of adjacent blocks are read in place, and so is the last tile of a single decode. Others
are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np

from mie.arithmetic import ceil_div
from mie.ops.arrays import Ints
from mie.ops.backend import StepBatch
from mie.ops_cpu.attention.geometry import Geometry

Start = tuple[int, int]
"""A sequence, and a tile of it or that tile's first position."""


@dataclass(slots=True)
class Segment:
    """Tiles that are read together, either in place at equal distances in the pool, or gathered."""

    at: range
    """The tiles among those of their split."""
    width: int
    """Number of positions that are read of each tile."""
    block_ids: list[int]
    """The blocks of all tiles. If they are read in place, only the first block."""
    step: int | None = None
    """Blocks from one tile to the next if they are read in place, else None."""
    starts: tuple[Start, ...] = ()
    """The sequence and first position of each tile, unless all are full and read in place."""
    filled: int | None = None
    """The number of positions with a token, if a tile that may not be full is read in place."""
    empty: Ints | None = None
    """The slots without a token [Hkv, slots], as indices into all heads' gathered positions."""
    num_heads: int = 1
    """The number of KV heads."""
    width_of: Callable[[int], int] | None = None
    """Returns how many positions to read in place if so many are filled, if the tile may grow."""

    def fill(self, lengths: Sequence[int]) -> None:
        """Find the slots without a token, now that the sequences have these lengths."""
        filled = [lengths[s] - first for s, first in self.starts]
        if self.step is not None:
            self.filled = filled[0] if filled else None
            if self.filled is not None and self.width_of is not None:
                self.width = self.width_of(self.filled)
            return
        is_empty = np.arange(self.width) >= np.array(filled)[:, None]
        slots = np.flatnonzero(is_empty)
        heads = np.arange(self.num_heads)[:, None] * is_empty.size
        self.empty = heads + slots if slots.size else None


class Tiles:
    """The tiles of a step's sequences and their places in the pool."""

    def __init__(self, batch: StepBatch, geometry: Geometry) -> None:
        self._geometry = geometry
        self.lengths: list[int] = batch.seq_lens.tolist()
        tile, longest = geometry.tile, max(self.lengths)
        num_tiles = ceil_div(longest, tile)
        num_blocks = num_tiles * (tile // geometry.block_size)
        given = batch.block_tables[:, :num_blocks]
        blocks = np.zeros((len(given), num_blocks), np.int64)
        blocks[:, : given.shape[1]] = given
        # Table entries beyond a sequence's length may not be valid blocks.
        positions = np.arange(num_blocks) * geometry.block_size
        blocks *= positions < batch.seq_lens[:, None]
        by_tile = blocks.reshape(len(given), num_tiles, -1)
        self._blocks: list[list[list[int]]] = by_tile.tolist()
        self._is_run: list[list[bool]] | None = None  # no sequence fills a tile
        if longest >= tile:
            is_full = np.arange(1, num_tiles + 1) * tile <= batch.seq_lens[:, None]
            self._is_run = (is_full & (np.diff(by_tile) == 1).all(-1)).tolist()

    def segments(
        self,
        starts: Sequence[Start],
        num_tiles: int,
        last_width: int,
        most: int,
        *,
        reads_last_in_place: bool,
        width_of: Callable[[int], int] | None,
    ) -> list[Segment]:
        """Return how to read ``num_tiles`` tiles from each of ``starts``.

        The first tiles of all sequences come first, then the second ones. So the last tiles, which
        are rarely full, are gathered together, up to ``last_width`` positions. At most ``most``
        positions are gathered at once. With ``reads_last_in_place``, there is a single sequence,
        and its last tile is read in place if its blocks are adjacent. With ``width_of``, the tile
        may grow by blocks that follow these.
        """
        tiles = [(s, first + i) for i in range(num_tiles) for s, first in starts]
        found = list(self._in_place(tiles, len(starts)))
        if reads_last_in_place and not (found and found[-1].at[-1] == len(tiles) - 1):
            found += self._last_in_place(tiles, last_width, width_of)
        placed = set(chain.from_iterable(segment.at for segment in found))
        last = len(tiles) - len(starts)
        for part, width in (
            (range(last), self._geometry.tile),
            (range(last, len(tiles)), last_width),
        ):
            for is_placed, group in groupby(part, placed.__contains__):
                if not is_placed:
                    found += self._gathered(tiles, list(group), width, max(1, most // width))
        return found

    def _in_place(self, tiles: Sequence[Start], num_sequences: int) -> Iterator[Segment]:
        """Find two or more full tiles at equal ascending distances, or one of a single sequence.

        They belong to one sequence if it has many, or else to several sequences at the same index.
        """
        if self._is_run is None:
            return
        firsts = [self._blocks[s][t][0] if self._is_run[s][t] else -1 for s, t in tiles]
        end, count = len(tiles), num_sequences
        by_sequence = [range(i, end, count) for i in range(count)]
        by_index = [range(i, i + count) for i in range(0, end, count)]
        for line in by_sequence if end > count**2 else by_index:
            begin = 0
            while begin + 1 < len(line):
                block = firsts[line[begin]]
                step, stop = firsts[line[begin + 1]] - block, begin + 1
                if block >= 0 and step > 0:
                    while stop < len(line) and firsts[line[stop]] == block + (stop - begin) * step:
                        stop += 1
                if stop > begin + 1 or (count == 1 and block >= 0):
                    yield Segment(line[begin:stop], self._geometry.tile, [block], step)
                begin = stop

    def _last_in_place(
        self, tiles: Sequence[Start], width: int, width_of: Callable[[int], int] | None
    ) -> Iterator[Segment]:
        """Find the last tile if its blocks are adjacent."""
        s, t = tiles[-1]
        blocks = self._blocks[s][t][: width // self._geometry.block_size]
        if blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            at, start = range(len(tiles) - 1, len(tiles)), (s, t * self._geometry.tile)
            segment = Segment(at, width, blocks[:1], step=0, starts=(start,), width_of=width_of)
            segment.fill(self.lengths)
            yield segment

    def _gathered(
        self, tiles: Sequence[Start], places: Sequence[int], width: int, most: int
    ) -> Iterator[Segment]:
        """Yield segments of at most ``most`` tiles for adjacent places."""
        num_blocks, end = width // self._geometry.block_size, places[-1] + 1
        for first in range(places[0], end, most):
            at = range(first, min(first + most, end))
            own = tiles[at.start : at.stop]
            block_ids = [block for s, t in own for block in self._blocks[s][t][:num_blocks]]
            starts = tuple((s, t * self._geometry.tile) for s, t in own)
            segment = Segment(
                at, width, block_ids, starts=starts, num_heads=self._geometry.num_kv_heads
            )
            segment.fill(self.lengths)
            yield segment
