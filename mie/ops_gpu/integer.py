"""Multiply rounded activations with integer weights, as `mie.ops.weights.integer` defines it.

One launch rounds rows to records of codes, scales and sums (kernels/round_rows.cu). The products
read the records (kernels/integer.cuh). Their bits depend neither on the kernel nor on the batch.
"""

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Array
from mie.ops_gpu.arena import Empty
from mie.ops_gpu.arrays import block_threads, kernel_type
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.weights import TILE, Matrix, QuantisedMatrix, codes_of

RECORD, RECORD_BYTES = 128, 160
"""Inputs of a record, and its bytes: codes, four scales and four sums (kernels/rounded.cuh)."""

MOST_FEW = 64
"""Most rows for which the warps of a block share K."""

MANY_ROWS, STAGES = 64, 3
"""Rows of a block for many rows, and records of each row in its shared memory.

Outputs are 8,192 divided by the rows. Blocks of experts have half as many rows.
"""

THREADS, SLICE = 256, 512
"""Threads of a block, and inputs that its warps multiply at a time for few rows."""


def is_integer(part: Matrix) -> bool:
    """Whether products with the part round activations."""
    return isinstance(part, QuantisedMatrix) and codes_of(part.form) != "e4m3"


def record_bytes(depth: int) -> int:
    """Return the bytes of a rounded row of ``depth`` inputs."""
    return ceil_div(depth, RECORD) * RECORD_BYTES


def few_bytes(part: QuantisedMatrix) -> int:
    """Return the shared memory of a block for few rows: two slices of 256 terms each segment."""
    return 2 * SLICE // min(part.form.group, 32) * 4 * THREADS


def many_sizes(num_rows: int) -> tuple[int, int]:
    """Return the outputs and the shared memory of a block for many rows."""
    return 8192 // num_rows, STAGES * num_rows * RECORD_BYTES


class IntegerProducts:
    """Launches the products. Sums are float32, and results are rounded to the rows' dtype once."""

    def __init__(self, launcher: Launcher, empty: Empty) -> None:
        self._launcher, self._empty = launcher, empty

    def round(self, x: Array) -> Array:
        """Return the records [R, bytes] of rows x [R, K]."""
        num_rows, depth = x.shape
        shape = (num_rows, record_bytes(depth))
        rows = self._empty("rounded rows", shape, np.dtype(np.uint8))
        kernel = self._launcher.kernel("round_rows.cu", f"round_rows<{kernel_type(x)}>")
        threads = block_threads(ceil_div(depth, 4))
        kernel((num_rows,), (threads,), (x, rows, np.int32(depth)))
        return rows

    def linear(
        self,
        rows: Array,
        part: QuantisedMatrix,
        out: Array,
        *,
        bias: Array | None = None,
        is_added: bool = False,
        first: int = 0,
    ) -> None:
        """Compute the product of rounded rows, plus bias, plus what is there if ``is_added``.

        The columns of ``out`` [R, M] from ``first`` on are written.
        """
        (num_rows, stride), (width, depth) = out.shape, part.shape
        is_few = num_rows <= MOST_FEW
        tiles = 1 if num_rows <= 8 else 2
        grid = (ceil_div(num_rows, 8 * tiles), ceil_div(width, 2 * TILE // tiles))
        parameters, shared_bytes = [str(tiles)], few_bytes(part)
        if not is_few:
            outputs, shared_bytes = many_sizes(MANY_ROWS)
            grid, parameters = (ceil_div(num_rows, MANY_ROWS), ceil_div(width, outputs)), []
        words = ", ".join([kernel_type(out), *part.parameters, *parameters])
        name = f"integer_{'few' if is_few else 'many'}<{words}>"
        numbers = (num_rows, depth, part.shift, width, stride, int(is_added))
        args = (rows, *part.arrays, bias, out.reshape(-1)[first:], *map(np.int32, numbers))
        kernel = self._launcher.kernel("integer_products.cu", name)
        kernel(grid, (THREADS,), args, shared_bytes=shared_bytes)

    def experts(
        self,
        rows: Array,
        matrix: QuantisedMatrix,
        bias: Array | None,
        tiles: Array,
        out: Array,
        *,
        is_few: bool,
    ) -> None:
        """Compute the products of sorted rows with the matrices of their experts.

        ``tiles`` [most, 3] has up to 8 rows in each tile if ``is_few``, and else up to 32.
        """
        width, depth = matrix.shape
        words = [kernel_type(out), *matrix.parameters, "true" if is_few else "false"]
        kernel = self._launcher.kernel(
            "integer_products.cu", f"integer_experts<{', '.join(words)}>"
        )
        outputs, shared_bytes = (2 * TILE, few_bytes(matrix)) if is_few else many_sizes(32)
        grid = (len(tiles), ceil_div(width, outputs))
        numbers = map(np.int32, (depth, matrix.shift, width))
        args = (rows, *matrix.arrays, bias, tiles, out, *numbers)
        kernel(grid, (THREADS,), args, shared_bytes=shared_bytes)
