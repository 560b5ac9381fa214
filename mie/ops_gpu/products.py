"""Choose how a matrix is multiplied: by our kernels, by cuBLAS, or widened first and by cuBLAS."""

from typing import Any

import numpy as np

from mie.base.arithmetic import ceil_div
from mie.ops.backend import Array
from mie.ops_gpu import wide_rows
from mie.ops_gpu.adapters import Changes, CupyAdapters
from mie.ops_gpu.arena import Empty
from mie.ops_gpu.arrays import block_threads, element_type, kernel_type
from mie.ops_gpu.chip import Chip
from mie.ops_gpu.few_rows import ChangesOf, FewRows, Heads, Norm
from mie.ops_gpu.gemm import Gemm
from mie.ops_gpu.integer import IntegerProducts, is_integer
from mie.ops_gpu.launcher import Launcher
from mie.ops_gpu.weights import TILE, UNIT, CupyLinear, Matrix, QuantisedMatrix
from mie.ops_gpu.wide_rows import WideRows

MAX_ROWS = 16
"""Most rows that the kernels of few rows multiply, if results may depend on the batch.

cuBLAS takes more rows. The codes of a quantised matrix are multiplied with up to
`wide_rows.MAX_WIDE_ROWS` rows. For more the matrix is widened first, and cuBLAS multiplies.
"""

WIDENED_BYTES = 64 << 20
"""Memory in which a quantised matrix is widened, one part of its rows after the other."""


class Products:
    """Multiplies rows of a step with matrices."""

    def __init__(
        self,
        launcher: Launcher,
        gemm: Gemm,
        chip: Chip,
        empty: Empty,
        is_deterministic: bool,
        rounds_activations: bool = False,
        adapters: CupyAdapters | None = None,
    ) -> None:
        self._launcher = launcher
        self._gemm = gemm
        self._empty = empty
        self._is_deterministic = is_deterministic
        self._few_rows = FewRows(launcher, chip, empty)
        self._wide_rows = WideRows(launcher, chip, empty)
        self._rounds_activations = rounds_activations
        self.integer = IntegerProducts(launcher, empty)
        self._adapters = adapters

    def rounds(self, part: Matrix) -> bool:
        """Whether products with the part round activations."""
        return self._rounds_activations and is_integer(part)

    def takes_norm(self, x: Array, weight: CupyLinear) -> bool:
        """Whether `linear` has kernels that normalise ``x``."""
        return self._are_few(x) and not any(map(self.rounds, weight.parts))

    def _are_few(self, x: Array) -> bool:
        """Whether our kernels multiply ``x`` with a matrix, if activations are not rounded."""
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

        A norm needs `takes_norm`. The rows' adapters change the product.
        """
        rounded: Array | None = None
        changes = self._changes(x, weight, norm)
        added = of_rows(changes) if self.takes_norm(x, weight) else None
        for part, bias, first in weight.with_places():
            if isinstance(part, QuantisedMatrix) and self.rounds(part):
                assert norm is None
                rounded = self.integer.round(x) if rounded is None else rounded
                self.integer.linear(rounded, part, out, bias=bias, is_added=is_added, first=first)
            elif self._are_few(x):
                how: dict[str, Any] = {"bias": bias, "norm": norm, "is_added": is_added}
                self._few_rows.linear(x, part, out, **how, first=first, changes=added)
            else:
                assert norm is None
                self._many_rows(x, part, bias, out, first, is_added=is_added)
        if changes is not None and added is None:
            changes.add(out)

    def gated(self, x: Array, weight: CupyLinear, out: Array, norm: Norm) -> bool:
        """Compute the gated activation of few rows, unless no kernel has the matrix's shape."""
        [*others, part] = weight.parts
        if others or not self.takes_norm(x, weight) or not _is_aligned(part, len(part) // 2):
            return False
        changes = of_rows(self._changes(x, weight, norm))
        self._few_rows.gated(x, part, out, bias=weight.bias, norm=norm, changes=changes)
        return True

    def takes_heads(self, x: Array, weight: CupyLinear, head_dim: int) -> bool:
        """Whether `heads` has a kernel for few rows and this matrix."""
        [*others, part] = weight.parts
        return not others and self.takes_norm(x, weight) and _is_aligned(part, head_dim // 2)

    def heads(self, x: Array, weight: CupyLinear, to: Heads, norm: Norm | None) -> None:
        """Compute the heads of few rows, rotated, with keys and values in the cache."""
        changes = of_rows(self._changes(x, weight, norm))
        how: dict[str, Any] = {"bias": weight.bias, "norm": norm, "changes": changes}
        self._few_rows.heads(x, weight.parts[0], to, **how)

    def _changes(self, x: Array, weight: CupyLinear, norm: Norm | None) -> Changes | None:
        return None if self._adapters is None else self._adapters.changes(x, weight, norm)

    def _many_rows(
        self, x: Array, part: Matrix, bias: Array | None, out: Array, first: int, *, is_added: bool
    ) -> None:
        if not isinstance(part, QuantisedMatrix):
            self._gemm.matmul(x, part, bias, out, first, is_added=is_added)
            return
        if wide_rows.takes(x, part):
            self._wide_rows.linear(x, part, out, bias=bias, first=first, is_added=is_added)
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
        sizes = (np.int32(size) for size in (first, num_rows, depth, matrix.shift))
        grid = (ceil_div(ceil_div(depth, UNIT), 8), ceil_div(num_rows, TILE))
        args = (*matrix.arrays, out, *sizes)
        self._launcher.kernel("widen_weights.cu", name)(grid, (256,), args)

    def gather(self, name: str, table: Matrix, rows: Array, dtype: np.dtype[np.generic]) -> Array:
        """Return the rows of a matrix as a new array [R, K] of ``dtype``."""
        depth = table.shape[1]
        out = self._empty(name, (len(rows), depth), dtype)
        if isinstance(table, QuantisedMatrix):
            element = element_type(dtype)
            kernel = f"gather_weights<{', '.join([element, *table.parameters])}>"
            args = (*table.arrays, rows, out, np.int32(depth), np.int32(table.shift))
            threads = block_threads(4 * ceil_div(depth, UNIT))
            self._launcher.kernel("widen_weights.cu", kernel)((len(rows),), (threads,), args)
            return out
        kernel = f"gather_rows<{kernel_type(table)}>"
        threads = block_threads(depth * table.dtype.itemsize // 16)
        gather = self._launcher.kernel("gather_rows.cu", kernel)
        gather((len(rows),), (threads,), (table, rows, out, np.int32(depth)))
        return out


def of_rows(changes: Changes | None) -> ChangesOf | None:
    """Return the changes as the kernels of few rows take them."""
    return None if changes is None else changes.of


def _is_aligned(part: Matrix, outputs: int) -> bool:
    """Whether a tile of a quantised matrix has outputs of one half."""
    return not isinstance(part, QuantisedMatrix) or outputs % TILE == 0
