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
from mie.ops_gpu.arrays import kernel_type, next_power_of_two
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.weights import CODE_BITS, TILE, UNIT, Matrix, QuantisedMatrix

ChangesOf = Callable[[slice], Array]
"""Returns the changes [R, N] of some rows of a product in float32, which are added like a bias."""

MAX_WARPS = 8
"""Most warps of a block, which share K."""

OUTPUT_TILE = 2 * TILE
"""Outputs of a block in an iteration."""

SUMS_BYTES = 4 * 8 * (OUTPUT_TILE + 4)
"""Shared memory of a warp's sums of eight rows."""

ROOM_FOR_ROWS = 8 << 10
"""Shared memory for rows of x with which blocks are counted, whatever the number of rows."""

MAX_OUTPUTS = 65_535 * TILE
"""Most outputs of a product: CUDA allows 65,535 blocks in the second direction of a grid."""

BLOCKS_PER_MULTIPROCESSOR = 2
"""Most blocks that the registers allow."""

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
class ProductShape:
    """The shape of a block's tile. kernels/product_shape.cuh computes the same numbers."""

    parameters: str
    rows: int
    """Rows of a block."""
    inputs: int
    """Inputs of a warp in an iteration."""
    weight_bytes: int
    """Bytes of the weights of a stage."""
    row_bytes: int
    """Bytes of a row of x in a stage."""
    stages: int
    """Stages of a warp's ring."""
    ring_bytes: int
    """Bytes of the weights in a warp's ring for up to 8 rows."""

    def streamed_bytes(self, depth: int) -> int:
        """Return the shared memory of a block whose rows come through the ring."""
        stage_bytes = self.weight_bytes + self.rows * self.row_bytes
        return self._warps(depth) * (SUMS_BYTES + self.stages * stage_bytes)

    def kept_bytes(self, depth: int, num_rows: int, num_slices: int) -> int:
        """Return the shared memory of a block that keeps its rows' inputs of some iterations."""
        kept = num_slices * min(num_rows, self.rows) * self.row_bytes
        return self._warps(depth) * (SUMS_BYTES + self.stages * self.weight_bytes + kept)

    def threads(self, depth: int) -> int:
        """Return the threads of a block. Its warps share K."""
        return 32 * self._warps(depth)

    def num_slices(self, depth: int) -> int:
        """Return the number of iterations of an output tile. Each warp has a part of each."""
        return ceil_div(depth, self.inputs * self._warps(depth))

    def _warps(self, depth: int) -> int:
        return min(MAX_WARPS, ceil_div(depth, self.inputs))


def shape_of(
    element: str, weight: Matrix, num_rows: int, *, is_vector: bool, has_norm: bool | None
) -> ProductShape:
    """Return the shape for rows of type ``element``.

    ``is_vector`` says whether the inputs are a multiple of 16 bytes. ``has_norm`` is None for a
    kernel without this choice.
    """
    row_tiles = 1 if element == "float" or num_rows <= 8 else 2 if num_rows <= 16 else 4
    is_quantised = isinstance(weight, QuantisedMatrix)
    matrix = weight.parameters if is_quantised else (element, "64", "false", "32")
    conditions = [is_vector] if has_norm is None else [has_norm, is_vector]
    words = [element, *matrix, str(row_tiles), *map(_word, conditions)]
    return shape_named(f"<{', '.join(words)}>")


