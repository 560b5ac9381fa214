"""Launch products of 17 to 256 rows with quantised matrices, on their codes (kernels/wide_rows.cu).

The order of a sum depends on the matrix and the chip alone, and differs from the order of
`FewRows`. So a row has the same bits among any number of rows that these kernels take.
"""

import math

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Array
from mie.ops_gpu.arena import Counters, Empty, fresh
from mie.ops_gpu.arrays import kernel_type
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.weights import TILE, UNIT, Matrix, QuantisedMatrix, unit_bytes

MAX_WIDE_ROWS = 256
"""Most rows for which multiplying codes is predicted to be faster than widening them.

docs/gpu/predictions.md has the times.
"""

FEW, MANY = 32, 64
"""Rows of a block: the fewest that have room for all, or as many as there may be."""

OUTPUTS, WARPS, UNITS = 128, 8, 2
"""Outputs and warps of a block, and units of K that its warps share in a stage."""

MOST_STAGES, MOST_SPLITS = 6, 8
"""Most stages of a block, and most splits of K. The last split reads the sums of all."""

MOST_ROUNDS = 2
"""Most blocks of a multiprocessor, one after the other, if K is split.

This bounds the memory of the sums.
"""

STARTING_STAGES = 2
"""Time that a block takes besides its stages, in stages: its copies begin, and its sums leave."""


class WideRows:
    """Launches the products. Sums are float32, and results are rounded to the rows' dtype once."""

    def __init__(self, launcher: Launcher, chip: Chip, empty: Empty | None = None) -> None:
        self._launcher, self._chip = launcher, chip
        self._empty = empty or fresh(launcher.xp)
        self._counters = Counters(launcher.xp)

    def linear(
        self,
        x: Array,
        weight: QuantisedMatrix,
        out: Array,
        *,
        bias: Array | None = None,
        is_added: bool = False,
        first: int = 0,
    ) -> None:
        """Compute x @ weight.T + bias, plus what is there if ``is_added``.

        x [R, K], weight [N, K], bias [N], out [R, M]: the columns from ``first`` on are written.
        """
        (num_rows, stride), (width, depth) = out.shape, weight.shape
        rows = FEW if num_rows <= FEW else MANY
        stages = stages_of(weight, rows, self._chip)
        splits = splits_of(weight.shape, self._chip)
        grid = (ceil_div(num_rows, rows), ceil_div(width, OUTPUTS), splits)
        sharing: tuple[Array | None, Array | None] = (None, None)
        if splits > 1:
            size = (math.prod(grid) * rows * OUTPUTS,)
            sums = self._empty("sums of products", size, np.dtype(np.float32))
            sharing = sums, self._counters.zeros(grid[0] * grid[1] * WARPS)
        words = [kernel_type(x), *weight.parameters, str(rows // 8), str(stages)]
        kernel = self._launcher.kernel("wide_rows.cu", f"wide_linear<{', '.join(words)}>")
        arrays = (x, *weight.arrays, bias, out.reshape(-1)[first:], *sharing)
        numbers = (num_rows, depth, weight.shift, width, stride, int(is_added))
        shared_bytes = stages * stage_bytes(weight, rows)
        args = (*arrays, *map(np.int32, numbers))
        kernel(grid, (32 * WARPS,), args, shared_bytes=shared_bytes)


def takes(x: Array, weight: Matrix) -> bool:
    """Whether the kernels multiply ``x`` with a matrix."""
    return (
        isinstance(weight, QuantisedMatrix)
        and len(x) <= MAX_WIDE_ROWS
        and x.dtype.itemsize == 2
        and x.shape[1] % 8 == 0
    )


def stage_bytes(weight: QuantisedMatrix, rows: int) -> int:
    """Return the shared memory of a stage of a block with that many rows."""
    return UNITS * (OUTPUTS // TILE * unit_bytes(weight.form) + rows * UNIT * 2)


def stages_of(weight: QuantisedMatrix, rows: int, chip: Chip) -> int:
    """Return the number of stages of a block. Two blocks of few rows fit a multiprocessor."""
    room = chip.shared_bytes // (MANY // rows) - 1024  # CUDA reserves 1 KB of each block
    return min(MOST_STAGES, max(2, room // stage_bytes(weight, rows)))


def splits_of(shape: tuple[int, int], chip: Chip) -> int:
    """Return how many blocks share K, so that all multiprocessors have about the same work.

    It depends on the matrix [N, K] and the chip alone, so a row's result does not depend on its
    batch.
    """
    width, depth = shape
    stages, groups = ceil_div(depth, UNIT * UNITS), ceil_div(width, OUTPUTS)

    def time(splits: int) -> int:
        """Return the stages of the busiest multiprocessor, one block after the other."""
        rounds = ceil_div(groups * splits, chip.num_multiprocessors)
        return rounds * (ceil_div(stages, splits) + STARTING_STAGES)

    most = min(MOST_SPLITS, MOST_ROUNDS * chip.num_multiprocessors // groups)
    best = min(range(1, max(1, most) + 1), key=time)  # the fewest of the fastest
    return ceil_div(stages, ceil_div(stages, best))


def most_sums_bytes(num_rows: int, chip: Chip) -> int:
    """Return the most bytes of the sums that splits leave for each other."""
    groups = ceil_div(min(num_rows, MAX_WIDE_ROWS), MANY)
    return 4 * groups * MOST_ROUNDS * chip.num_multiprocessors * MANY * OUTPUTS
