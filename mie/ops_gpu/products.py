"""Choose how a matrix is multiplied: by our kernels, by cuBLAS, or widened first and by cuBLAS."""

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Array
from mie.ops_gpu.arena import Empty
from mie.ops_gpu.arrays import block_threads, element_type, kernel_type
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.few_rows import FewRows, Heads, Norm
from mie.ops_gpu.gemm import Gemm
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.weights import TILE, UNIT, CupyLinear, Matrix, QuantisedMatrix

MAX_ROWS = 16
"""Most rows that our kernels multiply with a matrix, if results may depend on the batch.

cuBLAS takes more rows. A quantised matrix is widened for it first (docs/gpu/h200.md has the times).
"""

WIDENED_BYTES = 64 << 20
"""Memory in which a quantised matrix is widened, one part of its rows after the other."""


class Products:
    """Multiplies rows of a step with matrices."""

    def __init__(
        self, launcher: Launcher, gemm: Gemm, chip: Chip, empty: Empty, is_deterministic: bool
    ) -> None:
        self._launcher = launcher
        self._gemm = gemm
        self._empty = empty
        self._is_deterministic = is_deterministic
        self._few_rows = FewRows(launcher, chip, empty)

    def are_few(self, x: Array) -> bool:
        """Whether our kernels multiply ``x`` with any matrix."""
        return self._is_deterministic or len(x) <= MAX_ROWS

    def linear(
        self,
        x: Array,
        weight: CupyLinear,
        out: Array,
        *,
        norm: Norm | None = None,
        is_added: bool = False,
    ) -> None:
        """Compute out [R, N] = norm(x) @ weight.T + bias, plus the old ``out`` if ``is_added``.

        A norm needs few rows.
        """
        for part, bias, first in weight.with_places():
            if self.are_few(x):
                self._few_rows.linear(
                    x, part, out, bias=bias, norm=norm, is_added=is_added, first=first
                )
            else:
                assert norm is None
                self._many_rows(x, part, bias, out, first, is_added=is_added)

    def gated(self, x: Array, weight: CupyLinear, out: Array, norm: Norm) -> bool:
        """Compute the gated activation of few rows, unless no kernel has the matrix's shape."""
        [*others, part] = weight.parts
        if others or not self.are_few(x) or not _is_aligned(part, len(part) // 2):
            return False
        self._few_rows.gated(x, part, out, bias=weight.bias, norm=norm)
        return True

    def takes_heads(self, x: Array, weight: CupyLinear, head_dim: int) -> bool:
        """Whether `heads` has a kernel for few rows and this matrix."""
        [*others, part] = weight.parts
        return not others and self.are_few(x) and _is_aligned(part, head_dim // 2)

    def heads(self, x: Array, weight: CupyLinear, to: Heads, norm: Norm | None) -> None:
        """Compute the heads of few rows, rotated, with keys and values in the cache."""
        self._few_rows.heads(x, weight.parts[0], to, bias=weight.bias, norm=norm)

    def _many_rows(
        self, x: Array, part: Matrix, bias: Array | None, out: Array, first: int, *, is_added: bool
    ) -> None:
        if not isinstance(part, QuantisedMatrix):
            self._gemm.matmul(x, part, bias, out, first, is_added=is_added)
            return
        num_rows, depth = part.shape
        most = max(TILE, WIDENED_BYTES // (depth * x.dtype.itemsize) // TILE * TILE)
        for row in range(0, num_rows, most):
            rows = slice(row, min(row + most, num_rows))
            widened = self._empty("widened", (rows.stop - row, depth), x.dtype)
            self._widen(part, widened, row // TILE)
            of_rows = None if bias is None else bias[rows]
            self._gemm.matmul(x, widened, of_rows, out, first + row, is_added=is_added)

    def _widen(self, matrix: QuantisedMatrix, out: Array, first: int) -> None:
        """Write the weights of some rows, beginning with a tile, to ``out``."""
        name = f"widen_weights<{', '.join([kernel_type(out), *matrix.parameters])}>"
        num_rows, depth = out.shape
        shift = matrix.form.group.bit_length() - 1
        sizes = (np.int32(size) for size in (first, num_rows, depth, shift))
        grid = (ceil_div(ceil_div(depth, UNIT), 8), ceil_div(num_rows, TILE))
        arrays = (matrix.codes, matrix.scales, matrix.offsets, out)
        self._launcher.kernel("widen_weights.cu", name)(grid, (256,), (*arrays, *sizes))

    def gather(self, name: str, table: Matrix, rows: Array, dtype: np.dtype[np.generic]) -> Array:
        """Return the rows of a matrix as a new array [R, K] of ``dtype``."""
        depth = table.shape[1]
        out = self._empty(name, (len(rows), depth), dtype)
        if isinstance(table, QuantisedMatrix):
            element = element_type(dtype)
            kernel = f"gather_weights<{', '.join([element, *table.parameters])}>"
            shift = np.int32(table.form.group.bit_length() - 1)
            args = (table.codes, table.scales, table.offsets, rows, out, np.int32(depth), shift)
            threads = block_threads(4 * ceil_div(depth, UNIT))
            self._launcher.kernel("widen_weights.cu", kernel)((len(rows),), (threads,), args)
            return out
        kernel = f"gather_rows<{kernel_type(table)}>"
        threads = block_threads(depth * table.dtype.itemsize // 16)
        gather = self._launcher.kernel("gather_rows.cu", kernel)
        gather((len(rows),), (threads,), (table, rows, out, np.int32(depth)))
        return out


def _is_aligned(part: Matrix, outputs: int) -> bool:
    """Whether a tile of a quantised matrix has outputs of one half."""
    return not isinstance(part, QuantisedMatrix) or outputs % TILE == 0
