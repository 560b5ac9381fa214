"""Define what the plans for the matrix product have in common."""

from __future__ import annotations

from typing import Protocol

from mie.arithmetic import ceil_div
from mie.ops.arrays import Floats

ROWS_PER_READ = 4
"""Rows whose arithmetic takes about as long as reading the weights."""


class Matrix(Protocol):
    """A matrix [K, N] and its bias [N], stored once in the layout of its plan."""

    nbytes: int

    def apply(self, x: Floats, residual: Floats | None, *, is_brief: bool = False) -> Floats:
        """Compute `ops.linear.linear`. A brief result may last only until the next product."""


def work_bytes(weight_bytes: int, num_rows: int) -> int:
    """Return the cost of a product in bytes: the weights, scaled by the arithmetic of the rows."""
    return weight_bytes * ceil_div(num_rows, ROWS_PER_READ)
