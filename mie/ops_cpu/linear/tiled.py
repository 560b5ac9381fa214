"""Implement the plans `tiled` and `packed`: matrices in tiles, which the threads share out.

Weights [K, N] are stored as tiles [N / W, K, W], and rows are multiplied a group at a time. A
`Layout` says how. No product packs its weights, as BLAS would do every time. A tile stays in the
CPU cache while all rows are multiplied, so weights come from memory once a call.

A row's result does not depend on the other rows, because its bits are the same in every group that
the layout chooses.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats
from mie.ops_cpu.allocator import CachingAllocator, WeightAllocator
from mie.ops_cpu.linear.geometry import DEFAULT_WIDTH, KERNEL_ROWS, MAX_CUTS, Geometry
from mie.ops_cpu.linear.kernel import Kernel
from mie.ops_cpu.linear.layout import Buffers, Layout, TileLayout
from mie.ops_cpu.linear.matrix import work_bytes
from mie.ops_cpu.linear.packed import PackedLayout, width_of
from mie.ops_cpu.linear.ready import ReadyProduct, do_alone
from mie.ops_cpu.linear.widen import stored
from mie.ops_cpu.threads.counts import HeadStart, ThreadCount
from mie.ops_cpu.threads.workers import Workers

if TYPE_CHECKING:
    from mie.ops_cpu.linear.shared import SharedProducts
    from mie.ops_cpu.shared_tokens import SharedTokens

BYTES_PER_THREAD = 1 << 18
"""Bytes of weights below which another thread takes longer to start than it saves anywhere."""
MOST_TURNS = 4
"""Maximum number of tasks of a thread. With several, a delayed thread leaves work to the others."""
BYTES_PER_TURN = 1 << 27
"""Bytes of weights of one task among several, which take some milliseconds.

Another task costs tens of microseconds, because threads wait for the GIL.
"""
MAX_FEW_ROWS = 24
"""Maximum number of rows of a product that is prepared. A larger one takes long enough."""
CERTAIN = 1 << 5
"""Times the least bytes for a thread, from which on more threads are faster than one.

