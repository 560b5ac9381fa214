"""What a plan for the matrix product is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from numpy.typing import NDArray

from mie.ops.arrays import Floats

BYTES_PER_THREAD = 5 << 18
"""Weights to read from which on another thread helps more than handing over costs it."""
ROWS_PER_READ = 4
"""Rows whose arithmetic takes about as long as reading the weights."""


class Matrix(Protocol):
    """A matrix [K, N] and its bias [N], as its plan keeps them: once."""

    nbytes: int

    def apply(self, x: Floats, residual: Floats | None) -> Floats:
        """`ops.linear.linear`."""


class LinearPlan(Protocol):
    """A layout of matrices, and the way to multiply by one."""

    name: str
    is_batch_invariant: bool
    """Whether a row's result is the same bit for bit whatever other rows there are."""

    def load(
        self,
        shape: tuple[int, int],
        blocks: Iterable[NDArray[Any]],
        bias: NDArray[Any] | None = None,
    ) -> Matrix:
        """A matrix from the rows of a checkpoint's (N, K), block by block."""


def work_bytes(weight_bytes: int, num_rows: int) -> int:
    """The weights read, as often as the arithmetic of all rows takes."""
    return weight_bytes * -(-num_rows // ROWS_PER_READ)