def shape_named(parameters: str) -> ProductShape:
    """Return the shape of parameters such as "<f16, nibbles, 32, false, 8, 1, true, true>"."""
    element, codes, span, has_offsets, bits, row_tiles, *_ = parameters.strip("<>").split(", ")
    itemsize, rows = 4 if element == "float" else 2, 8 * int(row_tiles)
    kinds = 2 if has_offsets == "true" else 1
    if codes == element:
        inputs = UNIT // 2
        tile_bytes = TILE * inputs * itemsize
    else:
        inputs = UNIT
        records = kinds * TILE * (UNIT // int(span)) * int(bits) // 8
        units = 4 * kinds * TILE if bits == "8" else 0
        tile_bytes = TILE * UNIT * CODE_BITS[codes] // 8 + records + units
    row_bytes, weight_bytes = inputs * itemsize, OUTPUT_TILE // TILE * tile_bytes
    budgets = {8: 84 << 10, 16: 84 << 10, 32: 88 << 10}
    stages = {
        count: budget // MAX_WARPS // (weight_bytes + count * row_bytes)
        for count, budget in budgets.items()
    }
    return ProductShape(
        parameters=parameters,
        rows=rows,
        inputs=inputs,
        weight_bytes=weight_bytes,
        row_bytes=row_bytes,
        stages=stages[rows],
        ring_bytes=stages[8] * weight_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How blocks share a product: kernels/stream_k.cuh.

    It depends on the matrix and the chip alone, so a row's result does not depend on its batch.
    """

    num_blocks: int
    kept_slices: int
    """The most iterations of a block with different inputs."""
    stored_tiles: int
    """Output tiles for which each block has room to leave its sums."""


def schedule_of(
    shape: ProductShape, num_tiles: int, depth: int, chip: Chip, meeting: int = 1
) -> Schedule:
    """Return the schedule of ``num_tiles`` output tiles, of which ``meeting`` finish together."""
    warp_bytes = SUMS_BYTES + shape.ring_bytes
    block_bytes = shape.threads(depth) // 32 * warp_bytes + ROOM_FOR_ROWS
    resident = chip.resident_blocks(block_bytes, BLOCKS_PER_MULTIPROCESSOR)
    num_slices = shape.num_slices(depth)
    num_blocks = max(1, min(resident, num_tiles * num_slices))
    assert num_tiles * num_slices * num_blocks < 1 << 32  # kernels/stream_k.cuh
    most = ceil_div(num_tiles * num_slices, num_blocks)
    return Schedule(
        num_blocks=num_blocks,
        kept_slices=min(most, num_slices),
        stored_tiles=2 if meeting == 1 else ceil_div(most, max(1, num_slices)) + 1,
    )


def head_tiles(head_dim: int) -> int:
    """Return the tiles of 16 outputs of a head, such that no output tile has parts of two."""
    return 2 * ceil_div(head_dim // 2, TILE)


def most_sums_bytes(num_rows: int, width: int, chip: Chip) -> int:
    """Return the most bytes of the sums that blocks leave for each other.

    ``width`` is the width of query, key and value heads.
    """
    blocks = BLOCKS_PER_MULTIPROCESSOR * chip.num_multiprocessors
    outputs = width + 3 * blocks * OUTPUT_TILE  # each block has parts of three output tiles at most
    padded_rows = next_power_of_two(max(8, min(num_rows, MOST_SHARED)))
    return 4 * next_power_of_two(padded_rows * outputs)


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
        is_vector = depth * x.dtype.itemsize % 16 == 0
        element, has_norm = kernel_type(x), norm is not None
        shape = shape_of(element, weight, num_rows, is_vector=is_vector, has_norm=has_norm)
        meeting = ceil_div(met_tiles * TILE, OUTPUT_TILE)
        output_tiles = ceil_div(num_tiles * TILE, OUTPUT_TILE)
        schedule = schedule_of(shape, output_tiles, depth, self._chip, meeting)
        groups, blocks = ceil_div(num_rows, shape.rows), schedule.num_blocks
        shared_bytes = shape.kept_bytes(depth, num_rows, schedule.kept_slices)
        streamed_bytes = shape.streamed_bytes(depth)
        is_kept = self._blocks_with(shared_bytes) >= max(1, self._blocks_with(streamed_bytes))
        if not is_kept:
            shared_bytes = streamed_bytes
        size = groups * shape.rows * blocks * schedule.stored_tiles * OUTPUT_TILE
        sums = self._empty("sums of products", (size,), np.dtype(np.float32))
        sharing = [sums, self._counters.zeros(groups * output_tiles)]
        matrix: tuple[Array | None, ...] = (weight, None, None)
        shift = 0
        if isinstance(weight, QuantisedMatrix):
            matrix, shift = weight.arrays, weight.shift
        numbers: list[Any] = [np.int32(size) for size in (num_rows, depth, shift, is_kept, *sizes)]
        numbers.append(np.float32(eps if norm is None else norm.eps))
        parameters = shape.parameters
        if arrays[1] is not None:
            parameters = f"{parameters[:-1]}, true>"
        kernel = self._launcher.kernel("few_rows.cu", f"few_rows_{name}{parameters}")
        args = (x, None if norm is None else norm.weight, *matrix, *arrays, *sharing, *numbers)
        kernel((groups, blocks), (shape.threads(depth),), args, shared_bytes=shared_bytes)

    def _blocks_with(self, shared_bytes: int) -> int:
        """Return how many blocks a multiprocessor holds, or 0."""
        return min(self._chip.blocks_within(shared_bytes), BLOCKS_PER_MULTIPROCESSOR)


def _word(condition: bool) -> str:
    return "true" if condition else "false"
