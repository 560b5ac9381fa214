"""Launch our own matrix products, for steps of few rows and for results that no batch changes.

With few rows a product waits for its weights, and each launch of a small operator costs as much as
a part of them. These kernels normalise, multiply, and rotate, gate or add in one launch
(kernels/few_rows.cuh). Their order of summation is the same for every number of rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Array, StepBatch
from mie.ops_gpu.arena import Counters, Empty, fresh
from mie.ops_gpu.arrays import kernel_type
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.weights import TILE, UNIT, Matrix, QuantisedMatrix

ChangesOf = Callable[[slice], Array]
"""Returns the changes [R, N] of some rows of a product in float32, which are added like a bias."""

MAX_WARPS = 8
"""Most warps of a block, each with a unit of every slice of K."""

MAX_OUTPUTS = 65_535 * TILE
"""Most outputs of a product: CUDA allows 65,535 blocks in the second direction of a grid."""

BLOCKS_PER_MULTIPROCESSOR = 2
"""Blocks that the registers allow."""

MOST_SHARED = 256
"""Most rows of a launch with blocks that leave sums for each other. It bounds their memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Norm:
    """The RMS norm that is applied to the rows before a product."""

    weight: Array  # [K]
    eps: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Heads:
    """Where query, key and value heads go (`rope_write_kv`), and their own norms."""

    q: Array  # [T, Hq, Dh], written
    kv: Array  # [N, 2, Hkv, B, Dh], written
    rope_table: Array  # [P, 2, Dh / 2]
    batch: StepBatch
    q_norm: Array | None = None  # [Dh]
    k_norm: Array | None = None  # [Dh]


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a kernel computes: kernels/few_rows.cuh has the same rules."""

    parameters: str
    rows: int
    """Rows of a block."""
    tiles: int
    """Number of tiles of outputs in a set. A block computes a set at once."""
    slice_bytes: int
    """Shared memory of a slice of its rows."""
    sums_bytes: int
    """Shared memory of the sums of its warps."""
    loops: bool
    """Whether a block may take several sets."""

    @property
    def shared_bytes(self) -> int:
        """The shared memory of a block that copies one slice after the other."""
        return max(2 * self.slice_bytes, self.sums_bytes)

    def kept_bytes(self, num_slices: int) -> int:
        """Return the shared memory of a block that keeps its slices for several sets."""
        return num_slices * self.slice_bytes + self.sums_bytes


def way_of(
    element: str, weight: Matrix, num_rows: int, depth: int, *, has_norm: bool | None
) -> Way:
    """Return the way to multiply rows of type ``element``.

    ``has_norm`` is None for a kernel without this choice.
    """
    itemsize = 4 if element == "float" else 2
    row_tiles = 1 if element == "float" or num_rows <= 8 else 2 if num_rows <= 16 else 4
    is_quantised = isinstance(weight, QuantisedMatrix)
    matrix = weight.parameters if is_quantised else (element, "64", "false", "32")
    conditions = [depth * itemsize % 16 == 0]
    if has_norm is not None:
        conditions.insert(0, has_norm)
    words = [element, *matrix, str(row_tiles), *map(_word, conditions)]
    return way_named(f"<{', '.join(words)}>")


def way_named(parameters: str) -> Way:
    """Return the way of a kernel's parameters, such as "<f16, nibbles, 32, false, 8, 1, true>"."""
    element, codes, span, has_offsets, _, row_tiles, *_ = parameters.strip("<>").split(", ")
    rows = 8 * int(row_tiles)
    is_small = (codes, span, has_offsets) == ("nibbles", "64", "false") and element != "float"
    tiles = 4 if is_small and rows == 8 else 2  # as many as the registers allow
    itemsize, gap = 4 if element == "float" else 2, 32 if span == "16" else 64
    is_raised = element == "bf16" and codes != element
    return Way(
        parameters=parameters,
        rows=rows,
        tiles=tiles,
        slice_bytes=rows * (MAX_WARPS * UNIT * itemsize + gap),
        sums_bytes=rows * 4 * MAX_WARPS * TILE * tiles,
        loops=itemsize == 2 and span != "16" and tiles == 2 and not (is_raised and rows == 16),
    )


def splits_of(num_tiles: int, depth: int, chip: Chip) -> int:
    """Return how many blocks share K, so that a matrix of few outputs occupies the chip.

    It depends on the matrix and the chip alone, so a row's result does not depend on its batch.
    """
    slices = num_slices(depth)
    most = BLOCKS_PER_MULTIPROCESSOR * chip.num_multiprocessors // ceil_div(num_tiles, 2)
    return ceil_div(slices, ceil_div(slices, max(1, most)))  # none without a slice


def num_slices(depth: int) -> int:
    """Return the number of slices of K. Each warp of a block has a unit of a slice."""
    return ceil_div(depth, UNIT * warps_of(depth))


def warps_of(depth: int) -> int:
    """Return the number of warps of a block. They share a slice of K."""
    return min(MAX_WARPS, ceil_div(depth, UNIT))


