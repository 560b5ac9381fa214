"""Define the interface of a plan for the matrix product."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from numpy.typing import NDArray

from mie.ops.arrays import Floats

BYTES_PER_THREAD = 5 << 18
"""Bytes of weights from which on another thread saves more than its hand-over costs."""
ROWS_PER_READ = 4
"""Rows whose arithmetic takes about as long as reading the weights."""


class Matrix(Protocol):
    """A matrix [K, N] and its bias [N], stored once in the layout of its plan."""

    nbytes: int

    def apply(self, x: Floats, residual: Floats | None) -> Floats:
        """Compute `ops.linear.linear`."""


class LinearPlan(Protocol):
    """A layout of matrices and the way to multiply by one."""

    name: str
    is_batch_invariant: bool
    """Whether a row's result is the same bit for bit in any batch of rows."""

    def load(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        bias: NDArray[Any] | None = None,
    ) -> Matrix:
        """Load a matrix from the rows of a checkpoint's (N, K), block by block."""


def work_bytes(weight_bytes: int, num_rows: int) -> int:
    """Return the cost of a product in bytes: the weights, scaled by the arithmetic of the rows."""
    return weight_bytes * -(-num_rows // ROWS_PER_READ)