For n threads it takes n² times as much, because they take the GIL one after another.
"""
READING = 1
"""Groups of rows whose products take as long as reading their tile from memory."""


class FewRows(NamedTuple):
    """What a matrix has for products of a small number of rows."""

    product: ReadyProduct
    """Computes it in one thread."""
    thread_count: ThreadCount


class TiledMatrix:
    """Tiles [ceil(N / W), K, W]. Columns past N hold zeros."""

    def __init__(
        self,
        plan: TiledPlan,
        layout: Layout,
        tiles: NDArray[Any],
        num_outputs: int,
        bias: Floats | None,
    ) -> None:
        self._plan = plan
        self.layout = layout
        self.tiles = tiles
        self.num_outputs = num_outputs
        self.bias = bias
        """[ceil(N / W) * W]"""
        self.number = plan.remember(self)
        """A number that no other matrix of the plan has."""
        self.few_rows: dict[int, FewRows] = {}
        """What the plan has prepared, by the number of rows."""
        self.nbytes = tiles.nbytes + (0 if bias is None else bias.nbytes)

    def apply(self, x: Floats, residual: Floats | None, *, is_brief: bool = False) -> Floats:
        """Compute `ops.linear.linear`. A brief result lasts until the next product."""
        return self._plan.apply(x, self, residual, is_brief=is_brief)


class TiledPlan:
    """Multiplies by tiles, which the threads share out."""

    def __init__(
        self,
        dtype: np.dtype[Any],
        workers: Workers,
        weight_dtype: str = "auto",
        bytes_per_thread: int = BYTES_PER_THREAD,
        allocator: CachingAllocator | None = None,
        weights: WeightAllocator | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        """Multiply in ``dtype``. A ``kernel`` can multiply by packed tiles of float32."""
        self.dtype = dtype
        self._wide, self._sums = (Buffers(workers.num_threads, dtype) for _ in range(2))
        self.geometry = Geometry(dtype)
        self.layouts: dict[int, Layout] = {
            width: TileLayout(self.geometry, width, self._wide, self._sums) for width in KERNEL_ROWS
        }
        """The layouts that NumPy multiplies by, by their width."""
        self._kernel = kernel
        self._packed: dict[tuple[int, bool], PackedLayout] = {}
        self._allocator = allocator or CachingAllocator()
        self._weights = weights or WeightAllocator()
        self._weight_dtype = weight_dtype
        self._workers = workers
        self._bytes_per_thread = bytes_per_thread
        self.shared: SharedProducts | None = None
        """Where processes share this step's products. Otherwise threads do."""
        self.by_token: SharedTokens | None = None
        """Where processes share this step's tokens."""
        self._num_loaded = 0
        self._matrices: list[weakref.ref[TiledMatrix]] = []
        self._counts: dict[tuple[tuple[int, ...], int, bool], ThreadCount] = {}
        self._head_starts: dict[tuple[int, ...], HeadStart] = {}
        self._tasks: dict[tuple[int, int, int, int, int], list[tuple[slice, slice]]] = {}
        # Products of few rows share their memory. A result lasts until the next one.
        self._few_rows, self._few_results = (Buffers(1, dtype) for _ in range(2))

    def release(self) -> None:
        """Free the working memory."""
        for buffers in (self._wide, self._sums, self._few_rows, self._few_results):
            buffers.release()
        for matrix in self.matrices():
            matrix.few_rows.clear()

    @property
    def has_packed(self) -> bool:
        """Whether tiles can be packed for the inner kernel of BLAS."""
        return self._kernel is not None

    def packed(self, num_inputs: int, num_outputs: int, *, is_invariant: bool) -> PackedLayout:
        """Return the packed layout for a matrix [K, N]."""
        assert self._kernel is not None
        width = width_of(num_inputs, num_outputs)
        key = width, is_invariant
        if key not in self._packed:
            self._packed[key] = PackedLayout(
                self._kernel, self._wide, width, is_invariant=is_invariant
            )
        return self._packed[key]

    def load(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        bias: NDArray[Any] | None = None,
        layout: Layout | None = None,
    ) -> TiledMatrix:
        """Load a matrix from the rows of a checkpoint's (N, K), block by block.

        ``layout`` is `TileLayout` with the default width, if it is not given.
        """
        layout = layout or self.layouts[DEFAULT_WIDTH]
        width = layout.width
        tiles: NDArray[Any] = np.empty(0)
        column = 0
        for block in blocks:
            block = stored(block, self._weight_dtype, self.dtype)
            if column == 0:
                tiles = self._new_tiles(shape, width, block.dtype)
            for start, stop in _pieces(column, column + len(block), width):
                tile, first = divmod(start, width)
                layout.put(block[start - column : stop - column], tiles[tile], first)
            column += len(block)
        if bias is not None:
            bias = np.pad(bias.astype(self.dtype), (0, len(tiles) * width - len(bias)))
        return TiledMatrix(self, layout, tiles, shape[0], bias)

    def _new_tiles(self, shape: tuple[int, int], width: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return zeros for a checkpoint's (N, K).

        Each thread writes the tiles that it will multiply by. So with several memory nodes, they
        are on the thread's own one.
        """
        num_outputs, num_inputs = shape
        tiles = self._weights.empty((ceil_div(num_outputs, width), num_inputs, width), dtype)

        def fill(_: int, shares: Iterable[slice]) -> None:
            for own in shares:
                tiles[own] = 0

        self._workers.share(fill, _shares(len(tiles), self._workers.num_threads))
        return tiles

    def remember(self, matrix: TiledMatrix) -> int:
        """List a matrix in `matrices` for as long as it exists. Return a number of its own."""
        self._matrices.append(weakref.ref(matrix))
        self._num_loaded += 1
        return self._num_loaded

    def matrices(self) -> list[TiledMatrix]:
        """Return the matrices with this plan."""
        return [matrix for each in self._matrices if (matrix := each()) is not None]

    def apply(
        self, x: Floats, matrix: TiledMatrix, residual: Floats | None, *, is_brief: bool = False
    ) -> Floats:
        """Compute `ops.linear.linear`. A brief result lasts until the next product."""
        shared = self.shared
        if shared is not None and shared.takes(matrix, len(x)):
            return shared.apply(x, matrix, residual, is_brief=is_brief)
        if 0 < len(x) <= MAX_FEW_ROWS:
            few = matrix.few_rows.get(len(x)) or self._prepare(matrix, len(x))
            count = few.thread_count
            if count.choose() == 1:
                begin = perf_counter()
                y = few.product.apply(x, residual, do_alone, is_brief=is_brief)
                if count.is_trial:
                    count.note(perf_counter() - begin)
                return y
        num_tiles, num_inputs, width = matrix.tiles.shape
        cut = matrix.layout.cut(len(x), num_inputs)
        y = self._allocator.empty((cut.num_padded, num_tiles * width), self.dtype)
        for rows, group, num_groups in cut.calls:
            own = None if residual is None else residual[rows]
            padded = y[rows.start : rows.start + num_groups * group]
            groups = matrix.layout.groups(x[rows], (num_groups, group), self._allocator)
            count = self._count(matrix.tiles, len(padded))
            begin = perf_counter()
            self._multiply(groups, matrix, padded, own, count.choose())
            if count.is_trial:
                count.note(perf_counter() - begin)
        result: Floats = y[: len(x)]
        if num_tiles * width > matrix.num_outputs:
            result = np.ascontiguousarray(result[:, : matrix.num_outputs])
        return result

    def _prepare(self, matrix: TiledMatrix, num_rows: int) -> FewRows:
        num_tiles, num_inputs, width = matrix.tiles.shape
        num_padded = matrix.layout.cut(num_rows, num_inputs).num_padded
        rows = self._few_rows.take(0, (num_padded * num_inputs,))
        result = self._few_results.take(0, (num_padded * num_tiles * width,))
        whole = slice(0, num_tiles)
        product = ReadyProduct(matrix, num_rows, [whole], rows, result, self._allocator)
        few = FewRows(product, self._count(matrix.tiles, num_padded))
        matrix.few_rows[num_rows] = few
        return few

    def _multiply(
        self,
        groups: Floats,
        matrix: TiledMatrix,
        y: Floats,
        residual: Floats | None,
        num_threads: int,
    ) -> None:
        """Multiply into y [rows of whole groups, columns of whole tiles]."""
        tiles, (num_groups, group, _), layout = matrix.tiles, groups.shape, matrix.layout
        num_tiles, _, width = tiles.shape
        at_once = layout.tiles_at_once(tiles, group)
        begin = perf_counter()
        if num_threads == 1:
            layout.product(groups, tiles, y, 0, at_once)
            _add(y, matrix.bias, residual)
        else:

            def work(thread: int, tasks: Iterable[tuple[slice, slice]]) -> None:
                for which, some in tasks:
                    own = slice(which.start * at_once, which.stop * at_once)
                    rows = slice(some.start * group, some.stop * group)
                    columns = slice(own.start * width, own.stop * width)
                    layout.product(groups[some], tiles[own], y[rows, columns], thread, at_once)
                    bias = None if matrix.bias is None else matrix.bias[columns]
                    added = None if residual is None else residual[rows, columns]
                    _add(y[rows, columns], bias, added)

            num_bytes = work_bytes(tiles.nbytes, len(y))
            number = ceil_div(num_tiles, at_once)
            head_start = self._head_start(number, *tiles.shape[1:], num_groups, num_threads)
            key = number, num_groups, num_threads, num_bytes, round(head_start.extra)
            if key not in self._tasks:
                if len(self._tasks) >= MAX_CUTS:
                    self._tasks.clear()
                self._tasks[key] = tasks_of(*key)
            tasks = self._tasks[key]
            lag = self._workers.share(work, tasks, num_threads)
            if lag and len(tasks) == num_threads:
                head_start.note(lag, perf_counter() - begin)

    def _count(self, tiles: NDArray[Any], num_rows: int) -> ThreadCount:
        """Return what knows how many threads to use for a product of this kind."""
        num_bytes, is_alone = work_bytes(tiles.nbytes, num_rows), self._workers.are_resting
        kind = tiles.shape, num_bytes.bit_length(), is_alone
        if kind not in self._counts:
            most = 1 if is_alone else self._workers.at_most(num_bytes // self._bytes_per_thread)
            least = math.isqrt(num_bytes // (CERTAIN * self._bytes_per_thread))
            self._counts[kind] = ThreadCount(max(1, min(least, most)), most)
        return self._counts[kind]

    def _head_start(self, *kind: int) -> HeadStart:
        """Return what knows how many more tiles the caller takes in a product of this kind."""
        if kind not in self._head_starts:
            self._head_starts[kind] = HeadStart(kind[0], kind[-1])
        return self._head_starts[kind]


def tasks_of(
    num_tiles: int, num_groups: int, num_threads: int, num_bytes: int, head_start: int = 0
) -> list[tuple[slice, slice]]:
    """Return the tiles and groups of each task. The first has ``head_start`` more tiles.

    A task is some tiles with all groups. If the tiles do not divide evenly, the groups are shared
    out too, and each share of them reads the weights again.
    """
    number = num_threads * max(1, min(num_bytes // BYTES_PER_TURN // num_threads, MOST_TURNS))

    def cost(reads: int) -> int:
        """Return the time of the largest task."""
        return ceil_div(num_tiles * reads, number) * (ceil_div(num_groups, reads) + READING)

    divisors = (n for n in range(1, min(num_groups, number) + 1) if number % n == 0)
    reads = min(divisors, key=cost, default=1)
    ahead = head_start if number == num_threads and reads == 1 else 0
    return [
        (tiles, groups)
        for tiles in _shares(num_tiles, number // reads, ahead)
        for groups in _shares(num_groups, reads)
    ]


def _shares(number: int, num_shares: int, ahead: int = 0) -> list[slice]:
    """Split into shares of nearly equal size, the first with ``ahead`` more. None is empty."""
    ends = [ahead - (ahead - number) * i // num_shares for i in range(1, num_shares)]
    return [slice(first, stop) for first, stop in pairwise([0, *ends, number]) if first < stop]


def _add(y: Floats, bias: Floats | None, residual: Floats | None) -> None:
    """Add the bias and the residual to y. The residual may have fewer rows and columns."""
    if bias is not None:
        y += bias
    if residual is not None:
        own = y[: len(residual), : residual.shape[1]]
        own += residual


def _pieces(start: int, stop: int, width: int) -> Iterator[tuple[int, int]]:
    """Yield the range, cut at the borders of tiles."""
    while start < stop:
        end = min(stop, (start // width + 1) * width)
        yield start, end
        start = end