def head_tiles(head_dim: int) -> int:
    """Return the tiles of a head, such that no block has parts of two heads."""
    return 4 * ceil_div(ceil_div(head_dim // 2, TILE), 2)


def most_sums_bytes(num_rows: int, width: int, chip: Chip) -> int:
    """Return the most bytes of the sums that blocks leave for each other.

    ``width`` is the width of query, key and value heads.
    """
    blocks = BLOCKS_PER_MULTIPROCESSOR * chip.num_multiprocessors
    outputs = max(2 * blocks * TILE, 2 * width)
    return 4 * min(num_rows, MOST_SHARED) * outputs


class FewRows:
    """Launches the products. Arguments as in the contract's operators, results rounded once."""

    def __init__(self, launcher: Launcher, chip: Chip, empty: Empty | None = None) -> None:
        self._launcher = launcher
        self._chip = chip
        self._empty = empty or fresh(launcher.xp)
        self._counters = Counters(launcher.xp)

    def linear(
        self,
        x: Array,
        weight: Matrix,
        out: Array,
        *,
        bias: Array | None = None,
        norm: Norm | None = None,
        is_added: bool = False,
        first: int = 0,
        changes: ChangesOf | None = None,
    ) -> None:
        """Compute norm(x) @ weight.T + bias, plus what is there if ``is_added``.

        x [R, K], weight [N, K], bias [N], out [R, M]: the columns from ``first`` on are written.
        """
        width, stride = len(weight), out.shape[1]
        sizes = [width, stride, int(is_added)]
        for rows in self._launches(x):
            to = out[rows].reshape(-1)[first:]
            own = None if changes is None else changes(rows).reshape(-1)[first:]
            arrays, num_tiles = [bias, own, to], ceil_div(width, TILE)
            self._launch("linear", x[rows], weight, norm, arrays, sizes, num_tiles)

    def gated(
        self,
        x: Array,
        weight: Matrix,
        out: Array,
        *,
        bias: Array | None = None,
        norm: Norm | None = None,
        changes: ChangesOf | None = None,
    ) -> None:
        """Compute the gated activation of a product. weight [2 F, K], bias [2 F], out [R, F]."""
        dim = len(weight) // 2
        for rows in self._launches(x):
            tiles = 2 * ceil_div(dim, TILE)
            arrays = [bias, changes and changes(rows), out[rows]]
            self._launch("gated", x[rows], weight, norm, arrays, [dim], tiles)

    def heads(
        self,
        x: Array,
        weight: Matrix,
        to: Heads,
        *,
        bias: Array | None,
        norm: Norm | None,
        changes: ChangesOf | None = None,
    ) -> None:
        """Compute query, key and value heads, rotate them, and write keys and values."""
        batch, num_heads, head_dim = to.batch, to.q.shape[1], to.q.shape[2]
        num_kv_heads, block_size = to.kv.shape[2:4]
        tiles = head_tiles(head_dim)
        sizes = [num_heads, num_kv_heads, head_dim, tiles, block_size, len(weight)]
        eps = 0.0 if norm is None else norm.eps
        for rows in self._launches(x):
            places = [to.rope_table, batch.positions[rows], batch.slot_mapping[rows]]
            norms, written = [to.q_norm, to.k_norm], [to.q[rows], to.kv]
            arrays = [bias, changes and changes(rows), *norms, *places, *written]
            num_tiles = tiles * (num_heads + 2 * num_kv_heads)
            blocks = 1 if to.k_norm is None else tiles
            self._launch("qkv", x[rows], weight, norm, arrays, sizes, num_tiles, blocks, eps)

    def _launches(self, x: Array) -> list[slice]:
        return [slice(i, i + MOST_SHARED) for i in range(0, len(x), MOST_SHARED)]

    def _launch(
        self,
        name: str,
        x: Array,
        weight: Matrix,
        norm: Norm | None,
        arrays: list[Array | None],
        sizes: list[int],
        num_tiles: int,
        met_tiles: int = 1,
        eps: float = 0.0,
    ) -> None:
        """Launch a kernel over ``num_tiles`` of outputs. ``met_tiles`` of them meet in a block.

        ``arrays`` begin with the bias and the changes of rows.
        """
        num_rows, depth = x.shape
        assert weight.shape[1] == depth
        way = way_of(kernel_type(x), weight, num_rows, depth, has_norm=norm is not None)
        splits = splits_of(num_tiles, depth, self._chip)
        groups, sets = ceil_div(num_rows, way.rows), ceil_div(num_tiles, way.tiles)
        shared_bytes = way.kept_bytes(ceil_div(num_slices(depth), splits))
        room = self._chip.resident_blocks(shared_bytes, BLOCKS_PER_MULTIPROCESSOR)
        is_kept = way.loops and room == BLOCKS_PER_MULTIPROCESSOR * self._chip.num_multiprocessors
        grid = (groups, min(sets, max(1, room // (groups * splits))), splits)
        if not is_kept:
            shared_bytes, grid = way.shared_bytes, (groups, sets, splits)
        sharing: list[Array | None] = [None, None]
        if splits > 1 or met_tiles > way.tiles:
            size = splits * groups * way.rows * sets * way.tiles * TILE
            sums = self._empty("sums of products", (size,), np.dtype(np.float32))
            sharing = [sums, self._counters.zeros(groups * sets)]
        matrix: tuple[Array | None, ...] = (weight, None, None)
        shift = 0
        if isinstance(weight, QuantisedMatrix):
            matrix, shift = weight.arrays, weight.shift
        numbers: list[Any] = [np.int32(size) for size in (num_rows, depth, shift, is_kept, *sizes)]
        numbers.append(np.float32(eps if norm is None else norm.eps))
        parameters = way.parameters if arrays[1] is None else f"{way.parameters[:-1]}, true>"
        kernel = self._launcher.kernel("few_rows.cu", f"few_rows_{name}{parameters}")
        args = (x, None if norm is None else norm.weight, *matrix, *arrays, *sharing, *numbers)
        kernel(grid, (32 * warps_of(depth),), args, shared_bytes=shared_bytes)


def _word(condition: bool) -> str:
    return "true" if condition else "false"
